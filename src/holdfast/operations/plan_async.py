"""All that was said about an operation, and how it is written down."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.database.engine_async import AsyncEngine
from holdfast.database.sessions import Row
from holdfast.keys import lock_key
from holdfast.operations import results
from holdfast.operations.decide import LEASE, Key
from holdfast.operations.lineage_terms import NOTHING, Lineage
from holdfast.operations.running_async import AsyncRunning
from holdfast.operations.terms import Function, OperationTerms

if TYPE_CHECKING:
    from holdfast.governance.policy import GovernedOperation
    from holdfast.operations.energy import Meter

_TOLD = (
    "began", "label", "key", "expected", "pointer", "number", "entries", "status", "attempt", "fence", "fingerprint",
    "result", "result_hash", "error", "keep", "effect_started", "failures", "rollback", "outbox", "pipeline", "task",
    "dataset", "operation", "checksum", "params_hash", "late",
)  # fmt: skip
"""In the order in which the end of a transaction is told of them."""


class AsyncPlan(NamedTuple):
    """All that was said about an operation."""

    engine: AsyncEngine
    key: Key
    fingerprint: str | None
    terms: OperationTerms
    rollback: Function | None = None
    handler: str | None = None
    """The name under which rollback and probe are registered."""
    verify: Function | None = None
    preconditions: Sequence[Function] = ()
    postconditions: Sequence[Function] = ()
    owner: str | None = None
    lineage: Lineage = NOTHING
    governed: GovernedOperation | None = None
    """What the policy is to be asked with, if it has to."""
    energy: Meter | None = None
    """What says what the execution cost, if that is wanted."""

    @property
    def lease(self) -> str:
        """The name of the lease under which it is done, if it is not done in a transaction."""
        return self.owner or lease_of(self.key.lock_key or 0)

    @property
    def whole(self) -> Row | None:
        """What asks for the lock of the dataset itself, if that is sovereign: the other one is of one operation."""
        if not self.terms.sovereign or self.key.dataset is None:
            return None
        lock = lock_key(self.key.dataset, "")
        return {"key": "", "lock": lock, "lease": lease_of(lock)}

    def locked(self, owner: str | None = None) -> dict[str, str] | None:
        """What the log says of its lock: the lease that it is held under, and what would undo the attempt."""
        if owner is None and self.handler is None:
            return None  # as in most transactions
        said = {"owner": owner, "rollback": self.handler}
        return {name: value for name, value in said.items() if value is not None}

    def parameters(self, op: AsyncRunning, status: str, **more: Any) -> Row:
        """What is written of it, with the entries that are waiting."""
        key, written = self.key, op.chain.waiting()
        known = {
            "key": key.digest, "label": key.label, "pipeline": key.pipeline, "task": key.task, "dataset": key.dataset,
            "operation": key.operation, "checksum": key.checksum, "params_hash": key.params_hash,
            "fingerprint": self.fingerprint, "rollback": self.handler, "status": status, "attempt": op.attempt,
            "fence": op.fence, "effect_started": op.began, "outbox": op.told() if status == "success" else None,
            "result": None, "result_hash": None, "error": None, "keep": None, "owner": None, "token": None,
            "lock": None, "failures": 0,
        }  # fmt: skip
        return {**known, **written._asdict(), **more}


def lease_of(lock: int) -> str:
    return f"{LEASE}{lock & 0xFFFFFFFFFFFFFFFF:016x}"


def as_told(parameters: Row) -> str:
    """What the end of a transaction is told, as one text, which every connection has the letters for."""
    told = line(map(parameters.get, _TOLD))
    return told if told.isascii() else "\x1e" + json.dumps(told)


def line(parts: Iterable[Any]) -> str:
    """None of them has a control character in it, or is empty: names may not, and the rest is JSON or hexadecimal."""
    return "\x1f".join(["" if part is None else str(part) for part in parts])


def kept(value: Any) -> dict[str, Any]:
    """A result as it is written; ValueError when it cannot be."""
    encoded = results.encode(value)
    return {"result": encoded.hex(), "result_hash": sha256(encoded).hexdigest()}


def kept_for(keep: float | None) -> dict[str, float] | None:
    """What the entry of a success says of its result."""
    return None if keep is None else {"keep": keep}
