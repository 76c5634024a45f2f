"""Loggers that import ``logging`` when there is something to say: it costs as much as all the rest of a start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from logging import Logger


class _Later:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        import logging

        return getattr(logging.getLogger(self._name), method)


def logger(name: str) -> Logger:
    return cast("Logger", _Later(name))
