"""The commands over operations and their log."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast import HoldfastError
from holdfast.commands.registry import CommandRefused, Parameter, Steps, command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.commands.running import Window

_KEY = Parameter("the text that was its key, or its 64 digits")
_KEY_OR_POINTER = Parameter("the text that was its key, its 64 digits, or a pointer into the log")
_SHOWN = 20


@command("operation.reset", gate="operations", subject="operation {key}", destructive=True, key=_KEY)
def operation_reset(window: Window, *, key: str) -> Steps:
    """Let an operation be tried again, as if it were new; its history stays."""
    record = window.client.operations.get(key)
    if record is not None and record.status == "running":
        raise CommandRefused(f"operation {record.label!r} is under way: it is not reset under its owner's feet")
    if record is not None:
        told = f"operation {record.label!r}, {record.status} in attempt {record.attempt}, can be tried again"
    else:
        told = f"operation {_refused(window, key)!r}, which was refused before it began, can be tried again"
    yield [told]
    _unchanged(window, key, record)
    window.client.operations.reset(key, actor=window.actor, reason=window.reason)


@command("operation.rollback", gate="operations", subject="operation {key}", destructive=True, key=_KEY_OR_POINTER)
def operation_rollback(window: Window, *, key: str) -> Steps:
    """Undo an operation with the function that is registered for it."""
    try:
        record = window.client.operations.find(key)
    except LookupError as error:
        raise CommandRefused(str(error)) from None
    if record.rollback is None:
        raise CommandRefused(f"operation {record.label!r} has no rollback: it was made without one")
    if record.status == "failure" and not record.effect_started:
        raise CommandRefused(f"operation {record.label!r} leaves nothing to undo: it is failure")
    yield [f"operation {record.label!r}, {record.status} in attempt {record.attempt}, is undone by {record.rollback}"]
    _unchanged(window, record.key, record)
    window.client.operations.rollback(key, actor=window.actor, reason=window.reason)


@command("operation.replay", gate="operations", subject="operation {key}", destructive=False, key=_KEY)
def operation_replay(window: Window, *, key: str) -> Steps:
    """Fold the entries of an operation into what became of it; nothing is executed or changed."""
    states = window.client.operations.replay(key)
    if not states:
        raise CommandRefused(f"the log has no entry of operation {key!r}")
    yield [
        f"operation {each.operation} is {each.status} in attempt {each.attempt} after {each.number} entries"
        + (f", result {each.result_hash}" if each.result_hash else "")
        + (f", {each.error}" if each.error else "")
        for each in states
    ]


@command("wal.verify", gate="operations", subject="the log of operations", destructive=False)
def wal_verify(window: Window) -> Steps:
    """Prove that nobody has changed the log of operations."""
    found = window.client.operations.verify()
    told = [f"{each.operation} entry {each.number}: {each.what}: {each.told}" for each in found.problems[:_SHOWN]]
    yield [f"{found.operations} operations with {found.entries} entries were proven", *told]
    if not found.passed:
        raise CommandRefused(f"{len(found.broken)} problems in the log: {'; '.join(told)[:150]}")


@command(
    "wal.archive", gate="operations", subject="entries older than {older} s", destructive=True,
    older=Parameter("seconds since an operation ended", float, least=0, most=100 * 365 * 86400),
    to=Parameter("the file, which must not exist yet", most=4096),
)  # fmt: skip
def wal_archive(window: Window, *, older: float, to: str) -> Steps:
    """Put the entries of old operations into a file; one entry each stays and proves the others."""
    path = Path(to)
    if path.exists() or not path.absolute().parent.is_dir():
        raise CommandRefused(f"{to!r} exists already, or its folder does not: an archive is never written over")
    before = datetime.now(UTC) - timedelta(seconds=older)
    limit = before.timestamp() * 1_000_000
    ended = [each for each in window.client.operations.replay() if each.status != "partial" and each.at < limit]
    yield [
        f"the entries of up to {len(ended)} operations that ended before {before:%Y-%m-%d %H:%M:%S} UTC go to {to!r}"
    ]

    def write(lines: Sequence[str]) -> None:
        """In the file, made when there is something to put into it, and on the disk when this returns."""
        with path.open("a" if begun else "x", encoding="utf-8") as file:
            begun.append(True)
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        if len(begun) == 1:  # that there is such a file is for its folder to know
            folder = os.open(path.absolute().parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    begun: list[bool] = []
    done = window.client.operations.archive(before, write)
    if done.left:
        some = "; ".join(f"{key[:12]}…: {why}" for key, why in list(done.left.items())[:3])
        kind = HoldfastError if done.operations else CommandRefused
        raise kind(f"{done.operations} were archived, {len(done.left)} were not: {some}")


def _unchanged(window: Window, key: str, record: Any) -> None:
    """What is changed is what was told; None: that there is none."""
    found = window.client.operations.get(key)
    if found is not None and (record is None or found.pointer != record.pointer):
        raise CommandRefused(f"operation {found.label!r} is {found.status} meanwhile: look again")


def _refused(window: Window, key: str) -> str:
    """The label of one that is in no log, because a review of it has kept it from being begun."""
    reviews = window.client.reviews.list(status=None, key=key, most=1)
    if not reviews:
        raise CommandRefused(f"there is no operation {key!r}")
    return reviews[0].label
