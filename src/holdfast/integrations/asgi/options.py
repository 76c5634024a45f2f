"""The arguments of the middleware, checked before the application starts."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Literal, Protocol

import holdfast
from holdfast.integrations.asgi.answer import NEVER, REPEATED, Answer
from holdfast.integrations.asgi.problem import Scope

Decision = Answer | bool
OnPartial = Literal["refuse", "retry"] | Callable[[Scope, bytes], Decision | Awaitable[Decision]]
Client = holdfast.AsyncClient | Callable[[Scope], holdfast.AsyncClient]


class AnswerSeal(Protocol):
    """Encrypts answers before they are stored."""

    def close(self, data: bytes, where: str) -> bytes:
        """At most a third longer than ``data``, plus 1,000 bytes. ``where``: the key of the operation, which no other
        answer has."""

    def open(self, stored: bytes, where: str) -> bytes:
        """What ``close`` was given. Raises when it was given something else, or another ``where``."""


def check_functions(principal: Any, client: Any, on_partial: Any) -> None:
    if not callable(principal) or inspect.iscoroutinefunction(principal):
        raise TypeError(
            f"principal must be a function of the scope that returns the owner of the key, not {principal!r}: "
            "without it one user's key would get another user's answer"
        )
    if not isinstance(client, holdfast.AsyncClient) and not callable(client):
        raise TypeError(f"client must be an AsyncClient, or a function of the scope that returns it, not {client!r}")
    if on_partial not in ("refuse", "retry") and not callable(on_partial):
        raise ValueError(f'on_partial must be "refuse", "retry" or a function, not {on_partial!r}')


def check_number(what: str, value: Any, minimum: float, maximum: float) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be a number, not {type(value).__name__}")
    if not minimum <= value <= maximum:
        raise ValueError(f"{what} must be from {minimum} to {maximum}, not {value}")
    return value


def check_methods(methods: Iterable[str]) -> frozenset[str]:
    return frozenset(name.upper() for name in _names("methods", methods))


def check_headers(names: Iterable[str]) -> frozenset[str]:
    """All headers that are repeated. Raises ValueError for one that must not be."""
    repeated = REPEATED | {name.lower() for name in _names("replay_headers", names)}
    if never := sorted(repeated & NEVER):
        raise ValueError(f"replay_headers must not have {', '.join(never)}: it belongs to one client or one connection")
    return repeated


def _names(what: str, names: Any) -> list[str]:
    listed = [] if isinstance(names, str) else list(names)
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in listed):
        raise TypeError(f"{what} must be names, e.g. a list of str, not {names!r}")
    return listed
