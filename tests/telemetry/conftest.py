"""Whatever is told, kept in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast import telemetry

pairs = pytest.mark.parametrize(("connect", "either"), [("sync", "sqlite"), ("async", "postgres")], indirect=True)
"""Each flavour and each engine once: the code that emits is the same on both engines, and sync is made from async."""


class Told(list[tuple[str, dict[str, Any]]]):
    def of(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self if name == event]

    def count(self, metric: str) -> dict[tuple[str, ...], float]:  # type: ignore[override]
        """What a counter of the table says now, by what its last label says."""
        [found] = [each for each in telemetry.METRICS if each.name == metric]
        sums: dict[tuple[str, ...], float] = {}
        for fields in self.of(found.event):
            labelled = found.labelled(fields)
            about = tuple(labelled[label] for label in ("reason", "outcome", "fate") if label in labelled)
            sums[about] = sums.get(about, 0.0) + found.amount(fields)
        return sums


@pytest.fixture
def told() -> Iterator[Told]:
    found = Told()
    stop = telemetry.listen(lambda event, fields: found.append((event, fields)))
    yield found
    stop()
