"""Sinks by what they are called on a command line."""

from __future__ import annotations

from typing import Any

FORMS = "jsonl:FILE|-, openlineage:FILE|-|URL, prov:FILE|-, graph:URL, or MODULE:NAME of a sink, or of a function"

OURS = {
    "graph": ("graph", "Graph"),
    "jsonl": ("jsonlines", "JsonLines"),
    "openlineage": ("openlineage", "OpenLineage"),
    "prov": ("prov", "Prov"),
}


def open_sink(spec: str) -> Any:
    """What ``spec`` names. ValueError when it names none."""
    kind, colon, rest = spec.partition(":")
    if not colon or not rest:
        raise ValueError(f"a sink is {FORMS}, not {spec!r}")
    if kind in OURS:
        return _ours(spec, *OURS[kind], rest)
    return _own(spec, kind, rest)


def _ours(spec: str, module: str, name: str, rest: str) -> Any:
    """From a module of ours whose library may not be installed."""
    from importlib import import_module

    try:
        return getattr(import_module(f"holdfast.lineage.{module}"), name)(rest)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'holdfast[{module}]'") from None
    except Exception as error:
        raise ValueError(f"{spec!r} is no sink: {error}") from None


def _own(spec: str, module: str, name: str) -> Any:
    from importlib import import_module

    try:
        found = getattr(import_module(module), name)
        sink = found if hasattr(found, "publish") and not isinstance(found, type) else found()
    except Exception as error:  # whatever goes wrong in a module or a function of theirs
        raise ValueError(f"a sink is {FORMS}; {spec!r} is none: {type(error).__name__}: {error}") from None
    if not callable(getattr(sink, "publish", None)):
        raise ValueError(f"{spec!r} is no sink: it has no publish(events)")
    return sink
