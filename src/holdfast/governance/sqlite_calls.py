"""The calls of the audit and of the stored policy on SQLite."""

from __future__ import annotations

from typing import Any

from holdfast.database.sqlite_calls import Rows, Run, call


@call()
def audit_begin(
    run: Run, action: str, subject: str, actor: str, reason: str | None = None, detail: str | None = None
) -> Rows:
    run("audit_begin.insert", action=action, subject=subject, actor=actor, reason=reason, detail=detail)
    return run("audit_begin.entry")


def _not_open(run: Run, entry: int, **_: Any) -> Rows:
    return [] if run("audit.open_entry", entry=entry) else [{"done": 0}]


@call(answer=_not_open)
def audit_note(run: Run, entry: int, fence: int | None = None, detail: str | None = None) -> Rows:
    run("audit_note.update", entry=entry, fence=fence, detail=detail)
    return [{"done": 1}]


@call(answer=_not_open)
def audit_end(run: Run, entry: int, outcome: str) -> Rows:
    run("audit_end.update", entry=entry, outcome=outcome)
    return [{"done": 1}]


def _policy_changed(run: Run, expected: int | None = None, **_: Any) -> Rows:
    return run("policy_apply.changed", expected=expected)


@call(answer=_policy_changed)
def policy_apply(run: Run, datasets: str, actor: str, reason: str, **_: Any) -> Rows:
    run("policy_apply.insert", datasets=datasets, actor=actor, reason=reason)
    run("policy_apply.audit", actor=actor, reason=reason)
    return run("policy_apply.version")
