"""The matrix: every engine on this machine, both flavours. A fixture that needs neither does not ask for them."""

from __future__ import annotations

import atexit
import gc
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import settings

import holdfast
from holdfast.testing import Pooler, Postgres, available, pooler
from holdfast.testing.server_folder import temporary_folder
from holdfast.testing.sync_facade import EventLoopThread, SyncFacade
from tests.children import close_query_connection
from tests.poor_postgres import emptied_poor_postgres, without_listen

# The same examples in every run: a failure is never a matter of luck.
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.load_profile("same")

pytest_plugins = ["tests.skips", "tests.standstill"]

NEWEST = max(available())
OLDEST = min(available())
MAJORS = sorted({OLDEST, NEWEST})
"""The oldest and the newest PostgreSQL on this machine: what holds on both holds between them."""
_servers: dict[int, Postgres] = {}
_models: dict[int, str] = {}

# nohup and a shell's & ignore these for us and all our children, whom the tests want to interrupt.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)


FIRST = ("test_chaos.py", "test_storm.py", "test_succession.py", "test_bench.py", "test_demo.py", "test_fuzz.py")
"""Files of tests that take longest: begun last, one of them would go on alone when all others have ended."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Put the folders of tests where those of the servers are: in memory, where no SQLite file waits for a disk."""
    if config.option.basetemp is None:  # else we are a worker, or the caller has chosen
        config.option.basetemp = tempfile.mkdtemp(prefix="holdfast-", dir=temporary_folder())
        atexit.register(shutil.rmtree, config.option.basetemp, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Some 400,000 objects stay until the end: without them a collection of garbage takes a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if _is_repeated(item)])
    items[:] = [item for item in items if not _is_repeated(item)]
    items.sort(key=lambda item: item.path.name not in FIRST)


def _is_repeated(item: pytest.Item) -> bool:
    """Whether it is for the oldest PostgreSQL and asyncio: SQL is what differs there, and the sync flavour runs it."""
    values = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    return "async" in values and OLDEST != NEWEST and (OLDEST in values or f"postgres{OLDEST}" in values)


@pytest.fixture(scope="session", autouse=True)
def _stop_servers() -> Iterator[None]:
    yield
    close_query_connection()
    for server in _servers.values():
        server.close()


def server(major: int = NEWEST) -> Postgres:
    """The shared server of that version in this test process. A test that breaks servers makes its own."""
    if major not in _servers:
        # Hundreds of databases come and go: autovacuum would be at one of them several times a second.
        _servers[major] = Postgres.create(major=major, settings={"autovacuum_naptime": "1h"})
    return _servers[major]


def migrated(url: str) -> str:
    with holdfast.Client(url) as client:
        client.migrate()
    return url


def fresh(major: int = NEWEST) -> str:
    """A migrated database of its own on the shared server: a copy of one that was migrated once, for that is faster."""
    if major not in _models:
        _models[major] = migrated(server(major).database())
    return server(major).database(like=_models[major])


KEPT = 16
"""Databases of tests that have ended, in each server: one takes 8 MB, which is memory where the servers' files are."""
_used: dict[int, list[str]] = {}


def for_one_test(major: int = NEWEST) -> str:
    """A fresh database that is dropped a while after its test: clients that a fixture closes may still use it."""
    url, used = fresh(major), _used.setdefault(major, [])
    if len(used) >= KEPT:
        with psycopg.connect(server(major).url, autocommit=True) as connection:
            for old in used[: KEPT // 2]:
                connection.execute(f'drop database "{old.rpartition("/")[2]}" with (force)'.encode())
        del used[: KEPT // 2]
    used.append(url)
    return url


@cache
def shared(major: int) -> str:
    """One database for many tests, because making and dropping hundreds takes longer than the tests."""
    return fresh(major)


@pytest.fixture(params=["sqlite", *MAJORS])
def emptied(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """On each engine, a database without leases and objects: that one, or a new file."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'app.db'}"
    if request.param == "poor":
        poor: str = request.getfixturevalue("poor_url")
        return poor
    with psycopg.connect(shared(request.param), autocommit=True) as database:
        tables = ("lease", "beat", "history", "object", "object_change")
        database.execute(f"truncate {', '.join(f'holdfast.{table}' for table in tables)}".encode())
    return shared(request.param)


@pytest.fixture(params=["sqlite", *(f"postgres{major}" for major in MAJORS)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh, migrated database on each engine."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'app.db'}"
    return for_one_test(int(request.param.removeprefix("postgres")))


@pytest.fixture
def postgres_url() -> str:
    """A fresh, migrated database on the newest PostgreSQL."""
    return for_one_test()


@pytest.fixture
def poor_url(monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty, migrated database on a PostgreSQL that refuses LISTEN and session locks (``tests.poor_postgres``)."""
    without_listen(monkeypatch)
    return emptied_poor_postgres()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'app.db'}"


@pytest.fixture(scope="session")
def needs_pgbouncer() -> None:
    if pooler.find() is None:
        pytest.skip("PgBouncer is not installed: apt-get install pgbouncer")


@pytest.fixture
def pooled_url(needs_pgbouncer: None, postgres_url: str) -> Iterator[str]:
    """The same through a pooler in transaction mode that has two sessions for everybody."""
    with Pooler(postgres_url) as through:
        yield through.url


@pytest.fixture(params=["sqlite", "postgres"])
def either(request: pytest.FixtureRequest) -> str:
    """A fresh, migrated database on SQLite and on the newest PostgreSQL: for what takes too long to do on all."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Creates clients, and closes them at the end: once sync, once async behind ``holdfast.testing.sync_facade``."""
    clients: list[Any] = []
    loop_thread = EventLoopThread() if request.param == "async" else None

    def create(url: str, **options: Any) -> Any:
        if loop_thread is None:
            clients.append(holdfast.Client(url, **options))
        else:
            clients.append(SyncFacade(loop_thread, holdfast.AsyncClient(url, **options)))
        return clients[-1]

    yield create
    for client in clients:
        client.close()
    if loop_thread is not None:
        loop_thread.close()


@pytest.fixture
def client(connect: Callable[..., Any], url: str) -> Any:
    return connect(url)
