"""What to do with an operation, decided from what the log says of it. Asks nobody and does nothing itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

from holdfast.errors import FencedOut, HoldfastError, KeyReused, OperationFailed, OperationInProgress
from holdfast.keys import OperationKey, PlainKey
from holdfast.operations import results
from holdfast.operations.terms import OnPartial

Row = Mapping[str, Any]

LEASE = "@op:"
"""What the names of the leases begin with under which operations are done."""
_PASSING = frozenset({"40001", "40P01", "55P03", "57014", "25P03", "57P01", "57P02", "57P03", "57P05", "53300"})
OVERRUN = frozenset({"57014", "25P03"})
"""Its statement took longer than it may, or was cancelled; or it took too long between two of them."""
_SQLITE_PASSING = (5, 6)  # busy, locked
_UNANSWERED = frozenset({"ConnectionError", "ConnectError", "TimeoutError", "Timeout", "TimeoutException"})
"""Python's own, and those of requests, httpx and aiohttp: what these inherit from, or are raised from."""


@dataclass(frozen=True)
class StoredKey:
    """The key of an operation that is in the log, whatever it was made of."""

    digest: str
    label: str
    pipeline: None = None
    task: None = None
    dataset: str | None = None
    operation: None = None
    version: None = None
    checksum: None = None
    bucket: None = None
    params_hash: None = None
    shard: None = None
    lock_key: None = None


Key = OperationKey | PlainKey | StoredKey


class Act(Enum):
    EXECUTE = "execute"
    REPLAY = "replay"
    EXPIRED = "say that it was done: its result is not kept any more"
    MISMATCH = "mismatch"
    RUNNING = "running"
    ROLL_BACK = "roll back, then execute"
    VERIFY = "ask whether it is done"
    REFUSE_PARTIAL = "refuse: left half done"
    REFUSE_FAILED = "refuse: the error is remembered"
    EXHAUSTED = "refuse: attempts are used up"


class Prior(NamedTuple):
    """What the log says. Without a status there is nothing."""

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

    @classmethod
    def of(cls, row: Row) -> Prior:
        found = {name: row[name] for name in cls._fields}
        numbers = {name: found[name] or 0 for name in ("attempt", "fence", "failures")}
        truths = {name: bool(found[name]) for name in ("effect_started", "alive", "expired")}
        return cls(**{**found, **numbers, **truths})

    @classmethod
    def nothing(cls, now: float) -> Prior:
        return cls(None, None, None, None, None, 0, 0, None, None, False, 0, False, False, now)

    @property
    def fresh(self) -> bool:
        """Whether it is run as if nobody had: nobody has, or its time is over, or it was reset."""
        return self.status is None or (self.expired and self.status != "partial") or bool(self.told.get("reset"))

    @property
    def failed(self) -> int:
        """Attempts that came to nothing, with one that was left half done; none where it is run as if nobody had."""
        return 0 if self.fresh else self.failures + (self.status == "partial")

    @property
    def told(self) -> dict[str, Any]:
        """The error as it was recorded."""
        return json.loads(self.error) if self.error else {}

    def value(self) -> Any:
        return results.decode(bytes.fromhex(self.result or ""))


class Begun(NamedTuple):
    """What the database says to whoever asks inside a transaction."""

    free: bool
    """The lock is ours."""
    began: str | None
    fixed: bool
    home: int | None
    """Of the tables that it stands in, for PostgreSQL: not the same in two databases, unless one is a copy."""
    prior: Prior
    frozen: bool = False
    """The transaction can write nothing, and so not that it was done."""

    @classmethod
    def of(cls, row: Row) -> Begun:
        said = json.loads(row["answer"])
        known = said.get("known")
        prior = Prior.nothing(said["now"]) if known is None else Prior.of({**known, "now": said["now"]})
        return cls(
            said["state"] == "free", said["began"], bool(said["fixed"]), said.get("home"), prior, "frozen" in said
        )

    def check_writable(self, key: Key) -> None:
        """ValueError before it is done in vain."""
        if self.frozen:
            raise ValueError(
                f"operation {key.label!r}: this transaction is read-only, on a standby or because it was begun so, and "
                "could not write down that it was done: give tx one that writes"
            )


NOTHING = Prior.nothing(0.0)


def decide(
    prior: Prior, fingerprint: str | None, *, max_attempts: int, on_partial: OnPartial, undoes: bool,
    approved: bool = False, reuse: bool = True,
) -> Act:  # fmt: skip
    """``undoes``: whether there is a rollback that can be called. ``approved``: somebody has looked at it, and lets it
    be tried once more. ``reuse``: whether the key is anybody's again when the time of its result is over."""
    used = prior.expired and prior.status == "success" and not reuse
    if prior.fresh and not used:
        return Act.EXECUTE
    if prior.fingerprint != fingerprint:
        return Act.MISMATCH
    if prior.status == "success":  # a result may be gone before its time is over, where a clock was set back
        return Act.EXPIRED if used or prior.result is None else Act.REPLAY
    if prior.alive:
        return Act.RUNNING
    if prior.told.get("remembered"):
        return Act.REFUSE_FAILED
    if not approved and prior.failed >= max_attempts:
        return Act.EXHAUSTED
    if not prior.effect_started:
        return Act.EXECUTE
    if prior.status == "failure":  # an error says little of what was done before it: nobody answered in time, say
        return Act.ROLL_BACK if undoes else Act.VERIFY if on_partial == "verify" else Act.EXECUTE
    if on_partial == "refuse":
        return Act.EXECUTE if approved else Act.REFUSE_PARTIAL
    return Act.ROLL_BACK if on_partial == "rollback" else Act.VERIFY


def entries_in(pointer: str | None) -> int:
    """How long the chain is that ends there."""
    return int((pointer or "0:").partition(":")[0])


def refusal(act: Act, prior: Prior, key: Key) -> HoldfastError:
    """In words."""
    what = f"operation {key.label!r}"
    if act is Act.MISMATCH:
        return KeyReused(
            f"{what} was begun with another payload: a retry has to send the same one, and a new operation needs a new "
            "key",
            key=key.digest, label=key.label,
        )  # fmt: skip
    if act is Act.REFUSE_FAILED:
        message = f"{what} failed before, and the error is remembered: {describe(prior.told)}"
    elif act is Act.EXHAUSTED:
        last = f", the last time with {describe(prior.told)}" if prior.error else ""
        message = (
            f"{what} was tried {prior.failed} times{last}: it is up for review, and not tried again before that is "
            "approved or it is reset"
        )
    else:
        message = (
            f"{what} was left half done in attempt {prior.attempt}: whoever ran it died, or could not "
            "write its end down, and what it did is not known. "
            "Give rollback= or verify=, or reset it, or approve its review"
        )
    status = prior.status or "failure"
    return OperationFailed(message, key=key.digest, label=key.label, status=status, error=prior.told or None)


def in_progress(key: Key, waited: float | None = None, why: str = "somebody else is at it") -> OperationInProgress:
    more = "" if waited is None else f"; waited {waited:.1f} s"
    return OperationInProgress(f"operation {key.label!r}: {why}{more}", key=key.digest, label=key.label)


def late(what: str) -> FencedOut:
    """What an owner is told whose lease has passed on."""
    return FencedOut(
        f"{what} has passed on to somebody else, because its lease did: what was done here is not recorded any more, "
        "and whoever has it now decides what becomes of it"
    )


def describe(error: Mapping[str, Any]) -> str:
    return f"{error.get('type')}: {error.get('message')}"


def told(error: BaseException, *, remembered: bool = False, where: str | None = None) -> dict[str, Any]:
    """An error as it is recorded."""
    said = {"type": type(error).__name__, "message": worded(error)[:1000]}
    return said | ({"remembered": True} if remembered else {}) | ({"where": where} if where else {})


def worded(error: BaseException) -> str:
    """What it says; nothing where its own ``__str__`` is broken, which must not keep us from writing down the rest."""
    try:
        return str(error)
    except Exception:
        return ""


def failed(said: Mapping[str, Any]) -> dict[str, Any]:
    """What the entry of a failure says of such an error."""
    return {"error": describe(said)} | ({"remembered": True} if said.get("remembered") else {})


def mended(kind: Literal["rollback", "reset"], detail: Mapping[str, Any]) -> dict[str, Any]:
    """The error that the log has from then on, by what the entry says. Whoever did it by hand is named, and has decided
    that it does not count as failed."""
    if kind == "rollback" and "actor" not in detail:
        why = detail.get("why")
        return {"type": "Interrupted", "message": why} if why else {"type": "Recovered", "message": "its owner died"}
    by = {name: detail.get(name) for name in ("actor", "reason")}
    said = {"type": "Reset" if kind == "reset" else "RolledBack", "message": f"by {by['actor']}: {by['reason']}", **by}
    return said | ({"reset": True} if kind == "reset" else {})


def writable(text: str) -> str:
    """The beginning of a text that others have made up, as every database keeps it."""
    return text[:1000].encode("utf-8", "replace").decode().replace("\0", "?")


def passes(error: BaseException, sqlstate: str | None) -> bool:
    """Whether it says nothing about the operation: the database was busy with others, or could not be reached."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if sqlstate is not None:
        return sqlstate in _PASSING or sqlstate.startswith("08")
    inner = getattr(error, "orig", None) or error  # as SQLAlchemy wraps it
    if (code := getattr(inner, "sqlite_errorcode", None)) is not None:
        return code & 0xFF in _SQLITE_PASSING
    name, text = type(inner).__name__, worded(error).lower()
    if name == "OperationalError" and type(inner).__module__.partition(".")[0] in ("psycopg", "psycopg2"):
        return True  # the server says a code with all that it refuses: without, the connection is what failed
    words = ("lock", "connection", "busy", "network")
    return name in ("OperationalError", "InterfaceError") and any(word in text for word in words)


def unanswered(error: BaseException | None) -> bool:
    """Whether nobody has answered, as HTTP libraries call it, which have errors of their own for that: the next time
    somebody may."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(unanswered, error.exceptions))
    found = causes(error, lambda each: each.__cause__ or getattr(each, "reason", None))  # as urllib calls it
    return any(kind.__name__ in _UNANSWERED for each in found for kind in type(each).__mro__)


def causes(error: BaseException | None, why: Callable[[BaseException], object]) -> Iterator[BaseException]:
    """It, and what it came from, each once: ``raise error from error`` makes one that is its own cause."""
    seen: set[int] = set()
    found: object = error
    while isinstance(found, BaseException) and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = why(found)


def collides(error: BaseException, sqlstate: str | None) -> bool:
    """Whether others got in its way, so that the same again is likely to do: nothing is wrong with it."""
    locked = type(error).__name__ == "OperationalError" and "locked" in worded(error).lower()
    return sqlstate in ("40001", "40P01") or (sqlstate is None and locked)


def pause(asked: int, waited: float, limit: float, chance: float) -> float:
    """Seconds until somebody who backs off asks again: longer each time, and shorter again towards the end of its time,
    so that whoever has waited longest asks most often. ``chance``: from 0 to 1, or they would all ask at once."""
    left = 1.0 if limit <= 0 or limit == float("inf") else max(0.05, 1.0 - waited / limit)
    return float(min(1.0, 0.005 * 2 ** min(asked, 10)) * left * (0.5 + chance))
