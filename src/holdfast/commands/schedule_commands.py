"""The commands over schedules."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from holdfast.commands.registry import CommandRefused, Parameter, Steps, Window, command

_NAME = Parameter("name of the schedule", maximum=150)


@command("schedule.pause", gate="schedules", subject="{name}", destructive=False, atomic=True, name=_NAME)
def schedule_pause(window: Window, *, name: str) -> Steps:
    """Skip every slot of a schedule until it is resumed."""
    record = _find(window, name)
    if record.paused:
        raise CommandRefused(f"schedule {name!r} is paused already, {record.paused}")
    yield [f"schedule {name!r} is paused: its slots are skipped, and a run that has begun goes on"]
    window.client.schedules.pause(name, actor=window.actor, reason=window.reason)


@command("schedule.resume", gate="schedules", subject="{name}", destructive=False, atomic=False, name=_NAME)
def schedule_resume(window: Window, *, name: str) -> Steps:
    """Let a paused schedule go on with its next slot."""
    if not _find(window, name).paused:
        raise CommandRefused(f"schedule {name!r} is not paused")
    yield [f"schedule {name!r} goes on with its next slot; those of the pause are skipped"]
    window.client.schedules.resume(name, actor=window.actor, reason=window.reason)


@command("schedule.run", gate="schedules", subject="{name}", destructive=False, atomic=True, name=_NAME)
def schedule_run(window: Window, *, name: str) -> Steps:
    """Run a schedule now, beside its slots."""
    _find(window, name)
    yield [f"schedule {name!r} runs within seconds, if a process runs it"]
    window.client.schedules.run_now(name, actor=window.actor, reason=window.reason)


@command(
    "schedule.skip", gate="schedules", subject="{name} at {slot}", destructive=False, atomic=True, name=_NAME,
    slot=Parameter("time of the slot, such as 2027-03-28T01:00:00Z; by default the next one", optional=True),
)  # fmt: skip
def schedule_skip(window: Window, *, name: str, slot: str | None) -> Steps:
    """Skip one slot of a schedule."""
    record = _find(window, name)
    time = record.next_slot if slot is None else _parse(slot)
    if time is None:
        raise CommandRefused(f"schedule {name!r} runs once ever: it has no next slot")
    yield [f"slot {time.isoformat()} of schedule {name!r} is skipped"]
    try:
        skipped = window.client.schedules.skip(name, time, actor=window.actor, reason=window.reason)
    except ValueError as error:
        raise CommandRefused(str(error)) from None
    if not skipped:
        raise CommandRefused(f"slot {time.isoformat()} of schedule {name!r} has begun, or was skipped already")


@command("schedule.remove", gate="schedules", subject="{name}", destructive=True, atomic=True, name=_NAME)
def schedule_remove(window: Window, *, name: str) -> Steps:
    """Delete a schedule that nothing runs, with its history."""
    record = _find(window, name)
    if record.running:
        raise CommandRefused(f"schedule {name!r} has a run that has not ended")
    yield [f"schedule {name!r} and the record of its slots are deleted"]
    window.client.schedules.remove(name, actor=window.actor, reason=window.reason)


def _find(window: Window, name: str) -> Any:
    """Its record. CommandRefused if there is none."""
    records = {record.name: record for record in window.client.schedules.list()}
    if name not in records:
        raise CommandRefused(f"there is no schedule {name!r}; there are: {', '.join(records) or 'none'}")
    return records[name]


def _parse(slot: str) -> datetime:
    try:
        time = datetime.fromisoformat(slot)
    except ValueError:
        raise CommandRefused(f"slot must be a time such as 2027-03-28T01:00:00Z, not {slot!r}") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
