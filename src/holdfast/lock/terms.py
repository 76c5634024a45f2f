"""A lock as values: checked names, their keys, and the words of a refusal."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from holdfast.errors import AcquireTimeout, EngineError, LockReentered, NotAcquired, Refused, Unreachable
from holdfast.names import OnLost, check_name

if TYPE_CHECKING:
    from holdfast.lock.records import LockRecord

Name = str | tuple[str, int]
PAIR = (str, int)
"""Types in a name that is a tuple."""
Key = tuple[bytes, ...]
"""One number (64 bits) or two (32 bits each), in decimal digits. These are separate key spaces."""
State = Literal["new", "queued", "held", "released", "lost", "busy", "reentered", "full", "failed", "gone"]
"""Of a request, see ``lock.pool``."""

_INT4 = range(-(2**31), 2**31)
_OFFSETS = 2**63 - 1
"""Offsets of bytes in a file that can be locked: the kernel counts to the end of what is locked, so the last cannot."""
_REMEMBERED = 8192
RESERVED_SPACE = "holdfast:"


def number(key: Key) -> int:
    """A key as one number: in side files, its offset."""
    if len(key) == 1:
        return int(key[0])
    return int(key[0]) << 32 | (int(key[1]) & 0xFFFFFFFF)


class Target:
    """A checked name. ``key`` is None until the namespace's number is known."""

    __slots__ = ("key", "label", "name", "namespace", "number")

    def __init__(self, name: Name, label: str, key: Key | None, namespace: str, number: bytes) -> None:
        self.name, self.label, self.key, self.namespace, self.number = name, label, key, namespace, number


def target(name: object, targets: _Targets) -> Target:
    """A str has a 64-bit key, ``(namespace, number)`` a key of two 32-bit numbers. Raises TypeError or ValueError if it
    is not a valid name."""
    if isinstance(name, str):
        return targets[name]
    if isinstance(name, Target):
        return name
    if not isinstance(name, tuple) or len(name) != 2:
        raise TypeError(f"a lock's name is a str or (namespace, number), not {name!r:.80}")
    namespace, number = name
    if not isinstance(namespace, str):
        raise TypeError(f"the namespace in a lock's name must be a str, not {type(namespace).__name__}: {name!r:.80}")
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"the number in a lock's name must be an int, not {type(number).__name__}: {name!r:.80}")
    return targets[check_name(namespace, "namespace"), int(number)]


def reserved(namespace: str, number: int) -> Target:
    """A name of holdfast's own, which ``target`` refuses."""
    return _pair(RESERVED_SPACE + namespace, number)


class _Targets(dict[Name, Target]):
    """Targets by name: a str, or a tuple of a str and an int. hot: a lookup is quicker than a check and a hash. An
    invalid name raises ValueError.

    Advisory locks belong to the whole database, so the schema is part of the key. Where a key is an offset in a file
    there are fewer of them: two names with the same offset have the same key, and wait for each other."""

    def __init__(self, schema: str, offsets: bool) -> None:
        self._schema, self._offsets = schema, offsets

    def __missing__(self, name: Name) -> Target:
        if isinstance(name, tuple):
            if name[0].startswith(RESERVED_SPACE):
                raise ValueError(
                    f"namespaces that begin with {RESERVED_SPACE!r} are reserved for holdfast's own locks: {name!r}"
                )
            target = _pair(*name)
        else:
            target = self._text(check_name(name))
        if len(self) >= _REMEMBERED:
            self.clear()
        self[target.name] = target
        return target

    def _text(self, name: str) -> Target:
        key = int.from_bytes(sha256(f"{self._schema}\n{name}".encode()).digest()[:8], "big", signed=True)
        key = key % _OFFSETS if self._offsets else key
        return Target(name, name, (b"%d" % key,), "", b"")


targets = lru_cache(_Targets)
"""Called with a schema, and whether keys are offsets."""


def _pair(namespace: str, number: int) -> Target:
    namespace = check_name(namespace, "namespace")
    if number not in _INT4:
        raise ValueError(f"the number in a lock's name must be from {_INT4.start} to {_INT4.stop - 1}, not {number}")
    return Target((namespace, number), repr((namespace, number)), None, namespace, b"%d" % number)


def check_on_lost(on_lost: OnLost[Any], *, cancels: bool) -> OnLost[Any]:
    if on_lost not in ("flag", "cancel", "exit") and not callable(on_lost):
        raise ValueError(f"on_lost must be 'flag', 'cancel', 'exit' or a callable, not {on_lost!r}")
    if on_lost == "cancel" and not cancels:
        raise ValueError(
            "on_lost='cancel' is for asyncio: a thread cannot be cancelled. Use 'flag', 'exit' or a callable."
        )
    return on_lost


def refusal(
    name: Name, state: State, *, waited: float | None, contended: bool, holder: LockRecord | None = None
) -> NotAcquired | EngineError:
    """Why the lock was not acquired. ``waited``: the timeout; None if it was 0. ``holder``: who holds it, if known."""
    if state == "reentered":
        return LockReentered(
            f"lock {name!r} is already held by this thread or task: it cannot be taken twice, and is still held",
            name=str(name),
        )
    if state == "full":
        return Refused(
            f"lock {name!r} refused: half of the server's lock table is in use, and when it is full no client can "
            "connect. Hold fewer locks at once, or raise max_locks_per_transaction",
            "53200",
        )
    if state == "gone" and waited is None:
        return Unreachable(f"lock {name!r}: the database did not answer in time")
    who = None if holder is None else holder.holder or holder.application_name or f"session {holder.pid}"
    message = f"lock {name!r} is held by {who or 'another holder'}"
    if holder is not None and holder.held_since is not None and holder.duration is not None:
        message += f" since {holder.held_since.isoformat(' ', 'seconds')} ({holder.duration:.1f} s)"
    if waited is None:
        return NotAcquired(message, name=str(name), holder=who)
    if not contended:
        message = f"lock {name!r}: the database has not answered"
    return AcquireTimeout(f"{message}; waited {waited:.3g} s", name=str(name), holder=who)
