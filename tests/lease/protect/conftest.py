"""What the tests of protect share: one database for all of them, because each has leases and tables of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

import holdfast
from tests.user_connections import shared_postgres


@pytest.fixture
def url() -> str:
    return shared_postgres()


@pytest.fixture
def name() -> str:
    return f"lease-{secrets.token_hex(4)}"


@pytest.fixture
def client(url: str) -> Iterator[holdfast.Client]:
    with holdfast.Client(url) as made:
        yield made
