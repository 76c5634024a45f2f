"""Sinks by what they are called on a command line."""

from __future__ import annotations

from typing import Any

FORMS = "jsonl:FILE, or MODULE:NAME of a sink, or of a function that makes one"


def open_sink(spec: str) -> Any:
    """What ``spec`` names. ValueError when it names none."""
    kind, colon, rest = spec.partition(":")
    if not colon or not rest:
        raise ValueError(f"a sink is {FORMS}, not {spec!r}")
    if kind == "jsonl":
        from holdfast.integrations.jsonlines import JsonLines

        return JsonLines(rest)
    return _own(spec, kind, rest)


def _own(spec: str, module: str, name: str) -> Any:
    from importlib import import_module

    try:
        found = getattr(import_module(module), name)
        sink = found if hasattr(found, "publish") and not isinstance(found, type) else found()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"a sink is {FORMS}; {spec!r} is none: {error}") from None
    if not callable(getattr(sink, "publish", None)):
        raise ValueError(f"{spec!r} is no sink: it has no publish(events)")
    return sink
