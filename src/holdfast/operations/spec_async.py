"""The specification of an operation: its key, its terms, its functions; and the rows that are written for it."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from holdfast.database.engine_async import AsyncEngine
from holdfast.database.sessions import Row
from holdfast.keys import lock_key
from holdfast.names import OPERATION
from holdfast.operations import result_codec
from holdfast.operations.decide import Key, StoredKey
from holdfast.operations.lineage_terms import NO_LINEAGE, Lineage
from holdfast.operations.log import encode_detail
from holdfast.operations.op_async import AsyncOp
from holdfast.operations.terms import NO_CHECKS, Checks, Function, OperationTerms

if TYPE_CHECKING:
    from holdfast.governance.policies_async import AsyncPolicies
    from holdfast.governance.policy import GovernedOperation
    from holdfast.operations.energy import Meter

_END_FIELDS = (
    "began", "label", "key", "expected", "pointer", "number", "entries", "status", "attempt", "fence", "fingerprint",
    "result", "result_hash", "error", "keep", "effect_started", "failures", "rollback", "outbox", "pipeline", "task",
    "dataset", "operation", "checksum", "params_hash", "late",
)  # fmt: skip
"""The fields of ``operation_end``, in this order."""


class AsyncOperationSpec(NamedTuple):
    engine: AsyncEngine
    key: Key
    fingerprint: str | None
    terms: OperationTerms
    rollback: Function | None = None
    rollback_name: str | None = None
    """The name under which rollback and probe are registered."""
    verify: Function | None = None
    checks: Checks = NO_CHECKS
    lease: str | None = None
    """The name of its lease, where that does not follow from its key: in a batch, or in a recovery."""
    lineage: Lineage = NO_LINEAGE
    sovereign: bool = False
    """Whether its dataset is sovereign, by the policy or by its options: it is locked as a whole."""
    governed: GovernedOperation | None = None
    """The policy and its demands; None when no policy applies."""
    meter: Meter | None = None
    """Estimates the energy of the execution."""
    policies: AsyncPolicies | None = None
    """The rules of the client; None for a recovery, which begins no attempt."""
    policy_version: int | None = None
    """Of the stored policy that ``governed`` respects."""
    payload: object = None

    def govern(self) -> Self:
        """The same, under the rules as the client knows them now. The policy decides whether the dataset is sovereign:
        whether its operations exclude each other."""
        assert self.policies is not None
        assert not isinstance(self.key, StoredKey)  # only a recovery has one
        rules, own = self.policies._rules, self.terms.options.sovereign
        if rules is None and not own:
            return self._replace(governed=None, sovereign=False, policy_version=self.policies._version)
        from holdfast.governance.policy import govern

        governed = govern(
            rules, self.key, sovereign=own, payload=self.payload, outputs=self.lineage.outputs,
            version=self.policies._version_for(self.key.dataset),
        )  # fmt: skip
        sovereign = governed is not None and governed.demands.sovereign
        return self._replace(governed=governed, sovereign=sovereign, policy_version=self.policies._version)

    @property
    def lease_name(self) -> str:
        """The lease under which the operation runs when it is not in a transaction."""
        return self.lease or lease_name_of(self.key.lock_key or 0)

    @property
    def dataset_claim(self) -> Row | None:
        """Parameters of ``operation_begin`` that lock a sovereign dataset as a whole; None if it is not sovereign."""
        if not self.sovereign or self.key.dataset is None:
            return None
        lock = lock_key(self.key.dataset, "")
        return {"key": "", "lock": lock, "lease": lease_name_of(lock)}

    @property
    def owner_names(self) -> Row:
        """Parameters of ``operation_look``: what an attempt at this operation has to wait for."""
        claim = self.dataset_claim
        return {"key": self.key.digest, "lease": self.lease_name, "dataset": claim and claim["lease"]}

    def lock_detail(self, lease: str | None = None) -> dict[str, str] | None:
        """The detail of a ``lock_acquired`` entry: the lease, and the name of what undoes the attempt."""
        if lease is None and self.rollback_name is None:
            return None  # as in most transactions
        fields = {"owner": lease, "rollback": self.rollback_name}
        return {name: value for name, value in fields.items() if value is not None}

    def claim_entries(
        self, fingerprint: str | None, version: str | None, bucket: str | None, parts: str | None,
        approval: int | None = None,
    ) -> list[tuple[str, dict[str, Any] | None]]:  # fmt: skip
        """Kind and detail of the entries that begin an attempt: who and why, the parts of the key that its row does not
        have (so that the row can be proven by its key), ``parts`` (which proves it if the digest was given), the
        version of the stored policy, the review that allows the attempt, and the mark of a sovereign dataset. The first
        four arguments are those of the key, except in a batch: there this is the spec of its first operation."""
        terms = self.terms
        detail: dict[str, Any] | None = None
        if terms.actor or terms.justification or fingerprint or version or bucket or parts:
            fields = {
                "actor": terms.actor, "justification": terms.justification, "fingerprint": fingerprint,
                "version": version, "bucket": bucket, "parts": parts,
            }  # fmt: skip
            detail = {name: value for name, value in fields.items() if value is not None}
        if self.lineage != NO_LINEAGE:
            detail = (detail or {}) | self.lineage._detail()
        if self.governed is not None and self.governed.version is not None:
            checked = {"policy": self.governed.version} | ({} if approval is None else {"review": approval})
            detail = (detail or {}) | checked
        if not self.sovereign:
            return [("claimed", detail)]
        return [("claimed", detail), ("sovereignty", {"dataset": self.key.dataset, "sovereignty_event": True})]

    def claim_row(self, has_begun: bool) -> Row:
        """Parameters of ``operation_claim`` beside those of the lease; for PostgreSQL joined as in ``end_parameters``.
        ``has_begun``: the effect may start."""
        key = self.key
        entries = [
            ("lock_acquired", self.lock_detail(self.lease_name)),
            *self.claim_entries(self.fingerprint, key.version, key.bucket, key._parts_digest),
        ]
        if has_begun:
            entries.append(("effect_started", None))
        claim = [part for kind, detail in entries for part in (kind, encode_detail(detail))]
        row = {
            "key": key.digest, "lock": key.lock_key, "claim": "\x1e".join(claim), "fingerprint": self.fingerprint,
            "effect_started": has_begun, "rollback": self.rollback_name, "label": key.label, "pipeline": key.pipeline,
            "task": key.task, "dataset": key.dataset, "operation": key.operation, "checksum": key.checksum,
            "params_hash": key.params_hash,
        }  # fmt: skip
        if self.engine.database.dialect == "sqlite":
            return row
        return {"told": "\x1f".join(["" if value is None else str(value) for value in row.values()])}

    def row(self, op: AsyncOp, status: str, **more: Any) -> Row:
        """The row of the operation with its pending entries: parameters of ``operation_write``, and with
        ``end_parameters`` of ``operation_end``. ``more``: the columns that this status sets; the others are empty."""
        key, pending = self.key, op._chain.pending()
        fields = {
            "key": key.digest, "label": key.label, "pipeline": key.pipeline, "task": key.task, "dataset": key.dataset,
            "operation": key.operation, "checksum": key.checksum, "params_hash": key.params_hash,
            "fingerprint": self.fingerprint, "rollback": self.rollback_name, "status": status, "attempt": op.attempt,
            "fence": op.fence, "effect_started": op._has_begun,
            "outbox": op._outbox_json() if op._outbox and status == "success" else None,
            "result": None, "result_hash": None, "error": None, "keep": None, "owner": None, "token": None,
            "lock": None, "failures": 0,
        }  # fmt: skip
        fields["expected"], fields["pointer"], fields["number"], fields["entries"] = pending
        fields.update(more)
        return fields


def lease_name_of(lock: int) -> str:
    return f"{OPERATION}{lock & 0xFFFFFFFFFFFFFFFF:016x}"


def end_parameters(row: Row) -> Row:
    """The parameters of ``operation_end``: the same row, and in it its fields joined into one ASCII text, which needs
    no adapter on any connection. No field contains a control character: names cannot, and the rest is JSON or
    hexadecimal."""
    text = "\x1f".join(["" if value is None else str(value) for value in map(row.get, _END_FIELDS)])
    row["told"] = text if text.isascii() else "\x1e" + json.dumps(text)
    return row


def encode_result(value: Any) -> dict[str, str]:
    """The fields ``result`` and ``result_hash`` of the row. ValueError when the value cannot be stored."""
    encoded = result_codec.encode(value)
    return {"result": encoded.hex(), "result_hash": sha256(encoded).hexdigest()}
