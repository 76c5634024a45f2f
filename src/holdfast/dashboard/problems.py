"""What is wrong in a snapshot, found by pure functions: each problem has its subjects and a remedy.

An operator acknowledges what a problem says: its fingerprints, one of each subject, of its kind, name and text, not of
its age. A problem is acknowledged while it has no other subject, and none that began after the acknowledgement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Literal, NamedTuple

from holdfast.dashboard.formats import format_number, format_span, get_path, one_line, sandbox_phase, sandbox_reason
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
_MAX_FINGERPRINTS = 100
"""A problem with more subjects has one fingerprint of them all."""
WEBHOOK_LEASE = "dashboard:webhook:"
"""How the lease of a webhook's sender begins; the id of its object follows."""
WEBHOOKS = "webhook-failures"
"""The kind of their problems, which are not sent."""
_SAME_TIME = 1.0
"""Seconds by which the beginning of a problem may be rounded."""


class Subject(NamedTuple):
    """What a problem is about. ``when``: "ago", "for" or "left", and the point in time that the page counts from or
    to."""

    name: str
    text: str
    when: tuple[Literal["ago", "for", "left"], float] | None = None
    identity: str = ""
    """What tells it apart from others of its name, such as a fence."""


class Acknowledgement(NamedTuple):
    """Who acknowledged a problem, when and why."""

    at: float
    actor: str
    reason: str
    entry: int
    """Its number in the audit."""


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
    one: str = ""
    """Its title if it had one subject."""
    kind: str = ""
    """Its check; empty when the database cannot be read, so that nothing can be acknowledged."""
    every: tuple[Subject, ...] = ()
    """All subjects."""
    fingerprints: tuple[str, ...] = ()
    acknowledged: Acknowledgement | None = None
    """The newest one, if all that the problem says is acknowledged."""
    fresh: tuple[Subject, ...] = ()
    """The subjects that are not acknowledged."""


def find_problems(snapshot: Snapshot) -> list[PageProblem]:
    """The critical ones first."""
    newest = _newest_acknowledgements(snapshot)
    problems = [_acknowledge(problem, newest) for check in _CHECKS for problem in check(snapshot)]
    return sorted(problems, key=lambda problem: problem.level != "critical")


def problem_id(kind: str, subject: Subject) -> str:
    """Names the problem of one subject, whatever its text says by now."""
    return _digest(kind, subject.name, subject.identity)


def _digest(*words: str) -> str:
    return sha256("\0".join(words).encode(errors="replace")).hexdigest()[:16]


def _newest_acknowledgements(snapshot: Snapshot) -> Mapping[str, Acknowledgement]:
    """By fingerprint."""
    newest: dict[str, Acknowledgement] = {}
    for entry in snapshot.acknowledged:
        fingerprints = get_path(entry.detail, "parameters", "fingerprints")
        if isinstance(fingerprints, str) and (entry.outcome or "").startswith("done"):
            record = Acknowledgement(entry.at.timestamp(), entry.actor, entry.reason, entry.id)
            for fingerprint in fingerprints.split(","):
                newest.setdefault(fingerprint, record)
    return newest


def _acknowledge(problem: PageProblem, newest: Mapping[str, Acknowledgement]) -> PageProblem:
    if not problem.kind:
        return problem
    digests = {
        subject: _digest(problem.kind, subject.name, subject.identity, subject.text) for subject in problem.every
    }
    began = {digest: _began(subject) for subject, digest in digests.items()}
    if len(began) > _MAX_FINGERPRINTS:
        whole = _digest(*sorted(began))
        digests, began = dict.fromkeys(digests, whole), {whole: max(began.values())}
    covering = {
        digest: record
        for digest, at in began.items()
        if (record := newest.get(digest)) is not None and at <= record.at + _SAME_TIME
    }
    latest = max(covering.values(), key=lambda record: record.entry) if len(covering) == len(began) else None
    fresh = tuple(subject for subject, digest in digests.items() if digest not in covering)
    return problem._replace(fingerprints=tuple(sorted(began)), acknowledged=latest, fresh=fresh)


def _began(subject: Subject) -> float:
    """When it began, as far as that is known; else 0."""
    return subject.when[1] if subject.when and subject.when[0] != "left" else 0.0


def _problem(
    kind: str,
    level: Literal["critical", "warning"],
    one: str,
    many: str,
    subjects: Iterable[Subject],
    remedy: str,
    panel: str = "",
) -> Iterator[PageProblem]:
    """One problem for all ``subjects``, or none. ``one`` and ``many`` are its titles."""
    every = tuple(subjects)
    if every:
        title = one if len(every) == 1 else f"{format_number(len(every))} {many}"
        first, more = list(every[:_MAX_SUBJECTS]), len(every[_MAX_SUBJECTS:])
        yield PageProblem(level, title, first, more, remedy, panel, one, kind, every)


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
        ended = next((grant.ended_at.timestamp() for grant in snapshot.ended if grant.name == snapshot.elector), None)
        subject = Subject(snapshot.elector, "has no holder", None if ended is None else ("for", ended))
        yield from _problem("no-leader", "critical", "There is no leader", "", [subject], remedy, "leaders")


def _heartbeats(snapshot: Snapshot) -> Iterator[PageProblem]:
    late = []
    for lease in () if snapshot.trouble else snapshot.leases:  # no heartbeat is seen while the database is away
        ttl, left = lease.info.get("ttl"), lease.expires_at.timestamp() - snapshot.at
        if isinstance(ttl, int | float) and "for" not in lease.info and left < LATE_HEARTBEAT * ttl:
            text = f"{lease.holder}, TTL {format_span(ttl)}"
            late.append(Subject(lease.name, text, ("left", lease.expires_at.timestamp()), str(lease.fence)))
    remedy = "Its process may be paused, overloaded or cut off. Once the lease expires, another process may take it."
    yield from _problem(
        "late-heartbeats", "warning", "A heartbeat is late", "heartbeats are late", late, remedy, "leases"
    )


def _lost_leases(snapshot: Snapshot) -> Iterator[PageProblem]:
    texts = {"expired": "expired", "session_lost": "session lost", "forced": "forcibly released"}
    lost = []
    for grant in snapshot.ended:
        at = grant.ended_at.timestamp()
        is_timed = grant.name.startswith(("@gate:", "@slot:")) and grant.outcome == "expired"
        if grant.outcome in texts and snapshot.at - at < RECENT and not is_timed:
            by = f" by {grant.actor}: {grant.reason}" if grant.actor else ""
            text = f"{grant.holder}: {texts[grant.outcome]}{by}"
            lost.append(Subject(grant.name, text, ("ago", at), str(grant.fence)))
    remedy = "Its holder may have crashed, or was paused. holdfast history shows the former holders."
    one, many = "A lease was lost in the last 15 minutes", "leases were lost in the last 15 minutes"
    yield from _problem("lost-leases", "warning", one, many, lost, remedy, "leases")


def _relays(snapshot: Snapshot) -> Iterator[PageProblem]:
    parked = [Subject(relay.name, f"{format_number(relay.parked)} parked") for relay in snapshot.relays if relay.parked]
    remedy = "holdfast relay parked shows why. holdfast relay retry publishes them again."
    one, many = "A relay has events that its sink refused", "relays have events that their sinks refused"
    yield from _problem("parked-events", "warning", one, many, parked, remedy, "operations")
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
    yield from _problem(
        "relays-behind", "warning", "A relay is behind", "relays are behind", stuck, remedy, "operations"
    )


def _operations(snapshot: Snapshot) -> Iterator[PageProblem]:
    partial = [
        Subject(record.label, f"in attempt {record.attempt}", ("ago", record.updated_at.timestamp()))
        for record in snapshot.unfinished
        if record.status == "partial"
    ]
    remedy = "Its process died. The next run repairs it; so do the commands operation.rollback and operation.reset."
    one, many = "An operation was interrupted", "operations were interrupted"
    yield from _problem("interrupted-operations", "critical", one, many, partial, remedy, "operations")
    reviews = [
        Subject(
            review.label,
            f"review {review.id}, {review.reason}: {review.detail}",
            ("ago", review.opened_at.timestamp()),
            str(review.id),
        )
        for review in snapshot.reviews
    ]
    remedy = "Read it, then run the command review.approve or review.reject."
    yield from _problem(
        "open-reviews", "warning", "A review is open", "reviews are open", reviews, remedy, "operations"
    )


def _locks(snapshot: Snapshot) -> Iterator[PageProblem]:
    waiting = [
        Subject(
            lock.label,
            f"session {lock.pid}, behind {', '.join(map(str, lock.blocked_by)) or 'a session that is not visible'}",
            ("for", float(round(snapshot.at - lock.duration))),
            str(lock.pid),
        )
        for lock in snapshot.locks
        if not lock.granted and (lock.duration or 0) > MAX_WAIT
    ]
    remedy = "The holder is shown below. The command lock.end terminates a session that is stuck."
    one, many = "A session has waited too long for a lock", "sessions have waited too long for a lock"
    yield from _problem("lock-waits", "warning", one, many, waiting, remedy, "locks")


def _slots(snapshot: Snapshot) -> Iterator[PageProblem]:
    violations = [
        Subject(
            pool, f"{kind.replace('_', ' ')}, {format_number(count)} times in total", ("ago", float(round(at))), kind
        )
        for (pool, kind), (count, at) in snapshot.violations.items()
        if snapshot.at - at < RECENT
    ]
    remedy = "A session and the lease of its slot contradict each other. The log of this replica names both."
    one, many = "Slots and sessions of a pool disagree", "disagreements between slots and sessions"
    yield from _problem("slot-violations", "critical", one, many, violations, remedy, "slots")


def _sandboxes(snapshot: Snapshot) -> Iterator[PageProblem]:
    failed = [
        Subject(
            record.name or record.id, sandbox_reason(record.payload) or "no reason is known", identity=str(record.id)
        )
        for record in snapshot.sandboxes
        if sandbox_phase(record.payload) == "Error"
    ]
    remedy = "Read its log, then delete it or create it again."
    yield from _problem(
        "failed-sandboxes", "warning", "A sandbox has failed", "sandboxes have failed", failed, remedy, "sandboxes"
    )


def _webhooks(snapshot: Snapshot) -> Iterator[PageProblem]:
    """Those whose sender runs."""
    senders = {lease.name for lease in snapshot.leases}
    failing = []
    for record in snapshot.webhooks:
        error, given_up, since = (get_path(record.payload, "failing", name) for name in ("error", "given_up", "since"))
        if error and isinstance(since, int | float) and f"{WEBHOOK_LEASE}{record.id}" in senders:
            text = f"{one_line(error)}{f'; messages that were given up: {given_up}' if given_up else ''}"
            host = one_line(get_path(record.payload, "host"))
            failing.append(Subject(host, text, ("for", float(since)), str(record.id)))
    remedy = "Check its receiver. A message is sent again after a pause, eight times; those after it wait."
    yield from _problem(WEBHOOKS, "warning", "A webhook fails", "webhooks fail", failing, remedy)


_CHECKS: tuple[Callable[[Snapshot], Iterator[PageProblem]], ...] = (
    _database, _leader, _slots, _operations, _relays, _locks, _heartbeats, _lost_leases, _sandboxes,
    _webhooks,
)  # fmt: skip
