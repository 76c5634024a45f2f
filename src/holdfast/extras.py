"""The error for an optional dependency that is not installed: it says which extra to install."""

from __future__ import annotations


def missing_extra(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"{error.name} is not installed: pip install 'holdfast[{extra}]'", name=error.name)
