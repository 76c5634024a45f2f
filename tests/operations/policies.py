"""A policy for tests of it, and the ways to run an operation under one."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.governance import PolicyContext

POLICY: dict[str, dict[str, Any]] = {
    "graves*": {"sovereign": True, "may_reset": ["elder*"]},
    "burials*": {"sensitive": True},
    "sites*": {"h3_resolution": 5},
    "flaky*": {"error_budget": 2},
    "busy*": {"when_locked": "fail"},
}
BY_ELDER: dict[str, Any] = {"actor": "elder Mary", "reason": "we agreed"}
WAYS = ("outside", "own", "joined")
every_way = pytest.mark.parametrize(
    ("either", "attempt"), [("sqlite", "own"), ("postgres", "outside"), ("postgres", "joined")], indirect=True
)
"""Each way and each engine: the ways differ in who begins the transaction, and the statements are the same in each."""
POINT = {"type": "Point", "coordinates": [16.37, 48.21]}


def key(dataset: str, task: str = "load", **more: Any) -> holdfast.OperationKey:
    return holdfast.OperationKey(pipeline="etl", task=task, dataset=dataset, operation="upsert", **more)


def fail() -> None:
    raise ValueError("broken")


@contextmanager
def connected(url: str) -> Iterator[Any]:
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as mine:
            yield mine
    else:
        with psycopg.connect(url, autocommit=True) as mine:
            yield mine


def runs(way: str, mine: Any) -> Callable[..., Any]:
    """The three ways to run an operation: outside, in a transaction of its own, and in one that is open."""

    def run(client: holdfast.Client, key: Any, function: Any, /, **more: Any) -> Any:
        if way == "outside":
            return client.operation(key, **more).run(function)
        if way == "own":
            return client.operation(key, tx=mine, **more).run(function)
        mine.execute("begin")
        try:
            return client.operation(key, tx=mine, **more).run(function)
        finally:
            mine.execute("commit")  # also what it says of a review

    return run


def governed(url: str, *rules: Callable[[PolicyContext], Any]) -> holdfast.Client:
    return holdfast.Client(url, policy=holdfast.governance.Policy(POLICY, *rules))


def answer(url: str, number: int | None, how: str, **by: Any) -> None:
    assert number is not None
    with governed(url) as client:
        getattr(client.reviews, how)(number, **(by or BY_ELDER))
