"""What several files of tests of operations share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast
from tests.operations.governing import connected


@pytest.fixture(params=["outside", "own", "joined"])
def attempt(request: pytest.FixtureRequest, either: str) -> Iterator[Callable[..., Any]]:
    """The three ways to run an operation: outside, in a transaction of its own, and in one that is open."""
    with connected(either) as mine:

        def run(client: holdfast.Client, key: Any, function: Any, /, **more: Any) -> Any:
            if request.param == "outside":
                return client.operation(key, **more).run(function)
            if request.param == "own":
                return client.operation(key, tx=mine, **more).run(function)
            mine.execute("begin")
            try:
                return client.operation(key, tx=mine, **more).run(function)
            finally:
                mine.execute("commit")  # also what it says of a review

        yield run
