"""Places in our own code where a test can make things go wrong, named by the environment and free when it is silent.

    HOLDFAST_FAILPOINTS="after:lease_acquire=kill@3;before:beat_renew=delay:0.2%25"

A point is ``before:`` or ``after:`` and the name of a statement in a noun's ``.sql`` files, or ``script`` for what is
sent without a name: migrations. Before: the database has not heard of it. After: it has answered, and nobody here
knows it yet. These are the two moments at which a process that dies, stands still or loses its connection leaves the
most doubt. Only statements on holdfast's own sessions have points; ``protect`` runs on the user's connection.

    kill            SIGKILL to this process
    stop            SIGSTOP to this process: it stands still until somebody sends SIGCONT
    pause:SECONDS   the thread stands still; with asyncio on PostgreSQL, that is its whole loop
    delay:SECONDS   this call takes longer; with asyncio, the loop goes on
    error           raises Unanswered: whether it happened is in doubt

``@N`` makes it happen on the Nth hit alone, ``%P`` on each hit with a probability of P per cent. Hits are counted a
process and a point. What passes before a statement is taken off the time it has.

Nothing of this is imported while the variable is not set: sessions are of their own plain classes then.
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

from holdfast.database.sessions import Row
from holdfast.database.statements import statements
from holdfast.errors import Unanswered
from holdfast.runtime.clock import now

VARIABLE = "HOLDFAST_FAILPOINTS"
SCRIPT = "script"
_ELSEWHERE = frozenset({"protect", "protect_at_commit", "operation_begin", "migrate_lock"})
"""Statements that no session is asked for by name."""
_TIMED = frozenset({"pause", "delay"})
_CHANCE = random.SystemRandom()
_ACTION = re.compile(r"(kill|stop|error|pause|delay)(?::([0-9.]+))?(?:@([0-9]+)|%([0-9.]+))?")

S = TypeVar("S")


class Point:
    """What happens at one point, and how often it was passed."""

    def __init__(self, action: str, seconds: float, nth: int | None, per_cent: float | None) -> None:
        self.action, self.seconds = action, seconds
        self._nth, self._per_cent = nth, per_cent
        self.hits = 0

    def hit(self, where: str) -> float:
        """Do it, if it is its turn. Returns for how many seconds the call is to be delayed, which is the caller's."""
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
    """The points named in ``text``, one object a text, so that all sessions count together."""
    points = Points()
    for item in filter(None, (part.strip() for part in text.split(";"))):
        where, _, what = (part.strip() for part in item.partition("="))
        _check_place(where, item)
        if where in points:
            raise _mistake(item, "the point is named twice")
        points[where] = _point(what, item)
    return points


def _check_place(where: str, item: str) -> None:
    when, _, name = where.partition(":")
    if when not in ("before", "after"):
        raise _mistake(item, "expected before:STATEMENT=ACTION or after:STATEMENT=ACTION")
    if name in _ELSEWHERE:
        raise _mistake(item, f"{name} does not run on a session of holdfast's own")
    if name != SCRIPT and name not in statements("postgres") and name not in statements("sqlite"):
        raise _mistake(item, f"there is no statement {name!r}")


def _point(what: str, item: str) -> Point:
    found = _ACTION.fullmatch(what)
    if found is None:
        raise _mistake(item, "expected kill, stop, error, pause:SECONDS or delay:SECONDS, then @N or %P or nothing")
    action, seconds, nth, per_cent = found.groups()
    if (action in _TIMED) != (seconds is not None):
        raise _mistake(item, f"{action} takes {'seconds' if action in _TIMED else 'no seconds'}")
    try:
        point = Point(action, float(seconds or 0), int(nth) if nth else None, float(per_cent) if per_cent else None)
    except ValueError:
        raise _mistake(item, "not a number") from None
    if nth is not None and int(nth) < 1:
        raise _mistake(item, "@N counts from 1")
    if per_cent is not None and not 0 < float(per_cent) <= 100:
        raise _mistake(item, "%P is more than 0 and at most 100")
    return point


def _mistake(item: str, why: str) -> ValueError:
    return ValueError(f"{VARIABLE}: {item!r}: {why}")


def armed(kind: type[S]) -> type[S]:
    """``kind``, a class of sessions, with every point that the environment names."""
    points, call = parse(os.environ[VARIABLE]), getattr(kind, "call", None)
    made: type[S] = (_on_a_loop if asyncio.iscoroutinefunction(call) else _blocking)(kind, points)
    return made


def _blocking(kind: Any, points: Points) -> Any:
    class Armed(kind):  # type: ignore[misc]
        def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> list[Row]:
            return self._between(super().call, (name, parameters), name, timeout)  # type: ignore[no-any-return]

        def script(self, text: str, timeout: float) -> None:
            self._between(super().script, (text,), SCRIPT, timeout)

        def post(self, name: str, parameters: Mapping[str, Any], timeout: float) -> None:
            self._between(super().post, (name, parameters), name, timeout)

        def _between(self, send: Any, what: tuple[Any, ...], name: str, timeout: float) -> Any:
            begun = now()
            time.sleep(points.hit(f"before:{name}"))
            answer = send(*what, max(0.0, timeout - (now() - begun)))
            time.sleep(points.hit(f"after:{name}"))
            return answer

    return Armed


def _on_a_loop(kind: Any, points: Points) -> Any:
    class Armed(kind):  # type: ignore[misc]
        async def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> list[Row]:
            return await self._between(super().call, (name, parameters), name, timeout)  # type: ignore[no-any-return]

        async def script(self, text: str, timeout: float) -> None:
            await self._between(super().script, (text,), SCRIPT, timeout)

        async def _between(self, send: Any, what: tuple[Any, ...], name: str, timeout: float) -> Any:
            begun = now()
            await asyncio.sleep(points.hit(f"before:{name}"))
            answer = await send(*what, max(0.0, timeout - (now() - begun)))
            await asyncio.sleep(points.hit(f"after:{name}"))
            return answer

    return Armed
