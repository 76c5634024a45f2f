"""Public names that are imported on first use, so that a package with many of them costs nothing to import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from sys import modules


def lazy_names(
    package: str, homes: Mapping[str, str], submodules: Iterable[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package. ``homes``: the module of each public name. ``submodules``: modules
    of the package that are names of it, too."""
    names = {**homes, **{name: f"{package}.{name}" for name in submodules}}

    def get(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = __import__(names[name], fromlist=[name])
        value = module if name not in homes else getattr(module, name)
        setattr(modules[package], name, value)
        return value

    def list_names() -> list[str]:
        present = vars(modules[package])
        return sorted({*names, *present.get("__all__", ()), *(name for name in present if name.startswith("__"))})

    return get, list_names
