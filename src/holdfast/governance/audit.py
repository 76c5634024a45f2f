# Generated from audit_async.py by scripts/unasync.py. Do not edit.
"""``client.audit``: what operators did, who and why, and how it ended.

The database writes the entry of an act on others' work itself, in the transaction of the act: a forced release, a wipe,
a reset. What is not one transaction, such as a command, has an entry that is begun before it and ended after it.
"""

from __future__ import annotations

import json
from typing import Any

from holdfast.database.engine import Engine
from holdfast.governance.audit_record import AuditRecord
from holdfast.names import check_limit, check_max_bytes, check_name, check_said

Records = list[AuditRecord]
MAX_OUTCOME = 200
"""Characters."""


class Audit:
    """``list`` reads the audit. ``begin``, ``note`` and ``end`` are for commands, which write it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def begin(self, action: str, subject: str, *, actor: str, reason: str, detail: Any = None) -> int:
        """Record that an action is about to begin. Returns the number of the entry. ``action`` contains a dot: other
        names are for the acts that the database records itself."""
        if "." not in check_name(action, "action"):
            raise ValueError(f"action must contain a dot, not {action!r}: others are for acts the database records")
        parameters = {
            "action": action,
            "subject": check_name(subject, "subject"),
            "actor": check_said(actor, "actor"),
            "reason": check_said(reason, "reason", limit=1000),
            "detail": None if detail is None else json.dumps(detail),
        }
        [row] = self._engine.call("audit_begin", parameters)
        entry: int = row["entry"]
        return entry

    def note(self, entry: int, *, fence: int | None = None, detail: Any = None) -> None:
        """Add what has become known since the beginning."""
        text = None if detail is None else json.dumps(detail)
        self._engine.call("audit_note", {"entry": entry, "fence": fence, "detail": text})

    def end(self, entry: int, outcome: str) -> None:
        """Record the outcome, as one line of printable characters. Only the first call counts."""
        words = "".join(character if character.isprintable() else " " for character in outcome).split()
        self._engine.call("audit_end", {"entry": entry, "outcome": " ".join(words)[:MAX_OUTCOME]})

    def list(
        self, *, action: str | None = None, actor: str | None = None, limit: int = 100, max_bytes: int | None = None
    ) -> Records:
        """The latest entries first, of one action or actor if that is given. An entry without an outcome is under way,
        or its process died. ``max_bytes``: the list ends before the entry whose texts would make it larger, unless that
        is its first one."""
        parameters = {
            "action": None if action is None else check_name(action, "action"),
            "actor": None if actor is None else check_said(actor, "actor"),
            "limit": check_limit(limit),
            "max_bytes": check_max_bytes(max_bytes),
        }
        return [AuditRecord._of(row) for row in self._engine.call("audit_list", parameters)]
