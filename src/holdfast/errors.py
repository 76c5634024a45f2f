"""Everything holdfast raises.

    HoldfastError
    ├ NotAcquired            another holder has it
    │   ├ AcquireTimeout     … and still had it after the timeout (also a TimeoutError)
    │   └ LockReentered      … and that is the caller itself: waiting would never end
    ├ GrantLost              it was held, and is certainly lost
    │   ├ LeaseLost
    │   └ LockLost
    ├ OwnershipUnknown       the database did not answer before trust in it ended
    ├ FencedOut              a newer fence exists: the user's own transaction cannot commit (SQLSTATE HF001)
    ├ Conflict               the object is not at the version that was expected
    ├ AlreadyExists          an object of this id, or of this name, exists
    ├ CursorExpired          the changes since then were trimmed: list, and watch from now on
    ├ OperationInProgress    another attempt is running, or holds the lock that it needs
    ├ OperationFailed        it failed for good, was left half done, or a condition does not hold
    ├ KeyReused              the same key with another payload, or of another operation
    ├ PolicyDenied           a rule forbids it: a closed gate, no guard, no actor or reason, the policy of a dataset
    ├ SchemaMismatch         names the command to run
    ├ SessionUnsafe          a pooler or the server has no session in which a lock can live
    ├ DriverError            the driver of sandboxes refused, or could not be reached
    ├ SinkDown               the sink of a relay accepts nothing at present
    └ EngineError            the database driver's error is its __cause__
        ├ Unreachable        no connection: nothing was sent
        │   └ Busy           other calls kept the connection occupied: nothing was sent
        ├ Unanswered         sent, and not answered: it may or may not have happened
        └ Refused            the server answered with an error: it did not happen

Wrong arguments are ``ValueError`` or ``TypeError``, before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any


class HoldfastError(Exception):
    """The root of all errors of this library. All of them can be copied and pickled, with what they carry."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args), self.__dict__


class NotAcquired(HoldfastError):
    """Another holder has it. ``holder`` and ``expires_at``: who and until when, as far as is known."""

    def __init__(
        self, message: str, *, name: str, holder: str | None = None, expires_at: datetime | None = None
    ) -> None:
        super().__init__(message)
        self.name, self.holder, self.expires_at = name, holder, expires_at


class AcquireTimeout(NotAcquired, TimeoutError):
    """The timeout has passed."""


class LockReentered(NotAcquired):
    """This thread or task has the lock already, or a task that awaits it has. Locks are not re-entrant; the outer grant
    is still held."""


class GrantLost(HoldfastError):
    """It was held, and is certainly lost. The work under it must stop."""


class LeaseLost(GrantLost):
    """The lease expired, was released, or was taken away."""


class LockLost(GrantLost):
    """The lock was released, or was lost with the session or the file that held it."""


class OwnershipUnknown(HoldfastError):
    """The database did not answer before trust ended: it may or may not be held. Treat it as lost."""


class FencedOut(HoldfastError):
    """The lease has passed on, and the database refuses this transaction. Roll back."""

    @classmethod
    def from_lease(cls, name: str, hint: str = "") -> FencedOut:
        return cls(
            f"lease {name!r} has passed on: this transaction cannot commit. Roll back; the work belongs to the next "
            f"holder.{hint}"
        )


class Conflict(HoldfastError):
    """The object is not at the expected version. ``current``: its version, None if it does not exist."""

    def __init__(self, message: str, *, current: int | None) -> None:
        super().__init__(message)
        self.current = current


class AlreadyExists(HoldfastError):
    """The object to create exists at version ``current``; or another object, ``owner``, has its name."""

    def __init__(self, message: str, *, current: int, owner: str) -> None:
        super().__init__(message)
        self.current, self.owner = current, owner


class CursorExpired(HoldfastError):
    """Changes since the cursor may have been trimmed: list the objects, and watch from ``objects.cursor()``."""


class OperationInProgress(HoldfastError):
    """Another attempt is running, or holds the lock of the same dataset and operation. Try again later."""

    def __init__(self, message: str, *, key: str, label: str) -> None:
        super().__init__(message)
        self.key, self.label = key, label


class OperationFailed(HoldfastError):
    """It is not tried again before an operator resets it. ``status``: "failure"; "undone" if its last attempt was
    rolled back; "partial" if its owner died and its effect is unknown. ``error``: what was recorded, with ``type`` and
    ``message``, or None."""

    def __init__(self, message: str, *, key: str, label: str, status: str, error: Mapping[str, Any] | None) -> None:
        super().__init__(message)
        self.key, self.label, self.status, self.error = key, label, status, error


class KeyReused(HoldfastError):
    """This key belongs to an operation with another payload, or to another operation: a retry sends the same, and a
    new operation a new key."""

    def __init__(self, message: str, *, key: str, label: str) -> None:
        super().__init__(message)
        self.key, self.label = key, label


class PolicyDenied(HoldfastError):
    """A rule forbids it: the gate is closed, the guard is not held, the command is not allowed. If an approval would
    allow it, ``review`` is the number of the review."""

    def __init__(self, message: str, *, review: int | None = None) -> None:
        super().__init__(message)
        self.review = review


class SchemaMismatch(HoldfastError):
    """The tables in the database are not the ones this version needs."""


class SessionUnsafe(HoldfastError):
    """Sessions cannot be used: a connection pooler is between the client and the server, or the server has no session
    locks for this role, or its session locks do not exclude; or the direct URL leads to another database."""


class DriverError(HoldfastError):
    """The driver of sandboxes refused with ``status``, an HTTP status; None when it gave no answer, and what was asked
    for may or may not have happened."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class SinkDown(HoldfastError):
    """The sink takes nothing at present, whatever it is: it is told later. A sink raises it, and so does a single pass
    of a relay."""


class EngineError(HoldfastError):
    """The database refused or could not be reached; the driver's error is the ``__cause__``."""

    certain = True
    """Whether what was asked for has certainly not happened."""


class Unreachable(EngineError):
    """No connection: nothing was sent, so nothing happened."""


class Busy(Unreachable):
    """The connection works, but other calls kept it occupied: nothing was sent, so nothing happened."""


class Unanswered(EngineError):
    """Sent, but not answered: it may or may not have happened."""

    certain = False
    _session: Any = None
    """The LostSession that it was sent on, if that was closed."""


class Refused(EngineError):
    """The server answered with an error: it certainly did not happen."""

    def __init__(self, message: str, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


for _class in list(globals().values()):
    if isinstance(_class, type) and issubclass(_class, HoldfastError):
        _class.__module__ = "holdfast"  # where users import it from, and what a traceback shows
del _class


def _rebuild(kind: type[HoldfastError], arguments: tuple[Any, ...]) -> HoldfastError:
    """Without ``__init__``, which takes more than ``args``: the rest is in the ``__dict__``."""
    error = kind.__new__(kind)
    error.args = arguments  # not by __new__: that of an OSError, as AcquireTimeout is, leaves them to __init__
    return error


def walk_causes(error: BaseException | None, next_cause: Callable[[BaseException], object]) -> Iterator[BaseException]:
    """Yield the error and its causes, each once: ``raise error from error`` makes an error its own cause."""
    seen: set[int] = set()
    cause: object = error
    while isinstance(cause, BaseException) and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = next_cause(cause)
