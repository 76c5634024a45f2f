"""The check of the stored policy on SQLite, where the library makes it: entries of the log are checked as they are
written, as ``policy_check`` does it on PostgreSQL. The claim of an attempt, its success, and what operators write.

The rules are those of ``policy_check``, and so are the messages: change both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NoReturn

from holdfast.database.sessions import Row
from holdfast.database.sqlite_calls import Run
from holdfast.errors import Refused
from holdfast.governance.dataset import Dataset
from holdfast.governance.policy import Policy, matches
from holdfast.keys import lock_key
from holdfast.names import OPERATION
from holdfast.operations.decide import POLICY_CHANGED, POLICY_DENIES
from holdfast.operations.log import LogEntry, parse_entries


def check_entries(run: Run, stored: Row, key: str, text: str) -> None:
    """Refused when the stored policy forbids these entries. ``run``: in the transaction that has written them."""
    policy = _parse_policy(stored["datasets"])
    [row] = run("operation.row", key=key)
    if not (datasets := policy.datasets(row["dataset"])):
        return
    entries = parse_entries(key, text)
    for entry in entries:
        if "actor" in entry.fields and entry.kind in ("reset", "rollback", "success"):
            _check_operator(row, datasets, entry)
        if entry.kind in ("claimed", "success"):
            claims = _find_claims(run, key, entry.attempt)
            if problem := next(_problems(run, row, datasets, entry, claims, stored["version"]), None):
                _refuse(row, problem)


@lru_cache(maxsize=8)
def _parse_policy(datasets: str) -> Policy:
    return Policy(json.loads(datasets))


def _find_claims(run: Run, key: str, attempt: int) -> list[LogEntry]:
    rows = run("operation_entries", key=key, after_number=None, limit=-1)
    entries = [entry for row in rows for entry in parse_entries(key, row["entries"])]
    return [entry for entry in entries if entry.kind == "claimed" and entry.attempt == attempt]


def _problems(
    run: Run, row: Row, datasets: Sequence[Dataset], entry: LogEntry, claims: Sequence[LogEntry], version: int
) -> Iterator[str]:
    """What the policy forbids about a claim or a success."""
    if not claims:
        yield 'is governed by the stored policy, and this attempt has no entry "claimed"'
        return
    given = {"checksum": row["checksum"], **{name: claims[-1].fields.get(name) for name in _IN_CLAIM}}
    is_claim, is_sensitive = entry.kind == "claimed", any(dataset.sensitive for dataset in datasets)
    if is_claim and given["policy"] != version:
        under = "none" if given["policy"] is None else f"version {given['policy']}"
        raise Refused(
            f"{_name(row)} is governed by version {version} of the stored policy, and this attempt was checked under "
            f"{under}",
            POLICY_CHANGED,
        )
    if is_claim and len(claims) > 1:
        yield f"is governed by the stored policy, and attempt {entry.attempt} is claimed twice"
    if not is_claim and "actor" in entry.fields:
        return  # an operator says that it happened
    required = {name for dataset in datasets for name in dataset.required}
    if is_sensitive:
        required.add("justification")
    if missing := sorted(name for name in required if not str(given[name] or "").strip()):
        yield f"requires {', '.join(missing)}"
    if any(dataset.sovereign for dataset in datasets) and row["dataset"] is not None:
        lease = f"{OPERATION}{lock_key(row['dataset'], ''):016x}"
        [held] = run("operation.dataset_is_locked", lease=lease)
        if row["owner"] is None and held["locked"]:
            yield "is sovereign, and is locked by another operation"
        if row["owner"] is not None and not held["locked"]:
            yield "is sovereign, and this operation has not locked it as a whole"
    if is_claim:
        yield from _review_problems(run, row, datasets, entry, given, is_sensitive=is_sensitive)


_IN_CLAIM = ("actor", "justification", "bucket", "version", "policy", "review")


def _review_problems(
    run: Run, row: Row, datasets: Sequence[Dataset], entry: LogEntry, given: dict[str, Any], *, is_sensitive: bool
) -> Iterator[str]:
    kin: Row = {"same": None, "retry_of": None}
    if is_sensitive:
        names = ("key", "pipeline", "task", "dataset", "operation", "checksum", "params_hash")
        [kin] = run("operation_kin", **{name: row[name] for name in names})
    if kin["same"] is not None and (given["checksum"] is not None or given["bucket"] is None):
        yield f"is sensitive, and the same was done to it under another key: {kin['same']}"
    elif kin["retry_of"] is not None or any(dataset.review for dataset in datasets):
        approvals = run(
            "operation.use_approval", key=row["key"], id=given["review"], attempt=entry.attempt, actor=given["actor"]
        )
        if not approvals:
            yield "needs an approved review for this attempt"
        elif any(dataset.has_four_eyes for dataset in datasets) and approvals[0]["actor"] == given["actor"]:
            yield f"needs four eyes: {given['actor']!r} approved the review, and another actor runs the operation"


def _check_operator(row: Row, datasets: Sequence[Dataset], entry: LogEntry) -> None:
    actor = entry.fields["actor"]
    for dataset in datasets:
        allowed = dataset.may_reset
        if allowed is not None and not any(matches(actor, pattern) for pattern in allowed):
            who = ", ".join(allowed) or "no one"
            _refuse(row, f"may be reset, rolled back and completed by {who}, not by {actor!r}")


def _name(row: Row) -> str:
    return "an operation without a dataset" if row["dataset"] is None else f"dataset {row['dataset']!r}"


def _refuse(row: Row, problem: str) -> NoReturn:
    raise Refused(f"{_name(row)} {problem}", POLICY_DENIES)
