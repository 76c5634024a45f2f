"""Points in our own code where a test can inject a fault. Set by an environment variable, free without it.

    HOLDFAST_FAILPOINTS="after:lease_acquire=kill@3;before:beat_renew=delay:0.2%25"

A point is ``before:`` or ``after:`` and the name of a statement in a noun's ``.sql`` files, or ``script`` for what is
sent without a name: migrations. Before: the statement was not sent yet. After: it was answered, and the caller has not
got the answer yet. A process that dies, pauses or loses its connection at these two moments leaves the most doubt. Only
statements on holdfast's own sessions have points; ``protect`` runs on the user's connection.

    kill            SIGKILL to this process
    stop            SIGSTOP to this process: it is paused until it gets SIGCONT
    pause:SECONDS   blocks the thread; with asyncio on PostgreSQL, the whole loop
    delay:SECONDS   delays this call; with asyncio, the loop goes on
    error           raises Unanswered: the statement may have been executed

``@N``: only on the Nth hit. ``%P``: on each hit with a probability of P per cent. Hits are counted for each process and
point. A delay before a statement counts against its timeout.

Without the variable this module is not imported, and sessions are of their plain classes.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

from holdfast.database.call_queue import Answer
from holdfast.database.sessions import Calls, Row
from holdfast.database.statements import statements
from holdfast.errors import Unanswered
from holdfast.runtime.clock import now

VARIABLE = "HOLDFAST_FAILPOINTS"
SCRIPT = "script"
_ELSEWHERE = frozenset({"protect", "protect_at_commit", "operation_begin", "migrate_lock"})
"""Statements that do not run on a session by name."""
_TIMED = frozenset({"pause", "delay"})
_CHANCE = random.SystemRandom()
_ACTION = re.compile(r"(kill|stop|error|pause|delay)(?::([0-9.]+))?(?:@([0-9]+)|%([0-9.]+))?")

S = TypeVar("S")


class Point:
    """What happens at one point, and how often it was hit."""

    def __init__(self, action: str, seconds: float, nth: int | None, per_cent: float | None) -> None:
        self.action, self.seconds = action, seconds
        self._nth, self._per_cent = nth, per_cent
        self.hits = 0

    def hit(self, where: str) -> float:
        """Inject the fault, if it is due. Returns the seconds by which the caller has to delay the call."""
        self.hits += 1
        if self._nth not in (None, self.hits):
            return 0.0
        if self._per_cent is not None and _CHANCE.uniform(0.0, 100.0) >= self._per_cent:
            return 0.0
        if self.action == "delay":
            return self.seconds
        if self.action == "pause":
            time.sleep(self.seconds)
        elif self.action == "error":
            raise Unanswered(f"failpoint {where}")
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)
        return 0.0


class Points(dict[str, Point]):
    def hit(self, where: str) -> float:
        point = self.get(where)
        return 0.0 if point is None else point.hit(where)


@lru_cache
def parse(text: str) -> Points:
    """The points in ``text``: one object for each text, so that all sessions share their counts."""
    points = Points()
    for item in filter(None, (part.strip() for part in text.split(";"))):
        where, _, what = (part.strip() for part in item.partition("="))
        _check_place(where, item)
        if where in points:
            raise _invalid(item, "the point is named twice")
        points[where] = _point(what, item)
    return points


def _check_place(where: str, item: str) -> None:
    when, _, name = where.partition(":")
    if when not in ("before", "after"):
        raise _invalid(item, "expected before:STATEMENT=ACTION or after:STATEMENT=ACTION")
    if name in _ELSEWHERE:
        raise _invalid(item, f"{name} does not run on a session of holdfast's own")
    if name != SCRIPT and name not in statements("postgres") and ("." in name or name not in statements("sqlite")):
        raise _invalid(item, f"there is no statement {name!r}")


def _point(what: str, item: str) -> Point:
    match = _ACTION.fullmatch(what)
    if match is None:
        raise _invalid(item, "expected kill, stop, error, pause:SECONDS or delay:SECONDS, then @N or %P or nothing")
    action, seconds, nth, per_cent = match.groups()
    if (action in _TIMED) != (seconds is not None):
        raise _invalid(item, f"{action} takes {'seconds' if action in _TIMED else 'no seconds'}")
    try:
        point = Point(action, float(seconds or 0), int(nth) if nth else None, float(per_cent) if per_cent else None)
    except ValueError:
        raise _invalid(item, "not a number") from None
    if nth is not None and int(nth) < 1:
        raise _invalid(item, "@N counts from 1")
    if per_cent is not None and not 0 < float(per_cent) <= 100:
        raise _invalid(item, "%P is more than 0 and at most 100")
    return point


def _invalid(item: str, why: str) -> ValueError:
    return ValueError(f"{VARIABLE}: {item!r}: {why}")


def armed(kind: type[S]) -> type[S]:
    """A subclass of ``kind``, a session class, with the points of the environment."""
    points, script = parse(os.environ[VARIABLE]), getattr(kind, "script", None)
    subclass: type[S] = (_on_a_loop if asyncio.iscoroutinefunction(script) else _blocking)(kind, points)
    return subclass


def _blocking(kind: Any, points: Points) -> Any:
    class Armed(kind):  # type: ignore[misc]
        def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> list[Row]:
            return self._between(super().call, (name, parameters), name, timeout=timeout)  # type: ignore[no-any-return]

        def call_together(self, calls: Calls, timeout: float) -> list[Answer]:
            names = [name for name, _ in calls]
            return self._between(super().call_together, (calls,), *names, timeout=timeout)  # type: ignore[no-any-return]

        def script(self, text: str, timeout: float) -> None:
            self._between(super().script, (text,), SCRIPT, timeout=timeout)

        def post(self, name: str, parameters: Mapping[str, Any], timeout: float) -> None:
            self._between(super().post, (name, parameters), name, timeout=timeout)

        def _between(self, send: Any, what: tuple[Any, ...], *names: str, timeout: float) -> Any:
            begun = now()
            time.sleep(sum(points.hit(f"before:{name}") for name in names))
            answer = send(*what, max(0.0, timeout - (now() - begun)))
            time.sleep(sum(points.hit(f"after:{name}") for name in names))
            return answer

    return Armed


def _on_a_loop(kind: Any, points: Points) -> Any:
    class Armed(kind):  # type: ignore[misc]
        async def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> list[Row]:
            return await self._between(super().call, (name, parameters), name, timeout=timeout)  # type: ignore[no-any-return]

        async def call_together(self, calls: Calls, timeout: float) -> list[Answer]:
            names = [name for name, _ in calls]
            return await self._between(super().call_together, (calls,), *names, timeout=timeout)  # type: ignore[no-any-return]

        async def script(self, text: str, timeout: float) -> None:
            await self._between(super().script, (text,), SCRIPT, timeout=timeout)

        async def _between(self, send: Any, what: tuple[Any, ...], *names: str, timeout: float) -> Any:
            begun = now()
            await asyncio.sleep(sum(points.hit(f"before:{name}") for name in names))
            answer = await send(*what, max(0.0, timeout - (now() - begun)))
            await asyncio.sleep(sum(points.hit(f"after:{name}") for name in names))
            return answer

    return Armed
