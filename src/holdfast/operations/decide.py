"""What to do with an operation, decided from its row in the log, and what its errors mean. Pure: no database, no clock.

row in the log                              decision
of another operation                        FOREIGN, see ``Prior.belongs_to``
none, expired, or reset                     EXECUTE
other payload                               MISMATCH
success, result kept / not kept             REPLAY / EXPIRED
partial, owner alive                        RUNNING
failure, error remembered                   REFUSE_FAILED
failed as often as allowed                  EXHAUSTED
failure without an effect, undone           EXECUTE
partial or failure, effect possible         ROLL_BACK, VERIFY or REFUSE_PARTIAL, by ``on_partial``
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

from holdfast.errors import FencedOut, HoldfastError, KeyReused, OperationFailed, OperationInProgress, walk_causes
from holdfast.keys import OperationKey, PlainKey
from holdfast.operations import result_codec
from holdfast.operations.terms import OnPartial, Retry

Row = Mapping[str, Any]

POLICY_DENIES, POLICY_CHANGED = "HF005", "HF006"
"""The stored policy forbids it; the attempt was checked under another version of it."""
KEY_REUSED = "HF007"
"""Another operation has this key."""
_TRANSIENT = frozenset({
    "40001", "40P01", "55P03", "57014", "25P03", "57P01", "57P02", "57P03", "57P05", "53300", POLICY_DENIES,
    POLICY_CHANGED,
})  # fmt: skip
OVERRUN = frozenset({"57014", "25P03"})
"""A statement was cancelled or took too long, or the pause between two of them did."""
_SQLITE_TRANSIENT = (5, 6)  # busy, locked
_UNANSWERED = frozenset({"ConnectionError", "ConnectError", "TimeoutError", "Timeout", "TimeoutException"})
"""Python's own, and the base classes of requests, httpx and aiohttp, or what those are raised from."""


@dataclass(frozen=True)
class StoredKey:
    """The key of an operation that is in the log, of which its row has no version or bucket."""

    digest: str
    label: str
    dataset: str | None = None
    pipeline: str | None = None
    task: str | None = None
    operation: str | None = None
    checksum: str | None = None
    params_hash: str | None = None
    version: None = None
    bucket: None = None
    _parts_digest: None = None
    shard: None = None
    lock_key: None = None


Key = OperationKey | PlainKey | StoredKey


ORIGIN = ("pipeline", "task", "dataset", "operation", "checksum", "params_hash")
"""The parts of a key that the row of its operation has."""


class Decision(Enum):
    EXECUTE = "execute"
    REPLAY = "return the recorded result"
    EXPIRED = "report success without a result: it is not kept any more"
    FOREIGN = "refuse: the key belongs to another operation"
    MISMATCH = "refuse: another payload"
    RUNNING = "wait for the live owner"
    ROLL_BACK = "roll back, then execute"
    VERIFY = "probe whether it is done"
    REFUSE_PARTIAL = "refuse: left half done"
    REFUSE_FAILED = "refuse: the error is remembered"
    EXHAUSTED = "refuse: attempts are used up"


class Prior(NamedTuple):
    """The row of an operation before this attempt. Without a status there is no row."""

    status: str | None
    fingerprint: str | None
    result: str | None
    result_hash: str | None
    error: str | None
    attempt: int
    fence: int
    pointer: str | None
    rollback: str | None
    effect_started: bool
    failures: int
    alive: bool
    expired: bool
    now: float
    origin: str | None = None
    """What the operation belongs to since its first claim, as JSON: the values of ``ORIGIN``."""

    @classmethod
    def from_row(cls, row: Row) -> Prior:
        fields = {name: row[name] for name in cls._fields}
        numbers = {name: fields[name] or 0 for name in ("attempt", "fence", "failures")}
        flags = {name: bool(fields[name]) for name in ("effect_started", "alive", "expired")}
        return cls(**{**fields, **numbers, **flags})

    @classmethod
    def none(cls, now: float) -> Prior:
        """For an operation that has no row."""
        return cls(None, None, None, None, None, 0, 0, None, None, False, 0, False, False, now)

    @property
    def is_new(self) -> bool:
        """Whether the operation is run as if it were new: it is, or its time is over, or it was reset."""
        return (
            self.status is None or (self.expired and self.status != "partial") or bool(self.error_fields.get("reset"))
        )

    @property
    def failed_attempts(self) -> int:
        """Failed attempts, including one that was left half done; 0 if it is run as new."""
        return 0 if self.is_new else self.failures + (self.status == "partial")

    @property
    def error_fields(self) -> dict[str, Any]:
        """The recorded error, see ``parse_error``; empty when there is none."""
        return parse_error(self.error) if self.error else {}

    def belongs_to(self, key: Key) -> bool:
        """Whether the row is that of this operation, or of none. An operation with another dataset, say, may have the
        same digest if that was given: its policy and its lock would be other ones."""
        return self.origin is None or json.loads(self.origin) == [getattr(key, name) for name in ORIGIN]

    def value(self) -> Any:
        return result_codec.decode(bytes.fromhex(self.result or ""))


NO_PRIOR = Prior.none(0.0)


class TransactionClaim(NamedTuple):
    """The answer of ``operation_begin``, which asks for the lock of an operation inside a transaction."""

    is_free: bool
    """Whether the lock is ours now."""
    began: str | None
    """Identifies the transaction."""
    has_fixed_snapshot: bool
    """Whether the transaction does not see what others commit from now on."""
    log_oid: int | None
    """The oid of the log table (PostgreSQL): differs between two databases, unless one is a copy."""
    prior: Prior
    is_read_only: bool = False
    policy: int | None = None
    """The version of the stored policy."""

    @classmethod
    def from_row(cls, row: Row) -> TransactionClaim:
        answer = json.loads(row["answer"])
        stored = answer.get("known")
        prior = Prior.none(answer["now"]) if stored is None else Prior.from_row({**stored, "now": answer["now"]})
        return cls(
            answer["state"] == "free", answer["began"], bool(answer["fixed"]), answer.get("home"), prior,
            "frozen" in answer, answer.get("policy"),
        )  # fmt: skip


def decide(
    prior: Prior, fingerprint: str | None, *, attempts: int, on_partial: OnPartial, undoes: bool,
    approved: bool = False, reuse: bool = True,
) -> Decision:  # fmt: skip
    """What to do, see the table above. ``attempts``: how often it may fail. ``undoes``: there is a rollback function.
    ``approved``: a review allows one more attempt. ``reuse``: the key may be used anew when its result has expired."""
    used_up = prior.expired and prior.status == "success" and not reuse
    if prior.is_new and not used_up:
        return Decision.EXECUTE
    if prior.fingerprint != fingerprint:
        return Decision.MISMATCH
    if prior.status == "success":  # a result can be gone before it expires, if a clock was set back
        return Decision.EXPIRED if used_up or prior.result is None else Decision.REPLAY
    if prior.alive:
        return Decision.RUNNING
    if prior.error_fields.get("remembered"):
        return Decision.REFUSE_FAILED
    if not approved and prior.failed_attempts >= attempts:
        return Decision.EXHAUSTED
    if not prior.effect_started:
        return Decision.EXECUTE
    if prior.status == "failure":  # an error does not say what was done before it: a call may have timed out
        return Decision.ROLL_BACK if undoes else Decision.VERIFY if on_partial == "verify" else Decision.EXECUTE
    if on_partial == "refuse":
        return Decision.EXECUTE if approved else Decision.REFUSE_PARTIAL
    return Decision.ROLL_BACK if on_partial == "rollback" else Decision.VERIFY


def refuses_dead(decision: Decision, prior: Prior) -> bool:
    """Whether this refuses an operation because its owner is dead. That is certain only for who has the lock: without
    it, the owner may have ended the operation between two looks, or another one recovers it."""
    return prior.status == "partial" and decision in (Decision.REFUSE_PARTIAL, Decision.EXHAUSTED)


def chain_length(pointer: str | None) -> int:
    return int((pointer or "0:").partition(":")[0])


def backoff_delay(
    retry: Retry, pauses: int, chance: float, *, waited: float = 0.0, timeout: float = float("inf")
) -> float:
    """Seconds of the next pause, after ``pauses`` earlier ones: ``chance`` (0 to 1) of a limit that doubles from
    ``retry.first`` to ``retry.longest``, which spreads callers that began together. The limit shrinks towards the end
    of the timeout, so that those who have waited longest try most often."""
    left = 1.0 if timeout <= 0 or timeout == float("inf") else max(0.05, 1.0 - waited / timeout)
    return float(min(retry.longest, retry.first * 2 ** min(pauses, 64)) * left * chance)


# Errors that are raised


def refusal(decision: Decision, prior: Prior, key: Key) -> HoldfastError:
    """The error to raise for FOREIGN, MISMATCH, REFUSE_FAILED, EXHAUSTED and REFUSE_PARTIAL."""
    what = f"operation {key.label!r}"
    if decision is Decision.FOREIGN:
        return key_reused(key)
    if decision is Decision.MISMATCH:
        return KeyReused(
            f"{what} was begun with another payload: a retry has to send the same one, and a new operation needs a new "
            "key",
            key=key.digest, label=key.label,
        )  # fmt: skip
    if decision is Decision.REFUSE_FAILED:
        message = f"{what} failed before, and the error is remembered: {format_error(prior.error_fields)}"
    elif decision is Decision.EXHAUSTED:
        last = f", the last time with {format_error(prior.error_fields)}" if prior.error else ""
        message = (
            f"{what} was tried {prior.failed_attempts} times{last}: it is up for review, and not tried again before "
            "that is approved or it is reset"
        )
    else:
        message = (
            f"{what} was left half done in attempt {prior.attempt}: its owner died or could not record its end, and "
            "whether it had an effect is unknown. Give rollback= or verify=, or complete or reset it, or approve its "
            "review"
        )
    status = prior.status or "failure"
    return OperationFailed(message, key=key.digest, label=key.label, status=status, error=prior.error_fields or None)


def key_reused(key: Key) -> KeyReused:
    return KeyReused(
        f"operation {key.label!r}: its key {key.digest} belongs to another operation, with another "
        f"{', '.join(ORIGIN[:-1])} or parameters: a new operation needs a new key",
        key=key.digest, label=key.label,
    )  # fmt: skip


def in_progress(
    key: Key, waited: float | None = None, why: str = "it is already running, or another operation has its lock"
) -> OperationInProgress:
    more = "" if waited is None else f"; waited {waited:.1f} s"
    return OperationInProgress(f"operation {key.label!r}: {why}{more}", key=key.digest, label=key.label)


def read_only_transaction(key: Key) -> ValueError:
    return ValueError(
        f"operation {key.label!r}: this transaction is read-only, because it was begun so or the server is a standby, "
        "and the operation could not be recorded in it: give tx one that writes"
    )


def fenced_out(what: str) -> FencedOut:
    """For an owner whose lease was lost before it recorded its end."""
    return FencedOut(
        f"{what} has passed on to another owner, because its lease was lost: the result is not recorded, and the new "
        "owner decides how to continue"
    )


# Errors that are recorded


def error_record(error: BaseException, *, remembered: bool = False, where: str | None = None) -> dict[str, Any]:
    """An error as the row of its operation stores it, in JSON."""
    record = {"type": type(error).__name__, "message": error_text(error)[:1000]}
    return record | ({"remembered": True} if remembered else {}) | ({"where": where} if where else {})


def parse_error(text: str) -> dict[str, Any]:
    """A recorded error. One that another program has written in another form has the type "damaged"."""
    try:
        record = json.loads(text)
        if {type(record.get(name, "")) for name in ("type", "message")} == {str}:
            return dict(record)
    except (ValueError, AttributeError, RecursionError):
        pass
    return {"type": "damaged", "message": text[:200]}


def error_text(error: BaseException) -> str:
    """``str(error)``; empty when its ``__str__`` raises, which must not prevent recording the rest."""
    try:
        return str(error)
    except Exception:
        return ""


def format_error(record: Mapping[str, Any]) -> str:
    return f"{record.get('type')}: {record.get('message')}"


def failure_detail(record: Mapping[str, Any]) -> dict[str, Any]:
    """The detail of the ``failure`` entry for such a record."""
    return {"error": format_error(record)} | ({"remembered": True} if record.get("remembered") else {})


def correction_error(kind: Literal["rollback", "reset"], detail: Mapping[str, Any]) -> dict[str, Any]:
    """The error that the row has after a ``rollback`` or ``reset`` entry with this detail."""
    if kind == "rollback" and "actor" not in detail:
        why = detail.get("why")
        return {"type": "Interrupted", "message": why} if why else {"type": "Recovered", "message": "its owner died"}
    by = {name: detail.get(name) for name in ("actor", "reason")}
    name = "Reset" if kind == "reset" else "RolledBack"
    record = {"type": name, "message": f"by {by['actor']}: {by['reason']}", **by}
    return record | ({"reset": True} if kind == "reset" else {})


def storable_text(text: str) -> str:
    """At most 1,000 characters of a text from elsewhere, without what a database does not store."""
    return text[:1000].encode("utf-8", "replace").decode().replace("\0", "?")


# What an error means


def is_transient(error: BaseException, sqlstate: str | None) -> bool:
    """Whether the error says nothing about the operation: the database was busy, or could not be reached."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if sqlstate is not None:
        return sqlstate in _TRANSIENT or sqlstate.startswith("08")
    inner = getattr(error, "orig", None) or error  # SQLAlchemy wraps the driver's error
    if (code := getattr(inner, "sqlite_errorcode", None)) is not None:
        return code & 0xFF in _SQLITE_TRANSIENT
    name, text = type(inner).__name__, error_text(error).lower()
    if name == "OperationalError" and type(inner).__module__.partition(".")[0] in ("psycopg", "psycopg2"):
        return True  # the server sends a code with every refusal: without one, the connection failed
    words = ("lock", "connection", "busy", "network")
    return name in ("OperationalError", "InterfaceError") and any(word in text for word in words)


def is_collision(error: BaseException, sqlstate: str | None) -> bool:
    """Whether the transaction collided with others, and is likely to succeed when it is run again."""
    locked = type(error).__name__ == "OperationalError" and "locked" in error_text(error).lower()
    return sqlstate in ("40001", "40P01", POLICY_CHANGED) or (sqlstate is None and locked)


def is_unanswered(error: BaseException | None) -> bool:
    """Whether another service did not answer, by the error classes of HTTP libraries: a retry may succeed."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_unanswered, error.exceptions))
    chain = walk_causes(error, lambda each: each.__cause__ or getattr(each, "reason", None))  # urllib has a reason
    return any(base.__name__ in _UNANSWERED for cause in chain for base in type(cause).__mro__)
