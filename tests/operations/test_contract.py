"""The contract of operations on both engines, in both flavours."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.testing.operation_contract import OperationContract
from tests.migrated_file import migrated_file
from tests.pairs import ONE_FLAVOUR
from tests.user_connections import shared_postgres


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """One database for all these tests: every key is used in one of them."""
    return migrated_file(tmp_path / "app.db") if request.param == "sqlite" else shared_postgres()


class TestOperation(OperationContract):
    pass


@ONE_FLAVOUR
class TestOperationOnAPoorServer(OperationContract):
    @pytest.fixture
    def url(self, poor_url: str) -> str:
        return poor_url
