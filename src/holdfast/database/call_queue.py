"""The calls of a client that wait for a session, and which of them share a message, a transaction and a commit.

    add ─→ waiting ─→ take: a batch ─→ sent ─→ settle ─→ answered
              ↑                                  │
              └──────── rolled back with it ─────┘

It decides, and does nothing else: it knows neither sessions nor threads, tasks, or the time. The oldest waiting call
decides what the next batch is; calls of its kind that wait go with it, and none waits for a batch to fill.

Invariants:
  * a call is answered once, and is sent again only if the database has rolled back what it did before;
  * a refusal that a call meets among others is not believed: that call is sent again alone, and so is one that was
    rolled back twice because of others. So no neighbour can keep a call from being answered;
  * a batch is sorted by what its calls write: two batches lock the same rows in the same order. Beats are an exception:
    two batches whose calls found or notify several of them can meet, and part after the lock timeout;
  * **no call overtakes an abandoned write of its row.** A write is abandoned if its caller has left (cancelled, late or
    interrupted) while it was being sent: it may still be executed, and its caller may write that row again, or read
    what became of it. So a call of the same row waits until the abandoned one is answered or rolled back, or its
    session has ended. Calls of other rows and lists do not wait;
  * leases and objects share no batch. A batch holds its rows until its commit, among them the beat of another process,
    whose heartbeat then waits. So it never waits for an object, which a user's transaction may have locked: a heartbeat
    waits for at most two times MAX_CALLS short statements and a commit: for those of both sessions of a client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from itertools import count, islice
from typing import Any

from holdfast.errors import Refused

MAX_CALLS = 64
"""In one transaction: each call of a lease occupies one or two places in the server's lock table until the commit."""
MAX_ROLLBACKS = 2

READS = ("",)
"""The ``key`` of a statement that only reads: it shares a batch with other reads, so it waits for no commit, and may
have a session to itself."""
_READS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        [
            "audit_list",
            "object_cursor",
            "object_get_by_name",
            "object_list",
            "object_list_within",
            "operation_list",
            "slot_list",
        ],
        (),
    ),
    "lease_list": ("lease", "name"),
    "lease_status": ("lease", "name"),
    "object_get": ("object", "type", "id"),
    "operation_get": ("operation", "key"),
}
"""Statements that only read, with the noun and the parameters of the row, if it is one."""
_LOOKS = frozenset({
    "lease_activity", "lease_held", "lease_history", "lock_list", "object_changes", "operation_activity",
    "operation_entries", "operation_failed", "operation_health", "operation_indexes", "operation_kin",
    "operation_match", "policy_list", "relay_list", "relay_parked", "relay_read", "review_list", "schedule_activity",
    "schedule_look", "schedule_slots", "shard_list", "wal_chains", "wal_find", "wal_latest", "wal_read",
})  # fmt: skip
"""Further ones, which may take long: each is sent alone. They wait for abandoned writes, and hold nothing up."""
_WRITES = {
    **dict.fromkeys(
        [f"{kind}_acquire" for kind in ("lease", "guard", "elector", "gate", "operation", "relay")], ("lease", "name")
    ),
    "lease_release": ("lease", "name"),
    "slot_claim": ("lease", "pool"),
    "slot_release": ("lease", "name"),
    "object_swap": ("object", "type", "id"),
    "object_put": ("object", "type", "id"),
    "object_delete": ("object", "type", "id"),
    "operation_claim": ("operation", "name"),
    "operation_write": ("operation", "key"),
    "operation_finish": ("operation", "key"),
}
"""Statements that may share a transaction, with the noun and the parameters that a batch is sorted by. They are short,
and each is correct as a transaction of its own. Every other statement is sent alone: it may wait for a row for seconds,
as lease_renew does, or touch many rows."""
_ROWS = {
    **_READS, **_WRITES, "operation_claim": ("operation", "key"), "gate_open": ("lease",), "gate_close": ("lease",),
}  # fmt: skip
"""The rows that they read or write. Claims are sorted by their leases; a gate is a lease."""

Rows = list[dict[str, Any]]
Key = tuple[str, ...]


class SessionToEnd(Exception):
    """A call was not sent: a session was lost that may still write the same row. It is to be ended first."""


class Again(Enum):
    """The answer to a call that was rolled back with its batch: nothing of it has happened."""

    TOGETHER = auto()
    """Another call was the reason."""
    ALONE = auto()
    """This call was the reason, or may have been."""


Answer = Rows | Refused | Again


class QueuedCall:
    """One call of one caller. hot: made for each call of a client, hence slots and no dataclass."""

    __slots__ = (
        "answer", "deadline", "has_left", "is_alone", "key", "name", "number", "parameters", "receiver", "rollbacks",
        "since",
    )  # fmt: skip

    def __init__(self, name: str, parameters: Mapping[str, Any], deadline: float, is_alone: bool = False) -> None:
        """``is_alone``: it will probably be refused, and must not be the reason for which others are rolled back."""
        self.name, self.parameters, self.deadline, self.is_alone = name, parameters, deadline, is_alone
        self.receiver: Any = None
        """What its caller waits with; the queue does not look at it."""
        self.key: Key | None = None
        """What it is sorted by in a batch; READS; None: it is sent alone. Set by the queue."""
        self.number = self.rollbacks = 0
        self.since = 0.0
        """When it came, for the dispatcher."""
        self.answer: Rows | BaseException | None = None
        self.has_left = False
        """Its caller does not wait for the answer any more."""

    def __repr__(self) -> str:
        return f"<QueuedCall {self.number} {self.name} {self.key}>"


def is_reading(batch: Sequence[QueuedCall]) -> bool:
    """Whether all calls of a batch only read; False for an empty one."""
    first = batch[:1]  # not batch[0]: another thread may empty it
    return bool(first) and first[0].name in _READS


def key_of(name: str, parameters: Mapping[str, Any]) -> Key | None:
    if (shared := _WRITES.get(name)) is not None:
        return shared[0], *[str(parameters.get(parameter)) for parameter in shared[1:]]  # hot: a generator takes 0.5 us
    return READS if name in _READS else None


def row_of(call: QueuedCall) -> Key | None:
    """The row that it writes or reads; the noun alone if that may be any row of it. None: it waits for no write."""
    if row := _ROWS.get(call.name):
        return row[0], *[str(call.parameters.get(parameter)) for parameter in row[1:]]
    return None if call.name in _READS or call.name == "session_end" else (call.name.partition("_")[0],)


def written_row(call: QueuedCall) -> Key | None:
    return None if call.name in _READS or call.name in _LOOKS else row_of(call)


def _kind(key: Key) -> str:
    """What a batch has one of: reads, objects, or leases and operations."""
    return key[0] if key[0] in ("", "object") else "lease"


def _is_shared(call: QueuedCall) -> bool:
    """Whether another batch may be under way beside it. Not for claims of slots: one that does not see those of the
    other transaction tries each of their slots again."""
    return call.key is not None and call.key is not READS and call.name != "slot_claim"


class CallQueue:
    def __init__(self) -> None:
        self.waiting: list[QueuedCall] = []
        """In the order of arrival."""
        self.abandoned: list[Key] = []
        """The rows of abandoned writes. The dispatcher sets it: it knows what is being sent."""
        self._numbers = count(1)

    def add(self, call: QueuedCall) -> None:
        call.number = next(self._numbers)
        call.key = None if call.is_alone else key_of(call.name, call.parameters)
        self.waiting.append(call)

    def leave(self, call: QueuedCall) -> bool:
        """Its caller does not wait any more. True when the call was waiting: nothing of it has happened, or will."""
        call.has_left = True
        if call not in self.waiting:
            return False
        self.waiting.remove(call)
        return True

    def is_held_up(self, call: QueuedCall) -> bool:
        """Whether an abandoned write is of its row."""
        if not self.abandoned or (row := row_of(call)) is None:
            return False
        return any(row[0] == other[0] and (row == other or 1 in (len(row), len(other))) for other in self.abandoned)

    def oldest(self) -> QueuedCall | None:
        """Of those that wait for nothing but a session."""
        if not self.abandoned:
            return self.waiting[0] if self.waiting else None
        return next((call for call in self.waiting if not self.is_held_up(call)), None)

    def load(self) -> int:
        """How many calls two sessions can share now; more than two batches of them do not count."""
        return sum(map(_is_shared, islice(self.waiting, 2 * MAX_CALLS)))

    def next_batch(self, *, reads: bool = False, shared: bool = False, limit: int = MAX_CALLS) -> list[QueuedCall]:
        """What is to be sent next, at most ``limit`` calls; they stay in the queue. ``reads``: on a session that may
        only read now. ``shared``: while the first session sends another batch."""
        waiting = [call for call in self.waiting if not self.is_held_up(call)] if self.abandoned else self.waiting
        if reads:
            return [call for call in waiting if call.key is READS][:limit]
        if shared:
            waiting = list(filter(_is_shared, waiting))
        if not waiting:
            return []
        first = waiting[0]
        if first.key is None or len(waiting) == 1:
            return [first]
        kind = _kind(first.key)
        batch = [call for call in waiting if call.key is not None and _kind(call.key) == kind][:limit]
        batch.sort(key=lambda call: call.key or READS)
        return batch

    def take(
        self, batch: list[QueuedCall], *, reads: bool = False, shared: bool = False, limit: int = MAX_CALLS
    ) -> None:
        """Move the next batch into ``batch``, which is empty. Interrupted, it leaves no call in neither of them."""
        batch += self.next_batch(reads=reads, shared=shared, limit=limit)
        if len(batch) == len(self.waiting):
            self.waiting = []
        else:
            taken = set(batch)
            self.waiting = [call for call in self.waiting if call not in taken]

    def start(self, batch: list[QueuedCall], *, shares: bool) -> None:
        """The batch is sent now, without calls whose callers have left: they know that nothing has happened, or will.
        A session that does not share transactions sends the oldest call."""
        batch[:] = [call for call in batch if not call.has_left]
        if not shares and len(batch) > 1:
            oldest = min(batch, key=lambda call: call.number)
            self.put_back([call for call in batch if call is not oldest])
            batch[:] = [oldest]

    def settle(self, batch: Sequence[QueuedCall], answers: Sequence[Answer]) -> list[QueuedCall]:
        """Store the answers, and return the calls that have one now. The others wait again, in their old places."""
        answered: list[QueuedCall] = []
        for call, answer in zip(batch, answers, strict=True):
            if not isinstance(answer, Again):
                call.answer = answer
                answered.append(call)
                continue
            call.rollbacks += 1
            if answer is Again.ALONE or call.rollbacks >= MAX_ROLLBACKS:
                call.key = None
        self.put_back([call for call in batch if call.answer is None])
        return answered

    def fail(self, batch: Sequence[QueuedCall], error: BaseException) -> list[QueuedCall]:
        """All calls of a batch have the same error: it was lost, or could not be sent. Returns those that have it."""
        failed = [call for call in batch if call.answer is None]
        for call in failed:
            call.answer = error
        return failed

    def put_back(self, calls: Sequence[QueuedCall]) -> None:
        """They were not sent, or were rolled back."""
        if back := {call for call in calls if not call.has_left}:
            self.waiting = sorted(back.union(self.waiting), key=lambda call: call.number)
