"""The commands over leases, locks, gates, slots and the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast import LeaseLost
from holdfast.operator.registry import CommandRefused, Parameter, Steps, command, commands
from holdfast.operator.running import BREAK_GLASS, RUNTIME

if TYPE_CHECKING:
    from holdfast.operator.running import Window

_NEEDED = (RUNTIME, "@gate:leases")
"""What the commands of this gate run under."""


@command("lease.release", gate="leases", subject="{name}", destructive=True, name=Parameter("the lease"))
def lease_release(window: Window, *, name: str) -> Steps:
    """Take a lease away from its holder."""
    if name in _NEEDED and not window.break_glass:
        raise CommandRefused(
            f"lease {name!r} is one that this command needs itself: if its holder does not let go, use break-glass"
        )
    record = _held(window, name)
    yield _taken(record)
    _take(window, record)


@command(
    "lease.wipe", gate="leases", subject="all but {guard}", destructive=True,
    guard=Parameter("the guard's key: nobody may hold it, and it is held meanwhile"),
)  # fmt: skip
def lease_wipe(window: Window, *, guard: str) -> Steps:
    """Take every lease away, under a guard that keeps the guarded program from running."""
    if (holder := window.client.leases.get(guard)) is not None:
        raise CommandRefused(f"guard {guard!r} is held by {holder.holder}: what it guards runs")
    yield [line for each in window.client.leases.list() if each.name not in _NEEDED for line in _taken(each)]
    with window.client.lease(guard) as grant:
        window.client.leases.wipe(grant, keep=_NEEDED)


@command(
    "lock.break", gate="locks", subject="session {pid}", destructive=True,
    pid=Parameter("the pid of the server's session", int),
)  # fmt: skip
def lock_break(window: Window, *, pid: int) -> Steps:
    """End a database session, and free its locks."""
    had = [each for each in window.client.locks.list() if each.pid == pid]
    yield [f"session {pid}, which {'holds' if each.granted else 'waits for'} {each.label}, is ended" for each in had]
    window.client.locks.end_session(pid, actor=window.actor, reason=window.reason, entry=window.entry)


@command(
    "gate.open", gate="gates", subject="gate {name}", destructive=False, name=Parameter("the gate"),
    seconds=Parameter("how long, in seconds", float, option="for"),
)  # fmt: skip
def gate_open(window: Window, *, name: str, seconds: float) -> Steps:
    """Open a gate for a stated time, after which it is closed whatever happens."""
    if name in {BREAK_GLASS, *(each.gate for each in commands().values())}:
        raise CommandRefused(f"gate {name!r} is one that commands open for themselves")
    yield [f"gate {name!r} is open for {seconds:g} s"]
    window.client.gates.open(name, seconds=seconds, actor=window.actor, reason=window.reason, entry=window.entry)


@command("gate.close", gate="gates", subject="gate {name}", destructive=False, name=Parameter("the gate"))
def gate_close(window: Window, *, name: str) -> Steps:
    """Close a gate that was opened for a time, before that is over."""
    yield [f"gate {name!r} is closed"]
    if not window.client.gates.close(name, actor=window.actor, reason=window.reason, entry=window.entry):
        raise CommandRefused(f"gate {name!r} is closed already")


@command(
    "slot.release", gate="slots", subject="slot {slot} of {pool}", destructive=True, pool=Parameter("the pool"),
    slot=Parameter("the number", int),
)  # fmt: skip
def slot_release(window: Window, *, pool: str, slot: int) -> Steps:
    """Take a slot away from its owner."""
    record = _held(window, f"@slot:{pool}:{slot}")
    yield _taken(record)
    _take(window, record)


@command("schema.migrate", gate="schema", subject="schema", destructive=False, bootstrap=True)
def schema_migrate(window: Window) -> Steps:
    """Create or upgrade the tables."""
    missing = [each for each, applied in window.client.migrations.status() if applied is None]
    yield [f"migration {each.version:04} {each.name} is applied" for each in missing]
    window.client.migrate()


def _held(window: Window, name: str) -> Any:
    record = window.client.leases.get(name)
    if record is None:
        raise CommandRefused(f"nobody holds lease {name!r}")
    return record


def _taken(record: Any) -> list[str]:
    return [f"lease {record.name!r}, held by {record.holder} with fence {record.fence}, is taken away"]


def _take(window: Window, record: Any) -> None:
    """Only while it is the grant that was told."""
    if not window.client.leases.force_release(
        record.name, actor=window.actor, reason=window.reason, fence=record.fence
    ):
        raise LeaseLost(f"lease {record.name!r} was released or passed on meanwhile: look again")
