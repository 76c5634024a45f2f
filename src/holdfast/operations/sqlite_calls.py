"""The calls of operations, their log and their reviews on SQLite. They are durable: what was told must not be lost.
Only ``operation_look`` and ``operation_acquire`` are volatile, because a crash of the machine ends all processes, and
so every owner.

``operation_begin``, ``operation_end`` and those of reviews also run in the user's own transaction. ``**_`` takes what
PostgreSQL alone needs: ``lock`` and ``told``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast.database.sqlite_calls import Rows, Run, call, changes
from holdfast.errors import Refused
from holdfast.lease.sqlite_calls import lease_release, lease_take, refuse_take, refuses
from holdfast.operations.decide import KEY_REUSED, ORIGIN, POLICY_DENIES
from holdfast.operations.log import encode_entry, hash_prefix, link_entries

_LEASE_TERMS = ("holder", "ttl", "beat", "at_least", "solo", "session_key", "process")
_NOT_GRANTED = dict.fromkeys(("fence", "held_by", "remaining", "session_watch"))


def check_policy(run: Run, entries: dict[str, str]) -> None:
    """Refused when the stored policy forbids these entries, by key."""
    for stored in run("operation.policy"):  # the latest, if there is one
        from holdfast.operations.sqlite_policy import check_entries

        for key, text in entries.items():
            check_entries(run, stored, key, text)


def check_origin(run: Run, key: str, row: Mapping[str, Any]) -> None:
    """Refused when the operation with this key belongs to another pipeline, task, dataset, operation, checksum or
    params_hash than ``row``."""
    for other in run("operation.origin", key=key, **{name: row.get(name) for name in ORIGIN}):
        raise Refused(f"key {key} belongs to another operation, {other['label']!r}", KEY_REUSED)


def _owners_live(run: Run, key: str | None, lease: str | None, dataset: str | None) -> Rows:
    return [] if run("operation_look.gone", key=key, lease=lease, dataset=dataset) else [{"seconds": None}]


@call(volatile=True, answer=_owners_live)
def operation_look(run: Run, key: str | None, lease: str | None, dataset: str | None) -> Rows:
    for row in run("operation_look.gone", key=key, lease=lease, dataset=dataset):
        run("operation_look.declare_dead", beat=row["beat"])
    return [{"seconds": 0.0}]


@call()
def operation_begin(run: Run, key: str, lease: str, **_: Any) -> Rows:
    run("operation_begin.lock")
    return run("operation_begin.state", key=key, lease=lease)


def _not_correctable(
    run: Run, key: str, expected: str | None = None, owner: str | None = None, token: str | None = None, **_: Any
) -> Rows:
    if token is not None and not run("operation.lease", owner=owner, token=token):
        return [{"state": "fenced"}]
    return run("operation_write.changed", key=key, expected=expected)


def _not_writable(
    run: Run, key: str, expected: str | None = None, owner: str | None = None, token: str | None = None, **row: Any
) -> Rows:
    changed = _not_correctable(run, key, expected, owner, token)
    if changed and changed[0]["state"] == "changed":
        check_origin(run, key, row)
    return changed


@call("operation_write", "operation_end", answer=_not_writable)
def operation_write(
    run: Run,
    key: str,
    number: int,
    entries: str,
    attempt: int,
    expected: str | None = None,
    outbox: str | None = None,
    corrects: bool = False,
    **row: Any,
) -> Rows:
    """``row`` holds the other columns of the log."""
    if expected is not None and not corrects:
        check_origin(run, key, row)
    run("operation_write.log", key=key, attempt=attempt, entries=entries, **row)
    if expected is not None:  # else they are in the row
        run("operation.entries", key=key, number=number, entries=entries)
    if outbox is not None:
        run("operation_write.outbox", key=key, attempt=attempt, outbox=outbox)
    check_policy(run, {key: entries})
    return [{"state": "done"}]


@call(volatile=True, answer=refuses("operation"))
def operation_acquire(run: Run, **terms: Any) -> Rows:
    return lease_take(run, "operation", **terms)


def _not_claimable(run: Run, key: str, name: str, token: str, **terms: Any) -> Rows:
    """The answer to a claim that changes nothing: the operation has a row, or the lease is refused."""
    rows = run("operation_claim.known", key=key, name=name, token=token)
    answer = {"known": None, "pointer": None, "now": None}
    for row in rows:
        if row["known"] is not None and not row["ours"]:
            check_origin(run, key, terms)
            return [{"status": "known", **_NOT_GRANTED, **answer, "known": row["known"], "now": row["now"]}]
        answer |= {"pointer": row["pointer"], "now": row["now"]}
    return [{**lease, **answer} for lease in refuse_take(run, "operation", name=name, token=token, **terms)]


@call(answer=_not_claimable)
def operation_claim(run: Run, key: str, claim: str, name: str, token: str, **terms: Any) -> Rows:
    """``claim``: kinds and details of the entries, separated, which are chained here, where fence and time are known.
    ``terms``: those of ``lease_take``, and columns of the log."""
    lease = {each: terms.pop(each) for each in _LEASE_TERMS if each in terms}
    [granted] = lease_take(run, "operation", name=name, token=token, **lease)
    [row] = run("operation_claim.known", key=key, name=name, token=token)
    parts = claim.split("\x1e")
    entries = [
        encode_entry(number, kind, 1, granted["fence"], row["now"], detail)
        for number, (kind, detail) in enumerate(zip(parts[::2], parts[1::2], strict=True), 1)
    ]
    last_hash, text = link_entries(hash_prefix(key), "", entries)
    pointer = f"{len(entries)}:{last_hash}"
    terms |= {"status": "partial", "attempt": 1, "fence": granted["fence"], "failures": 0, "owner": name}
    nulls = dict.fromkeys(("result", "result_hash", "error", "keep"))
    run("operation_write.log", key=key, pointer=pointer, entries=text, **nulls, **terms)
    check_policy(run, {key: text})
    return [{**granted, "known": None, "pointer": pointer, "now": row["now"]}]


@call(answer=_not_writable)
def operation_finish(
    run: Run,
    number: int,
    owner: str,
    token: str,
    outbox: str | None = None,
    tell: bool | None = None,
    again: bool | None = None,
    **row: Any,
) -> Rows:
    """``operation_write``, and the lease is released."""
    rows = operation_write(run, number=number, outbox=outbox, owner=owner, **row)
    lease_release(run, owner, tell)
    return rows


def _check_many(run: Run, rows: str, column: int, unwritten: Rows) -> None:
    """``check_policy`` for the entries in a column of a batch, except the unwritten ones."""
    others = {row["key"] for row in unwritten}
    check_policy(run, {row[0]: row[column] for row in json.loads(rows) if row[0] not in others})


def _fenced(run: Run, owner: str, token: str, **_: Any) -> Rows:
    return [] if run("operation.lease", owner=owner, token=token) else [{"state": "fenced"}]


@call(answer=_not_correctable)
def operation_correct(
    run: Run, key: str, label: str, status: str, actor: str, reason: str, number: int | None = None,
    pointer: str | None = None, fence: int | None = None, **row: Any,
) -> Rows:  # fmt: skip
    """``operation_write`` of a reset (status failure), a completion (success) or a rollback (undone) by an operator. A
    reset and a completion close the reviews. Without ``pointer``: reset an operation that has no row."""
    if pointer is not None and number is not None:
        row |= {"key": key, "label": label, "status": status, "pointer": pointer, "fence": fence}
        operation_write(run, number=number, corrects=True, **row)
    run("operation_correct.reviews", key=key, status=status, actor=actor, reason=reason)
    entry = {"label": label, "actor": actor, "reason": reason, "reviews": changes(run)}
    run("operation_correct.audit", key=key, status=status, fence=fence, **entry)
    return [{"state": "done"}]


@call(answer=_fenced)
def operation_claim_many(run: Run, rows: str, owner: str, fence: int, rollback: str | None = None, **_: Any) -> Rows:
    """The operations among ``rows``, a JSON array, that were claimed before."""
    run("operation_claim_many.log", rows=rows, fence=fence, owner=owner, rollback=rollback)
    others = run("operation_claim_many.others", rows=rows)
    _check_many(run, rows, 2, others)
    return others


@call(answer=_fenced)
def operation_finish_many(run: Run, rows: str, keep: float | None = None, **_: Any) -> Rows:
    """The operations among ``rows``, a JSON array, that were changed by another process."""
    run("operation_finish_many.outbox", rows=rows)
    run("operation_finish_many.log", rows=rows, keep=keep)
    run("operation_finish_many.entries", rows=rows)
    changed = run("operation_finish_many.changed", rows=rows)
    _check_many(run, rows, 4, changed)
    return changed


@call()
def operation_expire(run: Run, limit: int, actor: str, reason: str) -> Rows:
    run("operation_expire.results", limit=limit)
    gone = changes(run)
    if gone:
        run("operation_expire.audit", actor=actor, reason=reason, results=gone)
    return [{"gone": gone}]


@call()
def review_open(
    run: Run, key: str, label: str, dataset: str, operation: str, reason: str, detail: str, asked_by: str | None = None,
    fingerprint: str | None = None, outputs: str | None = None, four_eyes: bool | None = None,
) -> Rows:  # fmt: skip
    run("review_open.close_done", key=key)
    if rows := run("review_open.id", key=key, reason=reason):
        return rows
    row = {"label": label, "dataset": dataset, "operation": operation, "detail": detail, "asked_by": asked_by}
    bound = {"fingerprint": fingerprint, "outputs": outputs, "four_eyes": bool(four_eyes)}
    run("review_open.insert", key=key, reason=reason, **row, **bound)
    return run("review_open.id", key=key, reason=reason)


def _no_approval(
    run: Run,
    key: str,
    fingerprint: str | None = None,
    asked_by: str | None = None,
    outputs: str | None = None,
    **_: Any,
) -> Rows:
    if rows := run("review_take.denied", key=key):
        return rows
    asked = {"fingerprint": fingerprint, "asked_by": asked_by, "outputs": outputs}
    return [] if run("review_take.approved", key=key, **asked) else [{"id": None}]


@call(answer=_no_approval)
def review_take(
    run: Run, key: str, token: str, fingerprint: str | None = None, asked_by: str | None = None,
    outputs: str | None = None,
) -> Rows:  # fmt: skip
    asked = {"fingerprint": fingerprint, "asked_by": asked_by, "outputs": outputs}
    return run("review_take.spend", key=key, token=token, **asked)


@call()
def review_decide(run: Run, id: int, outcome: str, actor: str, answer: str) -> Rows:
    if outcome == "approved" and run("review_decide.by_asker", id=id, actor=actor):
        raise Refused(
            f"review {id} needs four eyes: {actor!r} asked for it, and another actor approves it", POLICY_DENIES
        )
    run("review_decide.update", id=id, outcome=outcome, actor=actor, answer=answer)
    decided = changes(run)
    if decided:
        run("review_decide.audit", id=id, actor=actor, answer=answer)
    return [{"decided": decided}]


def _not_archivable(run: Run, key: str, expected: str, pointer: str, **_: Any) -> Rows:
    return (
        run("wal_archive.done", key=key, pointer=pointer)
        or run("wal_archive.changed", key=key, expected=expected)
        or run("wal_archive.unpublished", key=key)
    )


@call(answer=_not_archivable)
def wal_archive(
    run: Run, key: str, expected: str, pointer: str, number: int, entries: str, actor: str, reason: str
) -> Rows:
    run("wal_archive.pointer", key=key, pointer=pointer)
    run("operation.entries", key=key, number=number, entries=entries)
    run("wal_archive.places", key=key, number=number)
    run("wal_archive.entries", key=key, number=number)
    run("wal_archive.first_entries", key=key)
    run("wal_archive.outbox", key=key)
    run("wal_archive.audit", key=key, expected=expected, actor=actor, reason=reason)
    return [{"state": "archived"}]
