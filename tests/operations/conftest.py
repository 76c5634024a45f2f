"""What several files of tests of operations share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.operations.policies import WAYS, connected, runs


@pytest.fixture(params=WAYS)
def attempt(request: pytest.FixtureRequest, either: str) -> Iterator[Callable[..., Any]]:
    with connected(either) as mine:
        yield runs(request.param, mine)
