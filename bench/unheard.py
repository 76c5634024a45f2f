"""What it costs to be measurable while nobody listens, as with OpenTelemetry's API and no SDK.

Operations without telemetry do not exist, so there is nothing to run them against, and a hundredth of a replay is less
than what two runs of the same code differ by. What is timed instead is all that a replay does for its sake, by itself:
the call in between, the look whether anybody listens (once a replay, which the tests count), and the questions whether
there is a measurement. Each replay of the run beside it has done all that, too.
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
        raise RuntimeError("somebody listens: this is about what it costs when nobody does")
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
