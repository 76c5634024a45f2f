"""Loggers that import ``logging`` when there is something to say: it costs as much as all the rest of a start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from logging import Logger


silent = False
"""For a program that tells in words of its own what becomes of its lease. A mistake of ours is logged all the same."""


class _Later:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        if silent and method != "exception":
            return _discard
        import logging

        return getattr(logging.getLogger(self._name), method)


def _discard(*_: object, **__: object) -> None:
    pass


def logger(name: str) -> Logger:
    return cast("Logger", _Later(name))
