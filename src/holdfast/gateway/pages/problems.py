"""What is wrong, judged from a sight: each kind with what it concerns, and what to do about it. Asks nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from holdfast.gateway.pages.looking import Sight
from holdfast.gateway.pages.words import condition, number, phase, span

RECENT = 900.0
"""Seconds for which what has happened is told: a lease that was lost, a slot that was not what its session says."""
WAITED = 5.0
"""Seconds of waiting for a lock that are too long."""
BEHIND = 60.0
"""Seconds that a relay may be behind."""
STALE = 0.3
"""A heartbeat comes after two thirds of a TTL at the latest: with less than this left of it, one is missing."""
_SHOWN = 5


class About(NamedTuple):
    """What a problem concerns, and what is known of it. ``when``: "ago", "for" or "left", and the moment it is to, so
    that the page can count."""

    name: str
    told: str
    when: tuple[Literal["ago", "for", "left"], float] | None = None


class Found(NamedTuple):
    """``about``: the first few."""

    level: Literal["critical", "warning"]
    title: str
    about: list[About]
    more: int
    todo: str
    where: str = ""
    """The part of the page that tells more."""


def problems(sight: Sight) -> list[Found]:
    """The worst first."""
    found = [each for judge in _JUDGES for each in judge(sight)]
    return sorted(found, key=lambda each: each.level != "critical")


def _found(level: Any, one: str, many: str, about: Iterable[About], todo: str, where: str = "") -> Iterator[Found]:
    every = list(about)
    if every:
        title = one if len(every) == 1 else f"{number(len(every))} {many}"
        yield Found(level, title, every[:_SHOWN], len(every[_SHOWN:]), todo, where)


def _database(sight: Sight) -> Iterator[Found]:
    if sight.trouble is not None:
        todo = "What is shown below is what was known last. holdfast doctor tells what is wrong with it."
        yield Found("critical", "The database does not answer", [About("", sight.trouble)], 0, todo)
    if sight.unmigrated is not None:
        todo = "Run holdfast migrate with a role that may change the schema."
        yield Found(
            "critical", "The tables are not there, or not those of this version", [About("", sight.unmigrated)], 0, todo
        )


def _leader(sight: Sight) -> Iterator[Found]:
    if sight.elector and not sight.trouble and all(each.name != sight.elector for each in sight.leases):
        todo = "A standby takes over by itself. If it does not: does any replica run, and is it ready (/readyz)?"
        yield Found("critical", "Nobody leads", [About(sight.elector, "has no holder")], 0, todo, "leaders")


def _heartbeats(sight: Sight) -> Iterator[Found]:
    late = []
    for each in () if sight.trouble else sight.leases:  # nobody has seen a heartbeat since the database was away
        ttl, left = each.info.get("ttl"), each.expires_at.timestamp() - sight.at
        if isinstance(ttl, int | float) and "for" not in each.info and left < STALE * ttl:
            told = f"{each.holder}, of {span(ttl)}"
            late.append(About(each.name, told, ("left", each.expires_at.timestamp())))
    todo = "Its process may be paused, overloaded or cut off; when nothing is left, the lease is free for others."
    yield from _found("warning", "A heartbeat is late", "heartbeats are late", late, todo, "leases")


def _lost(sight: Sight) -> Iterator[Found]:
    words = {"expired": "expired", "session_lost": "its session was gone", "forced": "was taken away"}
    lost = []
    for each in sight.ended:
        at = each.ended_at.timestamp()
        timed = each.name.startswith(("@gate:", "@slot:")) and each.outcome == "expired"
        if each.outcome in words and sight.at - at < RECENT and not timed:
            by = f" by {each.actor}: {each.reason}" if each.actor else ""
            lost.append(About(each.name, f"{each.holder}: {words[each.outcome]}{by}", ("ago", at)))
    todo = "Did its holder crash, or was it paused? holdfast history tells who had it when."
    yield from _found(
        "warning",
        "A lease was lost in the last 15 minutes",
        "leases were lost in the last 15 minutes",
        lost,
        todo,
        "leases",
    )


def _relays(sight: Sight) -> Iterator[Found]:
    parked = [About(each.name, f"{number(each.parked)} parked") for each in sight.relays if each.parked]
    todo = "holdfast relay parked tells why; holdfast relay retry tells them again."
    yield from _found(
        "warning",
        "A relay has something that its sink refused",
        "relays have something that their sinks refused",
        parked,
        todo,
        "operations",
    )
    stuck = [
        About(
            each.name,
            each.problem or f"behind{'' if each.holder else ', and nobody runs it'}",
            ("for", float(round(sight.at - each.lag))),
        )
        for each in sight.relays
        if each.problem or each.lag > BEHIND
    ]
    todo = "Is its sink up, and does somebody run the relay? Nothing is lost: it goes on where it stands."
    yield from _found("warning", "A relay is behind", "relays are behind", stuck, todo, "operations")


def _operations(sight: Sight) -> Iterator[Found]:
    partial = [
        About(each.label, f"in attempt {each.attempt}", ("ago", each.updated_at.timestamp()))
        for each in sight.unfinished
        if each.status == "partial"
    ]
    todo = "Whoever ran it died. It is mended when it is run again, or by operation.rollback or operation.reset."
    yield from _found(
        "critical", "An operation was left half done", "operations were left half done", partial, todo, "operations"
    )
    reviews = [
        About(each.label, f"review {each.id}, {each.reason}: {each.detail}", ("ago", each.opened_at.timestamp()))
        for each in sight.reviews
    ]
    todo = "Look at it, then run review.approve or review.reject."
    yield from _found("warning", "A review is open", "reviews are open", reviews, todo, "operations")


def _locks(sight: Sight) -> Iterator[Found]:
    waiting = [
        About(
            each.label,
            f"session {each.pid}, behind {', '.join(map(str, each.blocked_by)) or 'nobody who can be seen'}",
            ("for", float(round(sight.at - each.duration))),
        )
        for each in sight.locks
        if not each.granted and (each.duration or 0) > WAITED
    ]
    todo = "Who holds it is told below. lock.break ends a session that is stuck."
    yield from _found(
        "warning", "A lock is waited for too long", "locks are waited for too long", waiting, todo, "locks"
    )


def _slots(sight: Sight) -> Iterator[Found]:
    wrong = [
        About(pool, f"{kind.replace('_', ' ')}, {number(count)} times in all", ("ago", float(round(at))))
        for (pool, kind), (count, at) in sight.violations.items()
        if sight.at - at < RECENT
    ]
    todo = "A session and the lease of its slot contradict each other: the log of this replica tells which."
    yield from _found(
        "critical",
        "A pool's slots are not what its sessions say",
        "kinds of slots are not what their sessions say",
        wrong,
        todo,
        "slots",
    )


def _sandboxes(sight: Sight) -> Iterator[Found]:
    failed = [
        About(each.name or each.id, condition(each.payload) or "no reason is known")
        for each in sight.sandboxes
        if phase(each.payload) == "Error"
    ]
    todo = "Read its logs, then delete it or make it anew."
    yield from _found("warning", "A sandbox has failed", "sandboxes have failed", failed, todo, "sandboxes")


_JUDGES: tuple[Callable[[Sight], Iterator[Found]], ...] = (
    _database, _leader, _slots, _operations, _relays, _locks, _heartbeats, _lost, _sandboxes,
)  # fmt: skip
