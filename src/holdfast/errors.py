"""Everything holdfast raises.

    HoldfastError
    ├ NotAcquired            somebody else has it
    │   ├ AcquireTimeout     … and still had it when our patience ended (also a TimeoutError)
    │   └ LockReentered      … and it is ourselves: waiting would never end
    ├ LeaseLost              we held it; it is certainly gone
    ├ OwnershipUnknown       the database did not answer before our trust ended
    ├ FencedOut              a newer fence exists: the user's own transaction cannot commit (SQLSTATE HF001)
    ├ Conflict               the object is not at the version that was expected
    ├ AlreadyExists          there is such an object already, or one of that name
    ├ CursorExpired          the changes since then are not kept any more: list, and watch from now on
    ├ OperationInProgress    somebody else is at it, and has the lock that it needs
    ├ OperationFailed        it failed for good, was left half done, or what it asked for does not hold
    ├ KeyReused              the same key with another payload
    ├ PolicyDenied           a rule says no: a closed gate, no guard, no actor or reason, the policy of a dataset
    ├ SchemaMismatch         says the command to run
    ├ SessionUnsafe          a pooler sits between us and the server
    ├ DriverError            the driver of sandboxes refused, or could not be reached
    ├ SinkDown               the sink of a relay takes nothing at present
    └ EngineError            the driver's error is its __cause__

Wrong arguments are ``ValueError`` or ``TypeError``, before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any


class HoldfastError(Exception):
    """The root of all errors of this library."""


class NotAcquired(HoldfastError):
    """Somebody else has it. ``holder`` and ``expires_at`` say who and until when, as far as is known."""

    def __init__(
        self, message: str, *, name: str, holder: str | None = None, expires_at: datetime | None = None
    ) -> None:
        super().__init__(message)
        self.name, self.holder, self.expires_at = name, holder, expires_at


class AcquireTimeout(NotAcquired, TimeoutError):
    """We waited as long as we were told to."""


class LockReentered(NotAcquired):
    """This very thread or task has the lock already, or the block of a task that awaits it. Locks are not re-entrant;
    the outer one is still held."""


class LeaseLost(HoldfastError):
    """We held it; it is certainly gone. Whatever was under way must stop."""


class OwnershipUnknown(HoldfastError):
    """The database did not answer before our trust ended: we may or may not hold it still. Treat it as lost."""


class FencedOut(HoldfastError):
    """The lease has passed on, and the database refuses this transaction. Roll back."""


class Conflict(HoldfastError):
    """The object is not at the version that was expected. ``current`` is the one it is at, None when there is none."""

    def __init__(self, message: str, *, current: int | None) -> None:
        super().__init__(message)
        self.current = current


class AlreadyExists(HoldfastError):
    """It was to be created, and is there at version ``current``; or another object has its name: ``owner``."""

    def __init__(self, message: str, *, current: int, owner: str) -> None:
        super().__init__(message)
        self.current, self.owner = current, owner


class CursorExpired(HoldfastError):
    """Changes since that point may be missing from the log: list what there is, and watch from ``objects.cursor()``."""


class OperationInProgress(HoldfastError):
    """Somebody else is at it, or has the lock of its dataset and operation. It may succeed yet: ask again later."""

    def __init__(self, message: str, *, key: str, label: str) -> None:
        super().__init__(message)
        self.key, self.label = key, label


class OperationFailed(HoldfastError):
    """It is not tried again before somebody has looked at it. ``status``: "failure" or "partial" (its owner died, and
    what it has done is not known); ``error``: what was recorded, with ``type`` and ``message``, if anything was."""

    def __init__(self, message: str, *, key: str, label: str, status: str, error: Mapping[str, Any] | None) -> None:
        super().__init__(message)
        self.key, self.label, self.status, self.error = key, label, status, error


class KeyReused(HoldfastError):
    """This key belongs to an operation with another payload: a retry sends the same, and a new operation a new key."""

    def __init__(self, message: str, *, key: str, label: str) -> None:
        super().__init__(message)
        self.key, self.label = key, label


class PolicyDenied(HoldfastError):
    """A rule says no, whoever asks: the gate is closed, the guard is not held, the command may not do that; or not
    before somebody has approved it: then ``review`` is the number of the review."""

    def __init__(self, message: str, *, review: int | None = None) -> None:
        super().__init__(message)
        self.review = review


class SchemaMismatch(HoldfastError):
    """The tables in the database are not the ones this version needs."""


class SessionUnsafe(HoldfastError):
    """A connection pooler sits between us and the server, so nothing may live in a session; or the direct way beside it
    leads elsewhere."""


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
    """The connection is well, but others kept it from its turn: nothing happened, and nothing is lost with it."""


class Unanswered(EngineError):
    """Sent, but not answered: it may or may not have happened."""

    certain = False


class Refused(EngineError):
    """The server answered with an error: it certainly did not happen."""

    def __init__(self, message: str, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
