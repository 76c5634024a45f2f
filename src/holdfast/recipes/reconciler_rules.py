"""What a record becomes, given its backend: the rules of a reconciler, and the codec of a record's payload.

The rules are the default of ``client.reconciler(rules=…)``. A subclass that overrides one method changes one rule. No
rule can break what the reconciler promises: each write still compares the version and names the lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from holdfast.reconciler import Backend, Phase


class Codec(Protocol):
    """Translates the payload of a record into the value that the rules work with, and back."""

    def decode(self, payload: Any) -> Any:
        """The value of a stored payload, which is bytes or a JSON value. Raises when it is damaged."""

    def encode(self, value: Any) -> Any:
        """The payload to store: bytes or a JSON value."""


class ReconcilerRules:
    """The phase of a record whose backend exists, what happens to an orphan, and where a status is stored.

    A phase is a ``str``; those of ``Phase`` are the default. No method may change its arguments in place.
    """

    def status(self, value: Any) -> Mapping[str, Any]:
        """The status in a record's value, as ``merge`` has stored it; empty if the record was never reconciled."""
        status = value.get("status", {}) if isinstance(value, dict) else None
        if not isinstance(status, dict):
            raise ValueError(
                'the payload of a reconciled record must be a dict, and its "status", if there is one, too; '
                "for another payload pass codec= or rules="
            )
        return status

    def merge(self, value: Any, status: Mapping[str, Any]) -> Any:
        """The value with this status: ``phase``, ``conditions``, ``details``, and ``missing_since`` of an orphan. What
        handlers wrote stays. ``status`` must return the same again: a record that differs is written at each look."""
        return {**value, "status": dict(status)}

    def phase(self, backend: Backend, *, before: str, session: bool) -> str:
        """The phase of a record whose backend exists. Deleting stays until the backend is gone; any other phase follows
        from the present conditions alone. ``session``: whether the record's session is present."""
        if backend.deleting or Phase(before) is Phase.DELETING:
            return Phase.DELETING
        ready = backend.ready
        if ready is None or ready.status is None:
            return Phase.PROVISIONING
        if ready.status:
            return Phase.READY if session else Phase.PROVISIONING
        if not ready.terminal:
            return Phase.PROVISIONING
        return Phase.COMPLETED if backend.completed else Phase.ERROR

    def orphan(self, *, before: str, missing: float | None, grace: float) -> str | None:
        """The phase of a record whose backend is missing; None removes the record. ``missing``: seconds since the first
        look that missed it, None at that look itself. A grace always takes two looks."""
        if Phase(before) is Phase.DELETED:
            return None
        is_over = missing is not None and missing >= grace
        return Phase.DELETED if is_over or before == Phase.DELETING else before
