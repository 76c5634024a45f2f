# Generated from audit_async.py by scripts/unasync.py. Do not edit.
"""The audit: what operators did to others' work, who and why, and how it ended. Written before it is done."""

from __future__ import annotations

import json
from typing import Any

from holdfast.database.engine import Engine
from holdfast.names import check_limit, check_name, check_said
from holdfast.records import AuditRecord

Records = list[AuditRecord]


class Audit:
    """``client.audit``: the record of what operators did. ``list`` reads it; the rest is for those who write it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def begin(self, action: str, subject: str, *, actor: str, reason: str, detail: Any = None) -> int:
        """Something is about to be done; the number of its entry."""
        parameters = {
            "action": check_name(action, "action"),
            "subject": check_name(subject, "subject"),
            "actor": check_said(actor, "actor"),
            "reason": check_said(reason, "reason", most=1000),
            "detail": None if detail is None else json.dumps(detail),
        }
        [row] = self._engine.call("audit_begin", parameters)
        entry: int = row["entry"]
        return entry

    def note(self, entry: int, *, fence: int | None = None, detail: Any = None) -> None:
        """What has become known of it since, before its end."""
        told = None if detail is None else json.dumps(detail)
        self._engine.call("audit_note", {"entry": entry, "fence": fence, "detail": told})

    def end(self, entry: int, outcome: str) -> None:
        """How it ended, in one line; said once."""
        line = " ".join("".join(c if c.isprintable() else " " for c in outcome).split())[:200]
        self._engine.call("audit_end", {"entry": entry, "outcome": line})

    def list(self, *, most: int = 100) -> Records:
        """The latest first. One without an outcome is under way, or nobody could tell how it ended."""
        return [AuditRecord.of(row) for row in self._engine.call("audit_list", {"most": check_limit(most)})]
