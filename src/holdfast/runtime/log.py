"""Loggers that import ``logging`` with their first record: the import takes as long as the rest of a start.

An event is one record with a name, a sentence and fields. The sentence is filled in from the fields, which a JSON
formatter or a test reads from the record: ``record.event``, ``record.lease``, …. Fields whose names come from another
program could be names of the record's own attributes; they are given as ``fields``, and are in ``record.fields``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEBUG, INFO, WARNING, ERROR, CRITICAL = 10, 20, 30, 40, 50

silent = False
"""Set by a program that reports the loss of its lease in its own words. Errors of holdfast itself are logged anyway."""


class Logger:
    def __init__(self, name: str) -> None:
        self._name = name

    def event(
        self,
        event: str,
        level: int = INFO,
        text: str = "",
        *,
        exc_info: bool | BaseException | None = None,
        fields: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Log ``text`` as ``event``, filled in from both kinds of fields; without a text, the event alone.

        ``exc_info`` adds an exception: the one given, or for True the current one.
        """
        if silent and not exc_info:
            return
        import logging

        extra = {"event": event, **more} | ({} if fields is None else {"fields": fields})
        arguments = [every] if (every := {**(fields or {}), **more}) else []
        logging.getLogger(self._name).log(
            level, text or event, *arguments, exc_info=exc_info, extra=extra, stacklevel=2
        )

    def __getattr__(self, method: str) -> Any:
        if silent and method != "exception":
            return _discard
        import logging

        return getattr(logging.getLogger(self._name), method)


def _discard(*_: object, **__: object) -> None:
    pass


def logger(name: str) -> Logger:
    return Logger(name)
