"""The commands over leases, locks, gates, slots and the tables."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from holdfast import LeaseLost, NotAcquired, PolicyDenied
from holdfast.commands.registry import CommandRefused, CommandUnsettled, Parameter, Steps, command, commands
from holdfast.commands.running import BREAK_GLASS, MIGRATE, REVERT, RUNTIME, for_break_glass

if TYPE_CHECKING:
    from holdfast.commands.running import Window

_LOOK_EVERY = 0.05
_GATE = Parameter("the gate", most=180)
_NEEDED = (RUNTIME, "@gate:leases")
"""What the commands of this gate run under."""


@command("lease.release", gate="leases", subject="{name}", destructive=True, atomic=True, name=Parameter("the lease"))
def lease_release(window: Window, *, name: str) -> Steps:
    """Take a lease away from its holder."""
    if for_break_glass(name) and not window.break_glass:
        raise CommandRefused(
            f"lease {name!r} is that of an operator at work, who gives it back (gate.close closes a gate that is open "
            "for a time): if its holder does not let go, use break-glass"
        )
    record = _held(window, name)
    yield _taken(record)
    _take(window, record)


@command(
    "lease.wipe", gate="leases", subject="all but {guard}", destructive=True, atomic=True,
    guard=Parameter("the guard's key, which must be held: holdfast run --guard KEY -- holdfast do lease.wipe KEY"),
    token=Parameter("the proof of holding it", option="token", secret="HOLDFAST_TOKEN"),
)  # fmt: skip
def lease_wipe(window: Window, *, guard: str, token: str) -> Steps:
    """Take every other lease away, under a guard that is proven to be held."""
    try:
        held = window.client.lease(guard).adopt(token)
    except (LeaseLost, ValueError) as error:
        raise CommandRefused(f"guard {guard!r} is not held by whoever asks, and nothing is wiped: {error}") from None
    kept = (guard, *_NEEDED)
    yield [line for each in window.client.leases.list() if each.name not in kept for line in _taken(each)]
    window.client.leases.wipe(held, keep=_NEEDED)  # which proves it once more, with what it does


@command(
    "leader.resign", gate="leaders", subject="{name}", destructive=True, name=Parameter("the elector"),
    wait=Parameter(
        "how long to wait until it has stopped, in seconds", float, default=60.0, optional=True, least=0, most=86400
    ),
)  # fmt: skip
def leader_resign(window: Window, *, name: str, wait: float) -> Steps:
    """Ask the leading replica to stop its work and let another one lead."""
    record = _held(window, name)
    if not record.info.get("elector"):
        raise CommandRefused(
            f"lease {name!r} is not that of a leader: {record.holder} would not hear. See lease.release"
        )
    yield [f"{record.holder}, which leads {name!r} with fence {record.fence}, stops its work and lets another lead"]
    if not window.client.leases.recall(name, fence=record.fence):
        raise CommandRefused(f"{record.holder} does not lead {name!r} any more: look again")
    until = time.monotonic() + wait
    while (now := window.client.leases.get(name)) is not None and now.fence == record.fence:
        if time.monotonic() > until:
            raise CommandUnsettled(
                f"{record.holder} was asked to stop, and has not in {wait:g} s: it does so with its next heartbeat and "
                "once its work has ended, or its lease expires"
            )
        time.sleep(_LOOK_EVERY)


@command(
    "lock.break", gate="locks", subject="session {pid}", destructive=True, atomic=True,
    pid=Parameter("the pid of the server's session", int, least=1, most=2**31 - 1),
)  # fmt: skip
def lock_break(window: Window, *, pid: int) -> Steps:
    """End a database session, and free its locks."""
    had = [each for each in window.client.locks.list() if each.pid == pid]
    yield [f"session {pid}, which {'holds' if each.granted else 'waits for'} {each.label}, is ended" for each in had]
    window.client.locks.end_session(pid, actor=window.actor, reason=window.reason, entry=window.entry)


@command(
    "gate.open", gate="gates", subject="gate {name}", destructive=False, atomic=True, name=_GATE,
    seconds=Parameter("how long, in seconds", float, option="for", least=1, most=86400),
)  # fmt: skip
def gate_open(window: Window, *, name: str, seconds: float) -> Steps:
    """Open a gate for a stated time, after which it is closed whatever happens."""
    if name in {BREAK_GLASS, *(each.gate for each in commands().values())}:
        raise CommandRefused(f"gate {name!r} is one that commands open for themselves")
    if (record := window.client.leases.get(f"@gate:{name}")) is not None:
        told = f"gate {name!r} is open already: it is held by {record.holder} ({record.remaining:.1f} s left)"
        raise NotAcquired(told, name=record.name, holder=record.holder, expires_at=record.expires_at)
    yield [f"gate {name!r} is open for {seconds:g} s"]
    window.client.gates.open(name, seconds=seconds, actor=window.actor, reason=window.reason, entry=window.entry)


@command("gate.close", gate="gates", subject="gate {name}", destructive=False, atomic=True, name=_GATE)
def gate_close(window: Window, *, name: str) -> Steps:
    """Close a gate that was opened for a time, before that is over."""
    if (record := window.client.leases.get(f"@gate:{name}")) is None:
        raise CommandRefused(f"gate {name!r} is closed already")
    if "for" not in record.info:
        raise PolicyDenied(f"gate {name!r} is a window that {record.holder} has open, and closes with its work")
    yield [f"gate {name!r}, which {record.holder} has opened, is closed"]
    if not window.client.gates.close(name, actor=window.actor, reason=window.reason, entry=window.entry):
        raise CommandRefused(f"gate {name!r} is closed already")


@command(
    "slot.release", gate="slots", subject="slot {slot} of {pool}", destructive=True, atomic=True,
    pool=Parameter("the pool", most=180), slot=Parameter("the number", int, least=1, most=100_000),
)  # fmt: skip
def slot_release(window: Window, *, pool: str, slot: int) -> Steps:
    """Take a slot away from its owner."""
    record = _held(window, f"@slot:{pool}:{slot}")
    yield _taken(record)
    _take(window, record)


@command(MIGRATE, gate="schema", subject="schema", destructive=False)
def schema_migrate(window: Window) -> Steps:
    """Create or upgrade the tables."""
    there = window.client.migrations.version()
    missing = [each for each in window.client.migrations.scripts() if each.version > there]
    yield [f"migration {each.version:04} {each.name} is applied" for each in missing]
    window.client.migrations.up(entry=window.entry)


@command(
    REVERT, gate="schema", subject="schema", destructive=True,
    to=Parameter("the version to go back to; 0 removes everything, the audit too", int, option="to", least=0),
)  # fmt: skip
def schema_revert(window: Window, *, to: int) -> Steps:
    """Take migrations back, and all that is in their tables."""
    there, migrations = window.client.migrations.version(), window.client.migrations.scripts()
    if not 0 <= to < there:
        raise CommandRefused(f"to must be a version from 0 to {there - 1}, not {to}: the tables are at {there}")
    gone = [each for each in reversed(migrations) if to < each.version <= there]
    yield [f"migration {each.version:04} {each.name} is taken back, and all that is in its tables" for each in gone]
    window.client.migrations.down(to=max(to, window.client.migrations.foundation), entry=window.entry)


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
