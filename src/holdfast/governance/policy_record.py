"""One version of the stored policy, and what differs between two."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast.governance.dataset import Dataset, dump_datasets
from holdfast.timestamps import as_datetime

Tables = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """A version of the policy that is stored in the database."""

    version: int
    applied_at: datetime
    actor: str
    role: str | None
    """The database role of the actor; None on SQLite."""
    reason: str
    datasets: Tables
    """The declarations by pattern, as in a policy file."""

    @classmethod
    def _of(cls, row: Mapping[str, Any]) -> PolicyRecord:
        datasets = row["datasets"]
        if isinstance(datasets, str):
            datasets = json.loads(datasets)
        return cls(**{**row, "applied_at": as_datetime(row["applied_at"]), "datasets": datasets})


def storable_tables(datasets: Mapping[str, Dataset]) -> dict[str, dict[str, object]]:
    """The declarations as the database stores them. ValueError for a pattern that it cannot match."""
    patterns = [*datasets, *(actor for dataset in datasets.values() for actor in dataset.may_reset or ())]
    if wrong := sorted(pattern for pattern in patterns if set(pattern) & set("[]")):
        raise ValueError(f"pattern {wrong[0]!r}: a stored policy knows * and ?, and no brackets")
    return dump_datasets(datasets.items())


def policy_changes(before: Tables, after: Tables) -> list[str]:
    """A line for each declaration that is added, changed or removed."""
    return [line for pattern in sorted({*before, *after}) for line in _changes(pattern, before, after)]


def _changes(pattern: str, before: Tables, after: Tables) -> Iterator[str]:
    if pattern not in after:
        yield f"dataset {pattern!r} is governed no more"
    elif pattern not in before:
        yield f"dataset {pattern!r} is governed: {_settings(after[pattern])}"
    elif before[pattern] != after[pattern]:
        yield f"dataset {pattern!r}: {_settings(before[pattern])} becomes {_settings(after[pattern])}"


def _settings(table: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in sorted(table.items())) or "no setting"
