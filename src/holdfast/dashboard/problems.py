"""What is wrong in a snapshot, found by pure functions: each problem has its subjects and a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from holdfast.dashboard.formats import format_number, format_span, sandbox_phase, sandbox_reason
from holdfast.dashboard.snapshot import Snapshot

RECENT = 900.0
"""Seconds for which a past event is shown: a lease that was lost, a slot that contradicted its session."""
MAX_WAIT = 5.0
"""Seconds that a session may wait for a lock."""
MAX_LAG = 60.0
"""Seconds that a relay may be behind."""
LATE_HEARTBEAT = 0.3
"""A heartbeat comes after two thirds of the TTL at the latest: when less than this share is left, one is missing."""
_MAX_SUBJECTS = 5


class Subject(NamedTuple):
    """What a problem is about. ``when``: "ago", "for" or "left", and the point in time that the page counts from or
    to."""

    name: str
    text: str
    when: tuple[Literal["ago", "for", "left"], float] | None = None


class PageProblem(NamedTuple):
    level: Literal["critical", "warning"]
    title: str
    subjects: list[Subject]
    """The first few."""
    more: int
    """How many further subjects there are."""
    remedy: str
    panel: str = ""
    """The panel that shows more."""


def find_problems(snapshot: Snapshot) -> list[PageProblem]:
    """The critical ones first."""
    problems = [problem for check in _CHECKS for problem in check(snapshot)]
    return sorted(problems, key=lambda problem: problem.level != "critical")


def _problem(
    level: Literal["critical", "warning"],
    one: str,
    many: str,
    subjects: Iterable[Subject],
    remedy: str,
    panel: str = "",
) -> Iterator[PageProblem]:
    """One problem for all ``subjects``, or none. ``one`` and ``many`` are its titles."""
    every = list(subjects)
    if every:
        title = one if len(every) == 1 else f"{format_number(len(every))} {many}"
        yield PageProblem(level, title, every[:_MAX_SUBJECTS], len(every[_MAX_SUBJECTS:]), remedy, panel)


def _database(snapshot: Snapshot) -> Iterator[PageProblem]:
    if snapshot.trouble is not None:
        remedy = "Below is the last known state. Run holdfast doctor to find the cause."
        yield PageProblem("critical", "The database does not answer", [Subject("", snapshot.trouble)], 0, remedy)
    if snapshot.unmigrated is not None:
        title = "The tables are missing, or not those of this version"
        remedy = "Run holdfast migrate with a role that may change the schema."
        yield PageProblem("critical", title, [Subject("", snapshot.unmigrated)], 0, remedy)


def _leader(snapshot: Snapshot) -> Iterator[PageProblem]:
    if snapshot.elector and not snapshot.trouble and all(lease.name != snapshot.elector for lease in snapshot.leases):
        remedy = "A standby takes over by itself. If none does, check that a replica is running and ready (/readyz)."
        subject = Subject(snapshot.elector, "has no holder")
        yield PageProblem("critical", "There is no leader", [subject], 0, remedy, "leaders")


def _heartbeats(snapshot: Snapshot) -> Iterator[PageProblem]:
    late = []
    for lease in () if snapshot.trouble else snapshot.leases:  # no heartbeat is seen while the database is away
        ttl, left = lease.info.get("ttl"), lease.expires_at.timestamp() - snapshot.at
        if isinstance(ttl, int | float) and "for" not in lease.info and left < LATE_HEARTBEAT * ttl:
            text = f"{lease.holder}, TTL {format_span(ttl)}"
            late.append(Subject(lease.name, text, ("left", lease.expires_at.timestamp())))
    remedy = "Its process may be paused, overloaded or cut off. Once the lease expires, another process may take it."
    yield from _problem("warning", "A heartbeat is late", "heartbeats are late", late, remedy, "leases")


def _lost_leases(snapshot: Snapshot) -> Iterator[PageProblem]:
    texts = {"expired": "expired", "session_lost": "session lost", "forced": "forcibly released"}
    lost = []
    for grant in snapshot.ended:
        at = grant.ended_at.timestamp()
        is_timed = grant.name.startswith(("@gate:", "@slot:")) and grant.outcome == "expired"
        if grant.outcome in texts and snapshot.at - at < RECENT and not is_timed:
            by = f" by {grant.actor}: {grant.reason}" if grant.actor else ""
            lost.append(Subject(grant.name, f"{grant.holder}: {texts[grant.outcome]}{by}", ("ago", at)))
    remedy = "Its holder may have crashed, or was paused. holdfast history shows the former holders."
    one, many = "A lease was lost in the last 15 minutes", "leases were lost in the last 15 minutes"
    yield from _problem("warning", one, many, lost, remedy, "leases")


def _relays(snapshot: Snapshot) -> Iterator[PageProblem]:
    parked = [Subject(relay.name, f"{format_number(relay.parked)} parked") for relay in snapshot.relays if relay.parked]
    remedy = "holdfast relay parked shows why. holdfast relay retry publishes them again."
    one, many = "A relay has events that its sink refused", "relays have events that their sinks refused"
    yield from _problem("warning", one, many, parked, remedy, "operations")
    stuck = [
        Subject(
            relay.name,
            relay.problem or f"behind{'' if relay.holder else ', and no process runs it'}",
            ("for", float(round(snapshot.at - relay.lag))),
        )
        for relay in snapshot.relays
        if relay.problem or relay.lag > MAX_LAG
    ]
    remedy = (
        "Check that its sink is up and that a process runs the relay. No event is lost: it resumes where it stopped."
    )
    yield from _problem("warning", "A relay is behind", "relays are behind", stuck, remedy, "operations")


def _operations(snapshot: Snapshot) -> Iterator[PageProblem]:
    partial = [
        Subject(record.label, f"in attempt {record.attempt}", ("ago", record.updated_at.timestamp()))
        for record in snapshot.unfinished
        if record.status == "partial"
    ]
    remedy = "Its process died. The next run repairs it; so do the commands operation.rollback and operation.reset."
    one, many = "An operation was interrupted", "operations were interrupted"
    yield from _problem("critical", one, many, partial, remedy, "operations")
    reviews = [
        Subject(
            review.label, f"review {review.id}, {review.reason}: {review.detail}", ("ago", review.opened_at.timestamp())
        )
        for review in snapshot.reviews
    ]
    remedy = "Read it, then run the command review.approve or review.reject."
    yield from _problem("warning", "A review is open", "reviews are open", reviews, remedy, "operations")


def _locks(snapshot: Snapshot) -> Iterator[PageProblem]:
    waiting = [
        Subject(
            lock.label,
            f"session {lock.pid}, behind {', '.join(map(str, lock.blocked_by)) or 'a session that is not visible'}",
            ("for", float(round(snapshot.at - lock.duration))),
        )
        for lock in snapshot.locks
        if not lock.granted and (lock.duration or 0) > MAX_WAIT
    ]
    remedy = "The holder is shown below. The command lock.end terminates a session that is stuck."
    one, many = "A session has waited too long for a lock", "sessions have waited too long for a lock"
    yield from _problem("warning", one, many, waiting, remedy, "locks")


def _slots(snapshot: Snapshot) -> Iterator[PageProblem]:
    violations = [
        Subject(pool, f"{kind.replace('_', ' ')}, {format_number(count)} times in total", ("ago", float(round(at))))
        for (pool, kind), (count, at) in snapshot.violations.items()
        if snapshot.at - at < RECENT
    ]
    remedy = "A session and the lease of its slot contradict each other. The log of this replica names both."
    one, many = "Slots and sessions of a pool disagree", "disagreements between slots and sessions"
    yield from _problem("critical", one, many, violations, remedy, "slots")


def _sandboxes(snapshot: Snapshot) -> Iterator[PageProblem]:
    failed = [
        Subject(record.name or record.id, sandbox_reason(record.payload) or "no reason is known")
        for record in snapshot.sandboxes
        if sandbox_phase(record.payload) == "Error"
    ]
    remedy = "Read its log, then delete it or create it again."
    yield from _problem("warning", "A sandbox has failed", "sandboxes have failed", failed, remedy, "sandboxes")


_CHECKS: tuple[Callable[[Snapshot], Iterator[PageProblem]], ...] = (
    _database, _leader, _slots, _operations, _relays, _locks, _heartbeats, _lost_leases, _sandboxes,
)  # fmt: skip
