"""Sinks by their name on the command line."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from holdfast.extras import missing_extra

FORMS = "jsonl:FILE|-, openlineage:FILE|-|URL, prov:FILE|-, graph:URL, or MODULE:NAME of a sink, or of a function"

BUILT_IN = {
    "graph": ("graph", "Graph"),
    "jsonl": ("jsonlines", "JsonLines"),
    "openlineage": ("openlineage", "OpenLineage"),
    "prov": ("prov", "Prov"),
}
"""Module of holdfast.lineage and its class. The extra that the module needs has the module's name."""


def open_sink(spec: str) -> Any:
    """The sink that ``spec`` names. ValueError when it names none, or when it cannot be opened."""
    kind, colon, argument = spec.partition(":")
    if not colon or not argument:
        raise ValueError(f"a sink is {FORMS}, not {spec!r}")
    return _open_built_in(spec, kind, argument) if kind in BUILT_IN else _open_custom(spec, kind, argument)


def _open_built_in(spec: str, kind: str, argument: str) -> Any:
    module, name = BUILT_IN[kind]
    try:
        return getattr(import_module(f"holdfast.lineage.{module}"), name)(argument)
    except ModuleNotFoundError as error:
        raise ValueError(str(missing_extra(error, module))) from None
    except Exception as error:
        raise ValueError(f"{spec!r} is no sink: {error}") from None


def _open_custom(spec: str, module: str, name: str) -> Any:
    """A sink in a module of the user, or what a class or function there returns."""
    try:
        attribute = getattr(import_module(module), name)
        is_sink = hasattr(attribute, "publish") and not isinstance(attribute, type)
        sink = attribute if is_sink else attribute()
    except Exception as error:  # the user's code may raise anything
        raise ValueError(f"a sink is {FORMS}; {spec!r} is none: {type(error).__name__}: {error}") from None
    if not callable(getattr(sink, "publish", None)):
        raise ValueError(f"{spec!r} is no sink: it has no publish(events)")
    return sink
