"""The cost of telemetry without a listener, as with OpenTelemetry's API and no SDK.

There is no variant of operations without telemetry to compare with, and 1 % of a replay is less than the difference
between two runs of the same code. So this times only what a replay does for telemetry: one extra call, one check for
listeners (once per replay, which the tests count), and the checks for a measurement. Each replay beside it has done all
that, too.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from bench.aims import ONCE, UNHEARD
from bench.measure import Result, Run, compare
from bench.operations import runs
from bench.place import Place
from holdfast.operations import operation
from holdfast.runtime import telemetry


def unheard(place: Place) -> list[Result]:
    """1.0 is a replay."""
    client = place.client(place.postgres_url())
    client.operation("k").run(lambda: {"rows": 1})
    variants: list[tuple[str, Run]] = [(ONCE, runs(client, itertools.repeat("k"), int)), (UNHEARD, _alone)]
    return compare("unheard", variants, rounds=place.effort.rounds(), times=place.effort.times(200))


def _alone(times: int) -> None:
    if telemetry.listeners:
        raise RuntimeError("telemetry has listeners: this benchmark measures its cost without any")
    spec: Any = SimpleNamespace(telemetry=None)

    def replay(attempt: Any, tx: Any, function: Any, args: Any, kwargs: Any, run_telemetry: Any) -> Any:
        attempt.telemetry = run_telemetry
        if attempt.telemetry is not None:
            raise AssertionError
        return attempt

    with patch.object(operation, "_run", replay):
        run = operation.run
        for _ in range(times):
            run(spec, None, int, (), {})
