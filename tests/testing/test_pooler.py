"""The pooler: what a mode does to sessions, and that nothing of it stays."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import psycopg
import pytest

import holdfast
from holdfast.testing import Pooler, pooler
from tests.children import Child, eventually
from tests.conftest import fresh

needs_pgbouncer = pytest.mark.usefixtures("needs_pgbouncer")

_DIES = """
import os, sys
from holdfast.testing import Pooler
pooler = Pooler(sys.argv[1])
print(pooler.url)
print(pooler._folder)
input()
os._exit(0)
"""


def pids(url: str, clients: int, rounds: int) -> Counter[int]:
    """Which sessions of the server serve this many clients that take turns."""
    with ExitStack() as stack:
        connections = [
            stack.enter_context(psycopg.connect(url, autocommit=True, prepare_threshold=None)) for _ in range(clients)
        ]
        return Counter(
            pid
            for _ in range(rounds)
            for connection in connections
            for (pid,) in connection.execute("select pg_backend_pid()")
        )


@needs_pgbouncer
@pytest.mark.parametrize(("mode", "sessions"), [("transaction", {1, 2}), ("session", {4})])
def test_a_mode_decides_how_many_sessions_serve_four_clients(
    postgres_url: str, mode: Literal["transaction", "session"], sessions: set[int]
) -> None:
    with Pooler(postgres_url, mode=mode, size=2 if mode == "transaction" else 4) as through:
        assert len(pids(through.url, 4, 3)) in sessions


@needs_pgbouncer
def test_what_is_set_in_a_session_is_not_ones_own_in_transaction_mode(postgres_url: str) -> None:
    with (
        Pooler(postgres_url, size=1) as through,
        psycopg.connect(through.url, autocommit=True) as one,
        psycopg.connect(through.url, autocommit=True) as other,
    ):
        one.execute("select set_config('app.owner', 'one', false)")
        assert other.execute("select current_setting('app.owner', true)").fetchone() == ("one",)


@needs_pgbouncer
@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_leases_work_through_both_modes(postgres_url: str, mode: Literal["transaction", "session"]) -> None:
    with Pooler(postgres_url, mode=mode, size=4) as through, holdfast.Client(through.url) as client:
        with client.lease("a", ttl=600) as grant:
            grant.renew()
        assert client.lease("a", ttl=600).acquire().fence > grant.fence


@needs_pgbouncer
def test_it_ends_with_the_process_that_started_it() -> None:
    with Child(_DIES, fresh()) as child:
        url, folder = child.line(), Path(child.line())
        psycopg.connect(url, connect_timeout=60).close()
        child.kill()
    eventually(lambda: not reachable(url), "it is gone")
    eventually(lambda: not folder.exists(), "and its files")


@needs_pgbouncer
def test_closed_it_is_gone_and_may_be_closed_again(postgres_url: str) -> None:
    through = Pooler(postgres_url)
    assert reachable(through.url)
    assert "process up" in through.log()
    through.close()
    through.close()
    assert not reachable(through.url)
    with Pooler("postgresql://127.0.0.1/app") as usual:  # the port that a server has unless it says so
        assert "port=5432" in (usual._folder / "pgbouncer.ini").read_text()


def test_where_it_is_not_installed_that_is_said(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooler, "find", lambda: None)
    with pytest.raises(LookupError, match="install the system's package pgbouncer"):
        Pooler(postgres_url)


def reachable(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=60).close()
    except psycopg.OperationalError:
        return False
    return True
