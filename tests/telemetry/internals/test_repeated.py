"""What is told of an acquire that was sent twice, because its first answer was lost."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.database.engine import Repeated


def test_an_acquire_that_was_sent_twice_and_lost_its_beat_may_have_been_granted(
    sqlite_url: str, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sending may have held the lease until the beat was lost: a listener that counts has to know."""
    with holdfast.Client(sqlite_url) as client:
        client.lease("before").acquire().release()
        answers = [Repeated([{"status": "beat_lost", "fence": None}])]
        real = client._engine.call

        def call(name: str, parameters: Any, **options: Any) -> Any:
            return answers.pop() if name == "lease_acquire" and answers else real(name, parameters, **options)

        monkeypatch.setattr(client._engine, "call", call)
        told.clear()
        client.lease("a").acquire().release()
    assert [event for event, _ in told if event.startswith("lease.")] == [
        "lease.abandoned",
        "lease.acquired",
        "lease.ended",
    ]
