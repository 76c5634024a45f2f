"""The commands over leases, and over what is made of them or stands beside them: leaders, slots, gates and locks."""

from __future__ import annotations

import time
from typing import Any

from holdfast import LeaseLost, NotAcquired, PolicyDenied
from holdfast.commands.execute import BREAK_GLASS, RUNTIME, is_for_break_glass
from holdfast.commands.registry import CommandRefused, CommandUnsettled, Parameter, Steps, Window, command, commands

_POLL_INTERVAL = 0.05
_GATE = Parameter("the gate", maximum=180)
_OWN_LEASES = (RUNTIME, "@gate:leases")
"""The leases that the commands of the gate ``leases`` run under."""


@command("lease.release", gate="leases", subject="{name}", destructive=True, atomic=True, name=Parameter("the lease"))
def lease_release(window: Window, *, name: str) -> Steps:
    """Take a lease away from its holder."""
    if is_for_break_glass(name) and not window.break_glass:
        raise CommandRefused(
            f"lease {name!r} cannot be released: a running command or an open gate holds it, and releases it at its "
            "end ('holdfast do gate.close' closes a gate that was opened for a time). If its holder hangs, repeat with "
            "--break-glass"
        )
    record = _held_lease(window, name)
    yield [_describe_release(record)]
    _release(window, record)


@command(
    "lease.wipe", gate="leases", subject="all but {guard}", destructive=True, atomic=True,
    guard=Parameter("the guard's key, which must be held: holdfast run --guard KEY -- holdfast do lease.wipe KEY"),
    token=Parameter("the proof of holding it", option="token", secret="HOLDFAST_TOKEN"),
)  # fmt: skip
def lease_wipe(window: Window, *, guard: str, token: str) -> Steps:
    """Take every other lease away, under a guard that is proven to be held."""
    try:
        grant = window.client.lease(guard).adopt(token)
    except (LeaseLost, ValueError) as error:
        raise CommandRefused(
            f"the token does not prove that guard {guard!r} is held; nothing is wiped: {error}"
        ) from None
    kept = (guard, *_OWN_LEASES)
    yield [_describe_release(record) for record in window.client.leases.list() if record.name not in kept]
    window.client.leases.wipe(grant, keep=_OWN_LEASES)  # proves the guard again, in the statement that wipes


@command(
    "leader.resign", gate="leaders", subject="{name}", destructive=True, name=Parameter("the elector"),
    wait=Parameter(
        "how long to wait until it has stopped, in seconds", float, default=60.0, optional=True, minimum=0,
        maximum=86400,
    ),
)  # fmt: skip
def leader_resign(window: Window, *, name: str, wait: float) -> Steps:
    """Ask the leading replica to stop its work and let another one lead."""
    record = _held_lease(window, name)
    if not record.info.get("elector"):
        raise CommandRefused(
            f"lease {name!r} is not held by an elector, so {record.holder} cannot be asked to resign: see lease.release"
        )
    yield [f"{record.holder}, which leads {name!r} with fence {record.fence}, stops its work and lets another lead"]
    if not window.client.leases.recall(name, fence=record.fence):
        raise CommandRefused(f"{record.holder} does not lead {name!r} any more: list the leases and try again")
    deadline = time.monotonic() + wait
    while (current := window.client.leases.get(name)) is not None and current.fence == record.fence:
        if time.monotonic() > deadline:
            raise CommandUnsettled(
                f"{record.holder} was asked to stop, and has not in {wait:g} s: it does so with its next heartbeat and "
                "once its work has ended, or its lease expires"
            )
        time.sleep(_POLL_INTERVAL)


@command(
    "lock.end", gate="locks", subject="session {pid}", destructive=True, atomic=True,
    pid=Parameter("the pid of the server's session", int, minimum=1, maximum=2**31 - 1),
)  # fmt: skip
def lock_end_session(window: Window, *, pid: int) -> Steps:
    """End a database session, and free its locks."""
    yield [
        f"session {pid}, which {'holds' if lock.granted else 'waits for'} {lock.label}, is ended"
        for lock in window.client.locks.list()
        if lock.pid == pid
    ]
    window.client.locks.end_session(pid, actor=window.actor, reason=window.reason, entry=window.entry)


@command(
    "gate.open", gate="gates", subject="gate {name}", destructive=False, atomic=True, name=_GATE,
    seconds=Parameter("how long, in seconds", float, option="for", minimum=1, maximum=86400),
)  # fmt: skip
def gate_open(window: Window, *, name: str, seconds: float) -> Steps:
    """Open a gate for a stated time, after which it is closed whatever happens."""
    if name in {BREAK_GLASS, *(declared.gate for declared in commands().values())}:
        raise CommandRefused(f"gate {name!r} is one that commands open for themselves")
    if (record := window.client.leases.get(f"@gate:{name}")) is not None:
        message = f"gate {name!r} is open already: it is held by {record.holder} ({record.remaining:.1f} s left)"
        raise NotAcquired(message, name=record.name, holder=record.holder, expires_at=record.expires_at)
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
    pool=Parameter("the pool", maximum=180), slot=Parameter("the number", int, minimum=1, maximum=100_000),
)  # fmt: skip
def slot_release(window: Window, *, pool: str, slot: int) -> Steps:
    """Take a slot away from its owner."""
    record = _held_lease(window, f"@slot:{pool}:{slot}")
    yield [_describe_release(record)]
    _release(window, record)


def _held_lease(window: Window, name: str) -> Any:
    """Its record. Raises CommandRefused if it is not held."""
    record = window.client.leases.get(name)
    if record is None:
        raise CommandRefused(f"lease {name!r} is not held")
    return record


def _describe_release(record: Any) -> str:
    return f"lease {record.name!r}, held by {record.holder} with fence {record.fence}, is taken away"


def _release(window: Window, record: Any) -> None:
    """Release the grant that was planned. Raises LeaseLost if the lease has another fence by now."""
    if not window.client.leases.force_release(
        record.name, actor=window.actor, reason=window.reason, fence=record.fence
    ):
        raise LeaseLost(f"lease {record.name!r} was released or passed on meanwhile: list the leases and try again")
