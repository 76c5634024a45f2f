# Generated from policies_async.py by scripts/unasync.py. Do not edit.
"""``client.policies``: the policy that is stored in the database, in versions. And the rules of this client: its own
policy and the stored one, of which the stricter decision counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.database.engine import Engine
from holdfast.errors import Conflict, Refused
from holdfast.names import check_limit, check_said

if TYPE_CHECKING:
    from holdfast.governance.dataset import Dataset
    from holdfast.governance.policy import Policy
    from holdfast.governance.policy_record import PolicyRecord

Records = list["PolicyRecord"]
Lines = list[str]
LOCKED = "55P03"


class Policies:
    """``get``, ``list`` and ``apply`` versions of the stored policy. ``own``: the policy of the client."""

    def __init__(self, engine: Engine, own: Policy | None = None) -> None:
        self._engine, self._own = engine, own
        self._rules = own
        """What applies to operations, as far as this client knows: see ``_refresh``."""
        self._version: int | None = None
        """Of the stored policy in ``_rules``."""
        self._stored: Policy | None = None

    def get(self, version: int | None = None) -> PolicyRecord | None:
        """A version, or the one in force; None if there is none."""
        from holdfast.governance.policy_record import PolicyRecord

        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise TypeError(f"version must be an int, not {type(version).__name__}")
        rows = self._engine.call("policy_list", {"version": version, "limit": 1})
        return PolicyRecord._of(rows[0]) if rows else None

    def list(self, *, limit: int = 100) -> Records:
        """The latest version first."""
        from holdfast.governance.policy_record import PolicyRecord

        rows = self._engine.call("policy_list", {"version": None, "limit": check_limit(limit)})
        return [PolicyRecord._of(row) for row in rows]

    def changes(self, datasets: Mapping[str, Dataset | Mapping[str, Any]]) -> Lines:
        """What ``apply`` would change, a line for each pattern. ValueError as there."""
        from holdfast.governance.dataset import parse_datasets
        from holdfast.governance.policy_record import policy_changes, storable_tables

        record = self.get()
        tables = storable_tables(parse_datasets(datasets))
        return policy_changes({} if record is None else record.datasets, tables)

    def apply(
        self,
        datasets: Mapping[str, Dataset | Mapping[str, Any]],
        *,
        actor: str,
        reason: str,
        expected: int | None = None,
    ) -> int:
        """Store the declarations in the place of those in force; an empty mapping stores none. Returns the version.

        ValueError that lists everything that is wrong with them. Conflict when the version in force is not
        ``expected`` (0: none), or when a transaction that has written an operation stays open. Governed:
        ``policy.apply``."""
        from holdfast.governance.dataset import parse_datasets
        from holdfast.governance.policy_record import storable_tables

        check_said(actor, "actor")
        check_said(reason, "reason", 1000)
        tables = storable_tables(parse_datasets(datasets))
        parameters = {"datasets": json.dumps(tables), "actor": actor, "reason": reason, "expected": expected}
        try:
            [row] = self._engine.call("policy_apply", parameters, again=None, alone=True)
        except Refused as error:
            if error.sqlstate != LOCKED:
                raise
            message = "a transaction that has written an operation is still open: apply the policy when it has ended"
            raise Conflict(message, current=None) from error
        if row["version"] is None:
            raise Conflict(f"the stored policy is not version {expected} any more: look at it again", current=None)
        version: int = row["version"]
        return version

    def _refresh(self) -> None:
        """Read the stored policy."""
        record = self.get()
        if record is None or record.version == self._version:
            return
        from holdfast.governance.policy import Policy

        self._stored = Policy(record.datasets) if record.datasets else None
        self._rules = self._own if self._stored is None else (self._own or Policy())._with(self._stored)
        self._version = record.version

    def _version_for(self, dataset: str | None) -> int | None:
        """The version of the stored policy, if that concerns the dataset."""
        return self._version if self._stored is not None and self._stored.datasets(dataset) else None
