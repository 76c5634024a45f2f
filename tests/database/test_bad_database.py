"""Wrong databases: errors that say what to do, before anything is written, and show no password."""

from __future__ import annotations

import logging
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing.server import until
from holdfast.testing.sync_facade import SyncFacade
from tests.conftest import migrated, server
from tests.pairs import EACH_URL

Connect = Callable[..., Any]
SECRET = "hunter2"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """What a traceback of it would show; none of it twice."""
    seen: list[BaseException] = []
    while error is not None:
        assert error not in seen
        seen.append(error)
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@contextmanager
def keeps_the_secret(caplog: pytest.LogCaptureFixture, kind: Any, message: str | None = None) -> Iterator[None]:
    """The block raises, and neither the errors nor the log say the password."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(kind, match=message) as raised:
        yield
    for error in chain(raised.value):
        assert SECRET not in f"{error} {error!r} {vars(error)}"
    assert SECRET not in caplog.text


def test_without_a_url_there_is_no_default(connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HOLDFAST_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    for nothing in (None, "", " \n"):
        with pytest.raises(ValueError, match="HOLDFAST_URL"):
            connect(nothing)
    monkeypatch.setenv("HOLDFAST_URL", "")
    with pytest.raises(ValueError, match="HOLDFAST_URL"):
        connect(None)
    monkeypatch.setenv("HOLDFAST_URL", "sqlite:///from-environment.db\n")  # as a file says it
    with pytest.raises(ValueError, match="no database URL"):
        connect("")
    assert list(tmp_path.iterdir()) == []
    assert connect(None).lease("import").try_acquire() is not None
    assert (tmp_path / "from-environment.db").exists()


@pytest.mark.parametrize(
    "url", ["mysql://localhost/app", "http://localhost", "postgresqlite://x", "app.db", "/app.db", "sqlite:app.db"]
)
def test_an_unknown_scheme_is_told_what_is_known(connect: Connect, url: str) -> None:
    with pytest.raises(ValueError, match=r"expected sqlite:///file.db or postgresql://host/name"):
        connect(url)


@pytest.mark.parametrize(
    "url",
    ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://app.db", "sqlite:///folder/", "sqlite:///?mode=memory"],
)
def test_an_sqlite_url_must_name_a_file(connect: Connect, url: str) -> None:
    with pytest.raises(ValueError, match=r"sqlite:///app.db"):
        connect(url)


def test_an_sqlite_file_in_a_missing_folder_is_not_made(connect: Connect, tmp_path: Path) -> None:
    with pytest.raises(holdfast.EngineError, match="Does the folder exist"):
        connect(f"sqlite:///{tmp_path / 'missing' / 'app.db'}").lease("import").acquire()
    assert list(tmp_path.iterdir()) == []


def test_an_sqlite_url_that_names_a_folder_is_told_so(connect: Connect, tmp_path: Path) -> None:
    with pytest.raises(holdfast.EngineError, match="It is a folder: name a file"):
        connect(f"sqlite:///{tmp_path}").lease("import").acquire()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_a_folder_that_cannot_be_written_is_named(connect: Connect) -> None:
    with pytest.raises(holdfast.EngineError, match=r"/proc/holdfast\.db.*may this user write to it"):
        connect("sqlite:////proc/holdfast.db").lease("import").acquire()


def test_a_file_that_is_no_database_stays_as_it_is(connect: Connect, tmp_path: Path) -> None:
    letter = tmp_path / "letter.txt"
    letter.write_text("Dear database, " * 100)
    folder = tmp_path / "folder"
    folder.mkdir()
    for handle in ("lease", "lock"):
        with pytest.raises(holdfast.EngineError, match=r"letter\.txt.*not a database"):
            getattr(connect(f"sqlite:///{letter}"), handle)("import").acquire()
        with pytest.raises(holdfast.EngineError, match="cannot open"):
            getattr(connect(f"sqlite:///{folder}"), handle)("import").acquire()
    assert letter.read_text() == "Dear database, " * 100
    assert sorted(tmp_path.iterdir()) == [folder, letter], "and nothing is made beside it"


def test_to_open_a_file_gives_up_no_lock_of_a_connection_that_is_the_users_own(
    connect: Connect, tmp_path: Path
) -> None:
    """The kernel drops the locks that a process has on a file when it closes any descriptor of it."""
    url, begun = f"sqlite:///{tmp_path / 'app.db'}", "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0)"
    with closing(sqlite3.connect(tmp_path / "app.db", isolation_level=None)) as mine:
        mine.execute("begin exclusive")
        assert connect(url).lock("import").acquire(timeout=60).lost is False
        with pytest.raises(holdfast.EngineError, match="stayed locked"):
            connect(url)._engine.call("lease_list", {"name": None}, timeout=0.2)
        code = f"{begun}.execute('create table other (n)')"
        done = subprocess.run([sys.executable, "-c", code, tmp_path / "app.db"], capture_output=True, check=False)
        assert b"database is locked" in done.stderr


def test_a_closed_port_is_told_with_its_address(connect: Connect) -> None:
    with socket.socket() as taken:  # bound, not listening: nobody else gets it, and nobody answers
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(
            holdfast.EngineError, match=rf"127\.0\.0\.1:{port}/app.*refused\. Is the server running, and"
        ):
            connect(f"postgresql://somebody@127.0.0.1:{port}/app").lease("import").acquire()


def test_a_server_that_never_answers_is_given_up_in_time(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:
        client = connect(f"postgresql://somebody:{SECRET}@127.0.0.1:{hole.getsockname()[1]}/app")
        begun = time.monotonic()
        with pytest.raises(holdfast.EngineError, match=r"no answer (within 0\.[123] s|in time)") as raised:
            client._engine.call("lease_list", {"name": None}, timeout=0.3)
        assert time.monotonic() - begun > 0.29
        assert SECRET not in str(raised.value)


@pytest.fixture
def guarded() -> str:
    """``host:port/database`` that wants a password from the role ``guarded``, which may do nothing else."""
    postgres = server()
    url = migrated(postgres.database())
    place = url.partition("@")[2]
    if not postgres.execute("select 1 from pg_roles where rolname = 'guarded'"):
        postgres.execute("create role guarded login password 'the right one'")
        rules = postgres.data / "pg_hba.conf"
        rules.write_text("host all guarded 127.0.0.1/32 scram-sha-256\n" + rules.read_text())
        postgres.execute("select pg_reload_conf()")
    until(lambda: not enters(f"postgresql://guarded:wrong@{place}"), what="the password is asked for")
    assert enters(f"postgresql://guarded:the%20right%20one@{place}")
    return place


def enters(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


def inner(client: Any) -> Any:
    return client._inner if isinstance(client, SyncFacade) else client


def test_a_wrong_password_is_told_but_never_shown(
    connect: Connect, guarded: str, caplog: pytest.LogCaptureFixture
) -> None:
    for url in (f"postgresql://guarded:{SECRET}@{guarded}", f"postgresql://guarded@{guarded}?password={SECRET}"):
        client = connect(url)
        assert SECRET not in f"{inner(client)!r} {inner(client)._database!r} {inner(client)._database}"
        for failover in ("ttl", "session"):  # on the client's own connection, and on the keeper's
            with keeps_the_secret(caplog, holdfast.EngineError, "Check the user and the password"):
                client.lease("import", failover=failover).acquire()
        with keeps_the_secret(caplog, holdfast.EngineError, "Check the user and the password"):
            client.migrate()


def test_a_server_that_is_full_is_not_taken_for_a_wrong_password(connect: Connect, postgres_url: str) -> None:
    server().execute("create role latecomer login connection limit 0")
    client = connect(f"postgresql://latecomer@{postgres_url.partition('@')[2]}")
    for attempt in (client.lock("a").acquire, client.lease("a").acquire):
        with pytest.raises(
            holdfast.EngineError, match=r"too many connections .*All connections of the server are in use"
        ):
            attempt()
    server().execute("drop role latecomer")


@pytest.mark.parametrize(
    "url",
    [
        f"mysql://somebody:{SECRET}@localhost/app",
        f"somebody:{SECRET}@localhost/app",
        f"host=localhost password={SECRET}",
        f"host=localhost password='my {SECRET}'",
        f"postgresql://somebody:{SECRET}%zz@localhost/app",
        f"postgresql://somebody:a%zz{SECRET}@localhost/app",
        f"postgresql://somebody:{SECRET}@localhost/app?nonsense=1",
        f"postgresql://localhost/app?password={SECRET}%zz",
        f"postgresql://somebody:{SECRET} a@localhost/app",
        f'postgresql://somebody:a" {SECRET}@localhost/app',
        f"postgresql://localhost/app?password={SECRET} a",
        f"postgresql://localhost/app?password=a&{SECRET}=b",
        f"postgresql://localhost/app?password=a&{SECRET}",
        f"postgresql://somebody:{SECRET}@[::1/app",
        f"postgresql://somebody:a@{SECRET}@127.0.0.1:1/app",
        f"postgresql://somebody:a/{SECRET}@127.0.0.1:1/app",
        f"postgresql://somebody:a@127.0.0.1:1/{SECRET}@127.0.0.1:1/app",
        f"postgresql://somebody:12/{SECRET}@127.0.0.1:1/app",
        f"postgresql://somebody:a:{SECRET}@127.0.0.1:1/app?sslmode=nonsense",
        f"sqlite://somebody:{SECRET}@localhost/app",
        f"sqlite:///app.db?password={SECRET}",
        f"somebody:{SECRET}@localhost/app?next=http://localhost",
    ],
)
def test_a_url_that_makes_no_sense_is_not_shown_with_its_password(
    connect: Connect, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The password may be where nobody looks for one, because the URL is wrong."""
    with keeps_the_secret(caplog, (ValueError, holdfast.EngineError)):
        client = connect(url)
        assert SECRET not in repr(inner(client))
        client.lease("import").acquire()


def test_a_read_only_session_is_refused(connect: Connect, postgres_url: str) -> None:
    with pytest.raises(holdfast.EngineError, match="default_transaction_read_only is on"):
        connect(f"{postgres_url}?options=-c%20default_transaction_read_only%3Don").lease("import").acquire()


def test_a_missing_schema_names_the_command_and_is_not_made(connect: Connect) -> None:
    url = server().database()
    client = connect(url)
    for call in (client.leases.list, client.lease("import").acquire, client.lease("import", timeout=60).try_acquire):
        with pytest.raises(holdfast.SchemaMismatch, match=r"'holdfast' in .* is not there.*'holdfast migrate up'"):
            call()
    with psycopg.connect(url) as database:
        assert database.execute("select from pg_namespace where nspname = 'holdfast'").fetchone() is None


@EACH_URL
def test_a_schema_of_another_version_is_refused(connect: Connect, url: str) -> None:
    with holdfast.Client(url) as client:
        client.leases.list()
    newer = "insert into holdfast.schema_version (version, name) values (99, 'later')"
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file:
            file.execute(newer.replace("holdfast.", "holdfast_"))
            file.commit()
    else:
        with psycopg.connect(url) as database:
            database.execute(newer)
    client = connect(url)
    calls = (client.lease("import").acquire, client.migrate, client.migrations.status)
    for call in (*calls, lambda: client.migrations.down(to=0)):  # what a later version has made, it alone can take back
        with pytest.raises(holdfast.SchemaMismatch, match=r"is at version 99.*: upgrade holdfast$"):
            call()


def test_a_damaged_schema_names_the_command(connect: Connect, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as database:
        database.execute("drop function holdfast.lease_list")
    with pytest.raises(holdfast.SchemaMismatch, match="is not complete: run 'holdfast migrate up'"):
        connect(postgres_url).leases.list()


def test_a_missing_database_is_told(connect: Connect, postgres_url: str) -> None:
    with pytest.raises(holdfast.EngineError, match="Create the database first"):
        connect(f"{postgres_url}_not").lease("import").acquire()
