"""The calls of objects on SQLite.

Nearly every write succeeds with its first statement, the attempt, which needs no BEGIN: bench objects. The function
finds out why it did not. ``**_`` takes what the attempt alone needs, and ``token``, ``again`` and ``late``, which are
for PostgreSQL: there an answer can get lost.
"""

from __future__ import annotations

from typing import Any

from holdfast.database.sqlite_calls import Rows, Run, call


@call(attempt="object_swap.update")
def object_swap(
    run: Run, type: str, id: str, lease: str | None = None, lease_token: str | None = None, **_: Any
) -> Rows:
    """The most frequent write: JSON text, at the expected version."""
    if _is_fenced(run, lease, lease_token):
        return [{"status": "fenced"}]
    return run("object.conflict", type=type, id=id)


@call(attempt="object_put.upsert")
def object_put(
    run: Run,
    type: str,
    id: str,
    expected: int | None = None,
    name: str | None = None,
    lease: str | None = None,
    lease_token: str | None = None,
    **_: Any,
) -> Rows:
    if _is_fenced(run, lease, lease_token):
        return [{"status": "fenced"}]
    rows = run("object_put.refused", type=type, id=id, expected=expected)
    return rows or run("object_put.taken", type=type, id=id, name=name)


@call(attempt="object_delete.delete")
def object_delete(
    run: Run, type: str, id: str, lease: str | None = None, lease_token: str | None = None, **_: Any
) -> Rows:
    if _is_fenced(run, lease, lease_token):
        return [{"status": "fenced"}]
    return run("object.conflict", type=type, id=id)


def _is_fenced(run: Run, lease: str | None, token: str | None) -> bool:
    return lease is not None and not run("object.lease", lease=lease, lease_token=token)
