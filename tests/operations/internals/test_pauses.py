"""The pauses of an operation: as its ``Retry`` says, between attempts of a run and while it backs off."""

from __future__ import annotations

import pytest

import holdfast
from holdfast import Retry
from holdfast.operations import leased_attempt, operation
from holdfast.runtime.concurrency import Wakeup
from holdfast.testing.operation_contract import running


class Enough(Exception):
    """Ends a run that would pause for ever."""


def test_attempts_of_a_run_pause_for_up_to_the_longest(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(operation, "jitter", lambda low, high: high)
    monkeypatch.setattr(operation, "sleep", pauses.append)
    with holdfast.Client(sqlite_url) as client:
        retry = Retry(attempts=9, in_this_run=4, first=0.5, longest=1.5)
        with pytest.raises(ZeroDivisionError):
            client.operation("a", retry=retry).run(lambda: 1 // 0)
    assert pauses == [0.5, 1.0, 1.5, 1.5]


def test_backoff_pauses_for_up_to_the_longest(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And never for longer than a waiter without ``Retry`` polls, because a release may not wake it."""
    pauses: list[float] = []

    def wait(_: Wakeup, seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 6:
            raise Enough

    with holdfast.Client(postgres_url) as client, running(postgres_url, "a"):
        monkeypatch.setattr("holdfast.operations.attempt.jitter", lambda low, high: high)
        monkeypatch.setattr(leased_attempt, "jitter", lambda low, high: high)
        monkeypatch.setattr(Wakeup, "wait", wait)
        handle = client.operation("a", when_locked="backoff", timeout=None, retry=Retry(first=0.125, longest=5.0))
        with pytest.raises(Enough):
            handle.run(int)
    assert pauses == [0.125, 0.25, 0.5, 1.0, 1.5, 1.5]
