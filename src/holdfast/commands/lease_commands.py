"""The commands over leases, leaders, slots, gates and locks."""

from __future__ import annotations

import time
from difflib import get_close_matches
from typing import Any

from holdfast import LeaseLost, NotAcquired, PolicyDenied
from holdfast.commands.execute import BREAK_GLASS, is_for_break_glass
from holdfast.commands.registry import CommandRefused, CommandUnsettled, Parameter, Steps, Window, command, commands

_POLL_INTERVAL = 0.05
_GATE = Parameter("name of the gate", maximum=180)
_KEPT_KINDS = ("guard", "elector", "gate")
"""The kinds of leases that are never wiped."""


@command("lease.release", gate="leases", subject="{name}", destructive=True, atomic=True,
         name=Parameter("name of the lease"))  # fmt: skip
def lease_release(window: Window, *, name: str) -> Steps:
    """Release a lease that another process holds."""
    if is_for_break_glass(name) and not window.break_glass:
        raise CommandRefused(
            f"lease {name!r} belongs to a running command or an open gate, which releases it when it ends "
            "('holdfast do gate.close' closes a gate early). If its holder hangs, repeat with --break-glass"
        )
    record = _held_lease(window, name)
    yield [_describe_release(record)]
    _release(window, record)


@command(
    "lease.wipe", gate="leases", subject="under {guard}", destructive=True, atomic=True,
    guard=Parameter("name of the guard: holdfast run --guard NAME -- holdfast do lease.wipe NAME"),
    token=Parameter("token that proves that this process holds the guard", secret="HOLDFAST_TOKEN"),
    prefix=Parameter("how the names of the leases begin", optional=True),
)  # fmt: skip
def lease_wipe(window: Window, *, guard: str, token: str, prefix: str | None) -> Steps:
    """Release leases under a guard, with its token."""
    try:
        grant = window.client.lease(guard).adopt(token)
    except (LeaseLost, ValueError) as error:
        raise CommandRefused(
            f"nothing is wiped: the token does not prove that guard {guard!r} is held: {error}"
        ) from None
    if (record := window.client.leases.get(guard)) is None or record.kind != "guard":
        raise CommandRefused(f"nothing is wiped: lease {guard!r} is not the lease of a guard")
    yield [
        _describe_release(record)
        for record in window.client.leases.list()
        if record.name.startswith(prefix or "") and record.kind not in _KEPT_KINDS
    ]
    window.client.leases.wipe(grant, prefix=prefix or "")  # proves the guard again, in the statement that wipes


@command(
    "fence.raise", gate="leases", subject="fences", destructive=True, atomic=True,
    above=Parameter("number that the next fence must exceed", int, optional=True, minimum=0, maximum=2**60 - 1),
)  # fmt: skip
def fence_raise(window: Window, *, above: int | None) -> Steps:
    """Raise fences and versions above those a restore lost."""
    floor = "" if above is None else f", and above {above}"
    yield [f"fences, versions and places rise to a minute ahead of the clock{floor}"]
    author = {"actor": window.actor, "reason": window.reason}
    window.client.leases.raise_fences(**author, above=above, entry=window.entry)


@command(
    "leader.resign", gate="leaders", subject="{name}", destructive=True, name=Parameter("name of the elector"),
    wait=Parameter(
        "maximum number of seconds to wait until it has stopped", float, default=60.0, optional=True, minimum=0,
        maximum=86400,
    ),
)  # fmt: skip
def leader_resign(window: Window, *, name: str, wait: float) -> Steps:
    """Make the leader stop, so that another replica leads."""
    record = _held_lease(window, name)
    if record.kind not in ("elector", "relay"):
        raise CommandRefused(
            f"lease {name!r} is not the lease of an elector, so {record.holder} cannot resign: use lease.release"
        )
    yield [f"{record.holder}, which leads {name!r} with fence {record.fence}, stops, and another replica leads"]
    if not window.client.leases.recall(name, fence=record.fence, actor=window.actor, reason=window.reason):
        raise CommandRefused(f"{record.holder} no longer leads {name!r}: list the leases and try again")
    deadline = time.monotonic() + wait
    while (current := window.client.leases.get(name)) is not None and current.fence == record.fence:
        if time.monotonic() > deadline:
            raise CommandUnsettled(
                f"{record.holder} was asked to stop, but still leads after {wait:g} s: it stops when its work has "
                "ended, or its lease expires"
            )
        time.sleep(_POLL_INTERVAL)


@command(
    "lock.end", gate="locks", subject="session {pid}", destructive=True, atomic=True,
    pid=Parameter("pid of the server session", int, minimum=1, maximum=2**31 - 1),
)  # fmt: skip
def lock_end_session(window: Window, *, pid: int) -> Steps:
    """End a database session, which frees its locks."""
    yield [
        f"session {pid}, which {'holds' if lock.granted else 'waits for'} {lock.label}, is ended"
        for lock in window.client.locks.list()
        if lock.pid == pid
    ]
    window.client.locks.end_session(pid, actor=window.actor, reason=window.reason, entry=window.entry)


@command(
    "gate.open", gate="gates", subject="gate {name}", destructive=False, atomic=True, name=_GATE,
    seconds=Parameter("number of seconds until it closes", float, option="for", minimum=1, maximum=86400),
)  # fmt: skip
def gate_open(window: Window, *, name: str, seconds: float) -> Steps:
    """Open a gate for a limited time."""
    if name in {BREAK_GLASS, *(declared.gate for declared in commands().values())}:
        raise CommandRefused(f"gate {name!r} is reserved for operator commands, which open it themselves")
    if (record := window.client.leases.get(f"@gate:{name}")) is not None:
        message = f"gate {name!r} is already open: it is held by {record.holder} ({record.remaining:.1f} s left)"
        raise NotAcquired(message, name=record.name, holder=record.holder, expires_at=record.expires_at)
    yield [f"gate {name!r} is open for {seconds:g} s"]
    window.client.gates.open(name, seconds=seconds, actor=window.actor, reason=window.reason)


@command("gate.close", gate="gates", subject="gate {name}", destructive=False, atomic=True, name=_GATE)
def gate_close(window: Window, *, name: str) -> Steps:
    """Close a gate before its time ends."""
    if (record := window.client.leases.get(f"@gate:{name}")) is None:
        raise CommandRefused(f"gate {name!r} is already closed")
    if "for" not in record.info:
        raise PolicyDenied(f"gate {name!r} was opened by {record.holder} for its own work, and closes when that ends")
    yield [f"gate {name!r}, opened by {record.holder}, is closed"]
    if not window.client.gates.close(name, actor=window.actor, reason=window.reason):
        raise CommandRefused(f"gate {name!r} is already closed")


@command(
    "slot.release", gate="slots", subject="slot {slot} of {pool}", destructive=True, atomic=True,
    pool=Parameter("name of the pool", maximum=180),
    slot=Parameter("number of the slot", int, minimum=1, maximum=100_000),
)  # fmt: skip
def slot_release(window: Window, *, pool: str, slot: int) -> Steps:
    """Release a slot that another process holds."""
    record = _held_lease(window, f"@slot:{pool}:{slot}")
    yield [_describe_release(record)]
    _release(window, record)


def _held_lease(window: Window, name: str) -> Any:
    """Its record. Raises CommandRefused if it is not held, which names a similar lease that is."""
    record = window.client.leases.get(name)
    if record is None:
        similar = get_close_matches(name, [lease.name for lease in window.client.leases.list()], 1)
        raise CommandRefused(f"lease {name!r} is not held{f'. Did you mean {similar[0]!r}?' if similar else ''}")
    return record


def _describe_release(record: Any) -> str:
    return f"lease {record.name!r}, held by {record.holder} with fence {record.fence}, is released"


def _release(window: Window, record: Any) -> None:
    """Release the grant that was planned. Raises LeaseLost if the lease has another fence by now."""
    if not window.client.leases.force_release(
        record.name, actor=window.actor, reason=window.reason, fence=record.fence
    ):
        raise LeaseLost(
            f"lease {record.name!r} was released or taken over by another process: list the leases and try again"
        )
