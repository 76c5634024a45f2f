"""What a name is in this database, and why it is in the state that it is in: sentences from records, by pure functions.

``holdfast explain NAME`` prints them, and the dashboard shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.dashboard.formats import ends_with_process, error_text, format_clock, format_span, link, one_line

ENDINGS = {
    "released": "its holder released it",
    "expired": "it expired: its holder stopped renewing it, because it died, was paused or was cut off",
    "session_lost": "its holder's database session ended",
    "reentered": "the same holder acquired it again",
    "forced": "an operator took it away",
}
SKIPS = {
    "late": "it was due longer ago than max_late allows",
    "missed": "no process ran the schedule when it was due",
    "overlap": "the run before it had not ended",
    "paused": "the schedule was paused",
    "crash": "its process died, and on_crash says to skip it",
}


@dataclass(frozen=True, slots=True)
class NamedRecords:
    """The records of one name."""

    name: str
    at: float
    """The database's clock."""
    lease: Any = None
    ended: Sequence[Any] = ()
    """The latest grants of the lease that have ended."""
    locks: Sequence[Any] = ()
    """Of its lock: holders and waiters."""
    operation: Any = None
    reviews: Sequence[Any] = ()
    """Of the operation, the latest last."""
    schedule: Any = None
    pool: Sequence[Any] = ()
    """The leases of its slots."""
    capacity: int | None = None
    relay: Any = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one thing of that name is, with the page that shows it."""

    what: str
    sentences: list[str]
    href: str


def explain(evidence: NamedRecords) -> list[Explanation]:
    """A finding for each thing of that name; empty when there is none."""
    name = evidence.name
    builders = (
        ("Lease", _lease, link("/lease", name=name)),
        ("Lock", _lock, link("/lock", name=name)),
        ("Operation", _operation, link("/operation", key=name)),
        ("Schedule", _schedule, link("/schedule", name=name)),
        ("Slot pool", _pool, link("/pool", name=name)),
        ("Relay", _relay, ""),
    )
    findings = ((what, list(build(evidence)), href) for what, build, href in builders)
    return [Explanation(what, sentences, href) for what, sentences, href in findings if sentences]


def _ago(evidence: NamedRecords, when: Any) -> str:
    return f"{format_span(evidence.at - when.timestamp())} ago ({format_clock(when.timestamp())} UTC)"


def _lease(evidence: NamedRecords) -> Iterator[str]:
    lease = evidence.lease
    if lease is not None:
        place = f" on {lease.host}, pid {lease.pid}" if lease.host else ""
        yield f"Held by {lease.holder}{place}, acquired {_ago(evidence, lease.acquired_at)}, with fence {lease.fence}."
        left = format_span(lease.expires_at.timestamp() - evidence.at)
        if ends_with_process(lease.info):
            yield "It ends with its process."
        else:
            yield f"Each heartbeat extends it. Without one it is free in {left}."
        if reason := lease.info.get("reason"):
            yield f"Reason: {one_line(reason)}."
        if lease.waiting:
            yield f"{lease.waiting} {'process waits' if lease.waiting == 1 else 'processes wait'} for it."
    if evidence.ended:
        last = evidence.ended[0]
        if lease is None:
            yield "Free: no process holds it."
        by = f" ({last.actor}: {one_line(last.reason)})" if last.actor else ""
        yield (
            f"The last grant that ended was that of {last.holder}, fence {last.fence}, "
            f"{_ago(evidence, last.ended_at)}: {ENDINGS[last.outcome]}{by}."
        )


def _lock(evidence: NamedRecords) -> Iterator[str]:
    holders = [lock for lock in evidence.locks if lock.granted]
    for lock in holders:
        held = "" if lock.duration is None else f" for {format_span(lock.duration)}"
        yield f"Held by {_session(lock)}{held}, {lock.mode}."
    for lock in evidence.locks:
        if not lock.granted:
            behind = ", ".join(map(str, lock.blocked_by)) or "a session that is not visible"
            yield f"{_session(lock)} has waited for {format_span(lock.duration)}, behind session {behind}."
    if evidence.locks and not holders:
        yield "No session that this role may see holds it."


def _session(lock: Any) -> str:
    owner = one_line(lock.holder or lock.application_name)
    return f"session {lock.pid}{f' of {owner}' if owner else ''}"


def _operation(evidence: NamedRecords) -> Iterator[str]:
    record = evidence.operation
    review = evidence.reviews[-1] if evidence.reviews else None
    if record is not None:
        yield f"{record.status.capitalize()} in attempt {record.attempt}, changed {_ago(evidence, record.updated_at)}."
        yield _next_run(record, evidence.at)
        yield "A run with this key and another payload is refused."
        if record.error:
            yield f"Its error: {error_text(record.error)}"
    if review is not None:
        yield from _review(review)


def _next_run(record: Any, at: float) -> str:
    """Why a run with this key was, and will be, executed, replayed, skipped or refused."""
    error = record.error or {}
    match record.status:
        case "success" if record.expires_at is not None and record.expires_at.timestamp() <= at:
            return "Its result has expired, so the next run executes the function again."
        case "success":
            return (
                "A run with this key is replayed: it gets the recorded result, and the function is not called. "
                "operation.reset allows it to run again."
            )
        case "running":
            return (
                f"Attempt {record.attempt} is running. Another run waits for its result, or is skipped or refused, as "
                "its when_locked says."
            )
        case "partial":
            rollback = f"undoes it with {record.rollback}" if record.rollback else "verifies it, or is refused"
            return f"Its process died in the middle. The next run {rollback}, before it tries again."
        case "undone":
            return "Its effect was undone. The next run executes the function again."
    if error.get("reset"):
        return f"{one_line(error.get('actor'))} reset it. The next run executes the function again."
    if error.get("remembered"):
        return "Its error is remembered: every run is refused with it, until operation.reset allows it to run again."
    return (
        f"It has failed {record.failures} {'time' if record.failures == 1 else 'times'}. The next run tries again "
        "while its Retry has attempts left, and is refused after that."
    )


def _review(review: Any) -> Iterator[str]:
    causes = {
        "attempts": "it has no attempts left",
        "locked": "its lock was taken",
        "policy": "a rule asks for a review",
    }
    cause = f"{causes.get(review.reason, review.reason)}: {one_line(review.detail)}"
    if review.status == "open":
        yield f"Refused until review {review.id} is decided, because {cause}. Run review.approve or review.reject."
    elif review.status == "rejected" and review.spent_at is None:
        answer = one_line(review.answer)
        yield f"Refused: {review.actor} rejected review {review.id} ({answer}). operation.reset lifts it."
    elif review.status == "approved" and review.spent_at is None:
        yield f"{review.actor} approved review {review.id} ({one_line(review.answer)}): the next run may execute."


def _schedule(evidence: NamedRecords) -> Iterator[str]:
    record = evidence.schedule
    if record is None:
        return
    yield _timetable(record)
    if record.paused:
        yield f"Paused, {record.paused}: every slot is skipped until schedule.resume."
    if record.running:
        yield f"Running: slot {', '.join(_format_slot(slot) for slot in record.running)}."
    if record.next_slot is not None:
        late = f", overdue for {format_span(record.overdue)}: no process runs it" if record.overdue else ""
        yield f"The next slot is {format_clock(record.next_slot.timestamp())} UTC{late}."
    if record.last is not None:
        yield f"The last slot, {_format_slot(record.last.slot)}: {describe_run(record.last)}."


def _timetable(record: Any) -> str:
    if record.zone is not None:
        return f"It has a slot at each time of '{record.every}' in {record.zone}."
    return "It runs once ever." if record.every == "once" else f"It has a slot every {record.every}."


def _format_slot(slot: Any) -> str:
    return f"{format_clock(slot.timestamp())} UTC" if slot.timestamp() else "once"


def describe_run(run: Any) -> str:
    """What became of a slot, and why."""
    if run.status == "skipped":
        times = "" if run.count == 1 else f", as {run.count} in a row"
        return f"skipped{times}, because {SKIPS.get(run.reason, one_line(run.reason))}"
    if run.status == "failure":
        return f"failed in attempt {run.attempt}: {one_line(run.reason)}"
    return "runs, or is about to" if run.status == "open" else f"done in attempt {run.attempt}"


def _pool(evidence: NamedRecords) -> Iterator[str]:
    if evidence.pool or evidence.capacity is not None:
        held, of = len(evidence.pool), "" if evidence.capacity is None else f" of {evidence.capacity}"
        yield f"{held}{of} slot is held." if (held, of) == (1, "") else f"{held}{of} slots are held."
        waiting = max((lease.waiting for lease in evidence.pool), default=0)
        if waiting:
            yield f"{waiting} {'process waits' if waiting == 1 else 'processes wait'} for one."


def _relay(evidence: NamedRecords) -> Iterator[str]:
    relay = evidence.relay
    if relay is None:
        return
    yield f"Run by {relay.holder}." if relay.holder else "No process runs it: nothing is published."
    yield f"{relay.entries} entries are not published yet, {relay.parked} events are parked."
    if relay.problem:
        yield f"Its sink takes nothing: {one_line(relay.problem)}."
