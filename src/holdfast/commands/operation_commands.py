"""The governed commands for operations, their log and their reviews.

Each function reads and yields the lines of its plan; what follows its ``yield`` makes the change, and runs only if it
is no dry run. See ``registry``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from holdfast import HoldfastError
from holdfast.commands.registry import CommandRefused, Parameter, Steps, Window, command

_KEY = Parameter("text key of the operation, or its digest of 64 hex digits")
_KEY_OR_POINTER = Parameter("text key of the operation, its digest of 64 hex digits, or a pointer into the log")
_RESULT = Parameter("result of the operation, as JSON", default="null", optional=True, is_json=True, maximum=100_000)
_REVIEW = Parameter("number of the review", int, minimum=1, maximum=2**63 - 1)
_SHOWN_PROBLEMS = 20
_SHOWN_RESULT = 200
"""Characters of a result in the plan."""
_LONGEST_AGE = 100 * 365 * 86400
"""Seconds: a date that much earlier is still in the calendar."""


@command("operation.reset", gate="operations", subject="operation {key}", destructive=True, key=_KEY)
def operation_reset(window: Window, *, key: str) -> Steps:
    """Allow an operation to run again; keep its history."""
    record = window.client.operations.get(key)
    if record is None:
        label = _reviewed_label(window, key)
        change = f"operation {label!r}, which was refused before it began, may run again"
    elif record.status == "running":
        raise CommandRefused(f"operation {record.label!r} is running: reset it when its process has ended")
    else:
        change = f"operation {record.label!r}, {record.status} in attempt {record.attempt}, may run again"
    yield [change]
    _check_unchanged(window, key, record)
    window.client.operations.reset(key, actor=window.actor, reason=window.reason)


@command("operation.complete", gate="operations", subject="operation {key}", destructive=True, key=_KEY, result=_RESULT)
def operation_complete(window: Window, *, key: str, result: str) -> Steps:
    """Record that an interrupted operation did happen."""
    record = window.client.operations.get(key)
    if record is None:
        raise CommandRefused(f"there is no operation {key!r}")
    if record.status == "running":
        raise CommandRefused(f"operation {record.label!r} is running: it can be completed once its process has ended")
    if record.status == "success":
        raise CommandRefused(f"operation {record.label!r} has succeeded already: callers get its recorded result")
    if record.status != "partial" and not record.effect_started:
        raise CommandRefused(f"operation {record.label!r} is {record.status} and left no effect: run it again instead")
    shown = result if len(result) <= _SHOWN_RESULT else f"{result[:_SHOWN_RESULT]}…"
    yield [f"operation {record.label!r}, {record.status} in attempt {record.attempt}, is done with the result {shown}"]
    _check_unchanged(window, key, record)
    window.client.operations.complete(key, json.loads(result), actor=window.actor, reason=window.reason)


@command("operation.rollback", gate="operations", subject="operation {key}", destructive=True, key=_KEY_OR_POINTER)
def operation_rollback(window: Window, *, key: str) -> Steps:
    """Undo an operation with its rollback function."""
    try:
        record = window.client.operations.find(key)
    except LookupError as error:
        raise CommandRefused(str(error)) from None
    if record.rollback is None:
        raise CommandRefused(f"operation {record.label!r} cannot be undone: it was run without a rollback function")
    if record.status in ("failure", "undone") and not record.effect_started:
        why = "it is undone already" if record.status == "undone" else "it failed before its effect"
        raise CommandRefused(f"operation {record.label!r} has nothing to undo: {why}")
    yield [f"operation {record.label!r}, {record.status} in attempt {record.attempt}, is undone by {record.rollback}"]
    _check_unchanged(window, record.key, record)
    window.client.operations.rollback(key, actor=window.actor, reason=window.reason)


@command("operation.replay", gate="operations", subject="operation {key}", destructive=False, key=_KEY)
def operation_replay(window: Window, *, key: str) -> Steps:
    """Recompute an operation's state from the log."""
    states = window.client.operations.replay(key)
    if not states:
        raise CommandRefused(f"the log has no entries of operation {key!r}")
    yield [
        f"operation {state.operation} is {state.status} in attempt {state.attempt} after {state.number} entries"
        + (f", result {state.result_hash}" if state.result_hash else "")
        + (f", {state.error}" if state.error else "")
        for state in states
    ]


@command("wal.verify", gate="operations", subject="the log of operations", destructive=False)
def wal_verify(window: Window) -> Steps:
    """Verify that the log of operations was not changed."""
    report = window.client.operations.verify()
    problems = [
        f"{problem.operation} entry {problem.number}: {problem.what}: {problem.told}"
        for problem in report.problems[:_SHOWN_PROBLEMS]
    ]
    yield [f"{report.operations} operations with {report.entries} entries were verified", *problems]
    if not report.passed:  # CommandRefused although it ran: the exit code and the audit must not say "done"
        raise CommandRefused(f"{len(report.broken)} problems in the log: {'; '.join(problems)[:150]}")


@command(
    "wal.archive", gate="operations", subject="entries older than {older} s", destructive=True,
    older=Parameter("minimum number of seconds since an operation ended", float, minimum=0, maximum=_LONGEST_AGE),
    to=Parameter("path of the archive, a file that does not exist yet", maximum=4096),
)  # fmt: skip
def wal_archive(window: Window, *, older: float, to: str) -> Steps:
    """Move the log entries of old operations to a file."""
    path = Path(to)
    if path.exists() or not path.absolute().parent.is_dir():
        raise CommandRefused(f"{to!r} already exists, or its folder does not exist: an archive is never overwritten")
    before = datetime.now(UTC) - timedelta(seconds=older)
    limit = before.timestamp() * 1_000_000
    ended = [state for state in window.client.operations.replay() if state.status != "partial" and state.at < limit]
    ended_before = f"{len(ended)} operations that ended before {before:%Y-%m-%d %H:%M:%S} UTC"
    yield [f"the entries of up to {ended_before} are moved to {to!r}"]
    author = {"actor": window.actor, "reason": window.reason}
    result = window.client.operations.archive(before, _ArchiveFile(path).append, **author)
    if result.left:
        reasons = "; ".join(f"{key[:12]}…: {reason}" for key, reason in list(result.left.items())[:3])
        kind = HoldfastError if result.operations else CommandRefused
        raise kind(f"{result.operations} operations were archived, {len(result.left)} were not: {reasons}")


class _ArchiveFile:
    """A file that is created with its first lines and never written over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._exists = False

    def append(self, lines: Sequence[str]) -> None:
        """Returns when the lines are on the disk. Raises FileExistsError if another process created the file."""
        is_new = not self._exists
        with self._path.open("x" if is_new else "a", encoding="utf-8") as file:
            self._exists = True
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        if is_new:  # a new file survives a crash only once its folder is on the disk, too
            folder = os.open(self._path.absolute().parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


@command("review.approve", gate="reviews", subject="review {number}", destructive=False, atomic=True, number=_REVIEW)
def review_approve(window: Window, *, number: int) -> Steps:
    """Allow one more attempt of an operation under review."""
    record = _open_review(window, number)
    yield [f"operation {record.label!r}, under review because of {record.reason}, may run once more"]
    window.client.reviews.approve(number, actor=window.actor, reason=window.reason)


@command("review.reject", gate="reviews", subject="review {number}", destructive=True, atomic=True, number=_REVIEW)
def review_reject(window: Window, *, number: int) -> Steps:
    """Refuse an operation under review until it is reset."""
    record = _open_review(window, number)
    yield [f"operation {record.label!r}, under review because of {record.reason}, is refused until it is reset"]
    window.client.reviews.reject(number, actor=window.actor, reason=window.reason)


def _check_unchanged(window: Window, key: str, planned: Any) -> None:
    """Raises CommandRefused if the operation was changed since the plan; ``planned`` is None if there was no
    such operation in the log. One that has gone from the log is for the caller's next statement to report."""
    record = window.client.operations.get(key)
    if record is not None and (planned is None or record.pointer != planned.pointer):
        raise CommandRefused(
            f"operation {record.label!r} has changed since the command was planned: it is {record.status} now. Check "
            "it with 'holdfast ops show' and try again"
        )


def _reviewed_label(window: Window, key: str) -> str:
    """The label of an operation that is not in the log, because a review refused it before it began. Raises
    CommandRefused if there is no such review."""
    reviews = window.client.reviews.list(status=None, key=key, limit=1)
    if not reviews:
        raise CommandRefused(f"there is no operation {key!r}")
    return reviews[0].label


def _open_review(window: Window, number: int) -> Any:
    """Its record. Raises CommandRefused if there is none, or it is not open."""
    record = window.client.reviews.get(number)
    if record is None:
        raise CommandRefused(f"there is no review {number}")
    if record.status != "open":
        raise CommandRefused(f"review {number} is already {record.status}, by {record.actor}: {record.answer}")
    return record
