"""Migrations: whole or not at all, once however many run them, gone without a trace when taken back."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.database import migrate
from holdfast.database.statements import Dialect, Migration, migrations, split, statements
from holdfast.errors import EngineError, Refused
from holdfast.testing.lease_contract import refused_after_waiting
from tests.children import PATIENCE, Child
from tests.cli.command import ask
from tests.conftest import MAJORS, NEWEST, fresh, migrated, server
from tests.raw_session import Raw

Connect = Callable[..., Any]
DIALECTS: tuple[Dialect, ...] = ("postgres", "sqlite")
VERSIONS = [migration.version for migration in migrations("postgres")]

MIGRATE = """
import sys, holdfast
client = holdfast.Client(sys.argv[1])
print("ready")
sys.stdin.readline()
print(len(client.migrate()))
client.close()
"""

CATALOG = """
select 'relation', relnamespace::regnamespace::text, relname from pg_class
union all select 'function', pronamespace::regnamespace::text, oid::regprocedure::text from pg_proc
union all select 'schema', '', nspname from pg_namespace where nspname !~ '^pg_(toast_)?temp_'
union all select 'type', typnamespace::regnamespace::text, typname from pg_type
union all select 'trigger', '', tgname from pg_trigger
union all select 'constraint', '', conname from pg_constraint
union all select 'comment', classoid::regclass::text, description from pg_description
union all select 'default', '', adrelid::text from pg_attrdef
order by 1, 2, 3
"""


@pytest.fixture(params=["sqlite", *MAJORS])
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    return f"sqlite:///{tmp_path / 'app.db'}" if request.param == "sqlite" else server(request.param).database()


newest = pytest.mark.parametrize("bare", ["sqlite", NEWEST], indirect=True)
"""For what rests on transactions alone, which are the same on every PostgreSQL, and takes long."""
newest_pairs = pytest.mark.parametrize(("bare", "connect"), [("sqlite", "sync"), (NEWEST, "async")], indirect=True)
"""The same, for a test that takes ``connect``."""


def contents(url: str) -> list[tuple[Any, ...]]:
    """Whatever exists in the database."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file:
            return file.execute("select type, name, sql from sqlite_master order by 1, 2").fetchall()
    with psycopg.connect(url, autocommit=True) as database:
        return database.execute(CATALOG).fetchall()


def parts(script: str) -> list[str]:
    """The statements of a script; those in the body of a function are not ours to cut."""
    found, lines, quoted = [], [], False
    for line in script.splitlines(keepends=True):
        lines.append(line)
        quoted ^= line.count("$$") % 2 == 1
        if not quoted and line.split("--")[0].rstrip().endswith(";"):
            found.append("".join(lines))
            lines = []
    return found


def breaks(url: str, script: str) -> Iterator[str]:
    """The script, broken off at its end: by an error, and by the end of the session. Whatever was committed on the way
    is seen then."""
    sqlite = url.startswith("sqlite")
    pieces = [f"{text};\n" for text in split(script)] if sqlite else parts(script)
    assert len(pieces) > (5 if "lease" in script else 1)  # later migrations are smaller
    yield "".join(pieces) + ("select no_such_function();\n" if sqlite else "select 1/0;\n")
    if not sqlite:
        yield "".join(pieces) + "select pg_terminate_backend(pg_backend_pid());\n"


def test_up_then_down_leaves_nothing_behind(bare: str) -> None:
    before = contents(bare)
    with holdfast.Client(bare) as client:
        assert [migration.version for migration in client.migrate()] == VERSIONS
        with client.lease("import"), client.lock("import"), client.lock(("agent", 7)):
            assert contents(bare) != before
        assert [migration.version for migration in client.migrations.down(to=0)] == VERSIONS[::-1]
        assert contents(bare) == before
        assert client.migrations.down(to=0) == []
        client.migrate()
        assert client.lease("import").try_acquire() is not None


def test_no_index_hangs_on_the_collation_of_the_server() -> None:
    """Which is another one after an upgrade, or on a standby with another system: an index would have a name twice
    then. And pages would be cut where Python, which compares bytes, does not go on."""
    with psycopg.connect(fresh()) as connection:
        found = connection.execute(
            "select a.attrelid::regclass::text, a.attname from pg_attribute a"
            " join pg_index x on x.indexrelid = a.attrelid join pg_class t on t.oid = x.indrelid"
            " join pg_collation c on c.oid = a.attcollation"
            " where t.relnamespace = 'holdfast'::regnamespace and c.collname <> 'C'"
        ).fetchall()
    assert found == []


@newest_pairs
def test_a_second_up_changes_nothing(connect: Connect, bare: str) -> None:
    client = connect(bare)
    assert [when for _, when in client.migrations.status()] == [None] * len(VERSIONS)
    client.migrate()
    once, status = contents(bare), client.migrations.status()
    assert client.migrate() == []
    assert (contents(bare), client.migrations.status()) == (once, status)
    assert all(when for _, when in status)


@newest
def test_many_processes_migrate_at_once(bare: str) -> None:
    with ExitStack() as stack:
        children = [stack.enter_context(Child(MIGRATE, bare)) for _ in range(3)]
        for child in children:
            child.expect("ready")
        for child in children:
            child.say("go")
        applied = [int(child.line()) for child in children]
        assert [child.wait() for child in children] == [0, 0, 0]
    assert sum(applied) == len(VERSIONS), "exactly one did each"
    with holdfast.Client(bare) as client:
        assert client.lease("import").try_acquire() is not None


def test_whoever_comes_second_waits_for_longer_than_a_lock_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one may take its time, as when a standby is away: the session's own limit is not the end of it. For a
    transaction on the tables it is: whatever else wants them waits behind us."""
    url, ours = server().database(), statements("postgres", "holdfast")
    known, lock = ours["session_tune"], ours["migrate_lock"].sql.encode()
    hasty = known._replace(sql=known.sql.replace("'10s'", "'50ms'"))
    monkeypatch.setitem(ours._parsed, "session_tune", hasty)
    version = migrate._version
    asked: list[int] = []

    def ask(*given: Any) -> int:
        """Asked before each migration, and after each refusal."""
        asked.append(version(*given))
        if len(asked) == 4:
            first.rollback()
        return asked[-1]

    with psycopg.connect(url) as first, holdfast.Client(url) as client:
        first.execute(lock)
        with monkeypatch.context() as watched:
            watched.setattr(migrate, "_version", ask)
            assert [each.version for each in client.migrate()] == VERSIONS
        assert asked[:4] == [0, 0, 0, 0], "before the first, and after two refusals at least"
        first.execute("select from holdfast.lease")
        with pytest.raises(Refused, match="A transaction on its tables is open"):
            client.migrations.down(to=0)
        first.execute(lock)
        monkeypatch.setattr(migrate, "now", iter([0.0, 61.0]).__next__)
        with pytest.raises(Refused, match="Another migration is running"):
            client.migrations.down(to=0)


@newest
def test_a_migration_broken_off_anywhere_leaves_nothing_and_can_be_run_again(bare: str) -> None:
    for migration in _all(bare):
        before = contents(bare)
        for script in breaks(bare, migration.up):
            with closing(Raw(bare)) as raw, pytest.raises(EngineError):
                raw.session.script(script, PATIENCE)
        assert contents(bare) == before
        with closing(Raw(bare)) as raw:
            raw.session.script(migration.up, PATIENCE)
    with holdfast.Client(bare) as client:
        assert client.migrate() == []
        assert client.lease("import").try_acquire() is not None


@newest
def test_a_way_back_broken_off_anywhere_takes_nothing(bare: str) -> None:
    migrated(bare)
    for migration in reversed(_all(bare)):
        before = contents(bare)
        for script in breaks(bare, migration.down):
            with closing(Raw(bare)) as raw, pytest.raises(EngineError):
                raw.session.script(script, PATIENCE)
        assert contents(bare) == before
        with holdfast.Client(bare) as client:
            assert client.migrations.down(to=migration.version - 1) == [migration]


def test_a_process_killed_inside_a_migration_of_a_file_leaves_nothing(sqlite_url: str) -> None:
    path = sqlite_url.removeprefix("sqlite:///")
    script = "".join(f"{text};\n" for text in split(_all(sqlite_url)[0].up)[:-1])
    child = (
        "import os, signal, sqlite3, sys\n"
        "file = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "file.execute('pragma journal_mode = wal')\n"
        "file.execute('begin immediate')\n"
        "for statement in sys.argv[2].split(';\\n'): file.execute(statement)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with Child(child, path, script) as killed:
        assert killed.wait() == -9
    assert contents(sqlite_url) == []
    with holdfast.Client(sqlite_url) as client:
        assert client.lease("import").try_acquire() is not None


def printed(url: str, *options: str) -> str:
    return ask("--url", url, "migrate", "print", *options)


def run_as_psql_does(url: str, statements: list[str]) -> None:
    """One by one, each committed unless the script itself says otherwise."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as file:
            for statement in statements:
                file.execute(statement)
    else:
        with closing(psycopg.connect(url, autocommit=True)) as database:
            for statement in statements:
                database.execute(statement.encode())


def cut(url: str, script: str) -> list[str]:
    return split(script) if url.startswith("sqlite") else parts(script)


def transactions(pieces: list[str]) -> Iterator[list[str]]:
    """Each migration, from its begin to its commit."""
    whole: list[str] = []
    for piece in pieces:
        whole.append(piece)
        if piece.strip().rstrip(";") == "commit":
            yield whole
            whole = []


@newest
def test_the_printed_script_is_whole_or_not_at_all(bare: str) -> None:
    """Run by somebody else, statement by statement: broken off anywhere it leaves nothing that bars the way."""
    before = contents(bare)
    for pieces in transactions(cut(bare, printed(bare))):
        assert len(pieces) > 3
        so_far = contents(bare)
        run_as_psql_does(bare, pieces[:-1])
        assert contents(bare) == so_far, "broken off before its commit"
        run_as_psql_does(bare, pieces)
    with holdfast.Client(bare) as client:
        assert client.migrate() == []
        assert client.lease("import").acquire().release() is True
    run_as_psql_does(bare, cut(bare, printed(bare, "--down")))
    assert contents(bare) == before


def test_the_printed_script_queues_behind_the_same_lock_as_everybody() -> None:
    url = server().database()
    lock = "select pg_advisory_xact_lock(hashtext('holdfast.migrate'))"
    assert lock in statements("postgres")["migrate_lock"].sql
    with psycopg.connect(url) as first, psycopg.connect(url, autocommit=True) as second:
        first.execute(lock.encode())
        second.execute("set lock_timeout = '200ms'")
        begin, waits, *_ = parts(printed(url))
        second.execute(begin.encode())
        with pytest.raises(psycopg.errors.LockNotAvailable):
            second.execute(waits.encode())
        second.execute("rollback")


def test_down_takes_nothing_that_is_not_ours() -> None:
    """The schema was there before, with something of somebody else's in it."""
    url = server().database()
    with psycopg.connect(url, autocommit=True) as database, holdfast.Client(url) as client:
        database.execute("create schema holdfast")
        database.execute("create table holdfast.theirs as select 7 as kept")
        before = contents(url)
        client.migrate()
        client.lease("import").acquire().release()
        assert [migration.version for migration in client.migrations.down(to=0)] == VERSIONS[::-1]
        assert contents(url) == before
        assert database.execute("select kept from holdfast.theirs").fetchall() == [(7,)]
        client.migrate()


@newest_pairs
def test_another_schema_name_is_used_everywhere(connect: Connect, bare: str) -> None:
    before = {row[:3] for row in contents(bare)}
    client, other = connect(bare, schema="my_leases"), connect(bare, schema="yours")
    client.migrate()
    made = [row for row in contents(bare) if row[:3] not in before]
    assert len(made) > 5
    assert [row for row in made if "holdfast" in str(row)] == []
    if not bare.startswith("sqlite"):
        with psycopg.connect(bare) as database:
            sources = (  # but for names of leases and keys of locks, which are the same in every schema
                "select prosrc from pg_proc where pronamespace = 'my_leases'::regnamespace"
                " and regexp_replace(prosrc, 'holdfast(:|''''s own| locks)', '', 'g') ~ 'holdfast'"
            )
            assert database.execute(sources).fetchall() == []
    other.migrate()
    with client.lease("import", holder="mine") as grant, other.lease("import", holder="theirs"):
        assert [each.holder for each in client.leases.list()] == ["mine"]
        third = connect(bare, schema="my_leases")
        assert refused_after_waiting(lambda: third.lease("import").acquire(timeout=0.05)).holder == "mine"
        assert grant.renew() is True
    client.migrations.down(to=0)
    assert other.lease("import").try_acquire() is not None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_migrations_are_numbered_without_a_gap_and_the_same_in_both_dialects(dialect: Dialect) -> None:
    numbered = [(migration.version, migration.name) for migration in migrations(dialect)]
    assert [version for version, _ in numbered] == list(range(1, len(numbered) + 1))
    assert numbered == [(migration.version, migration.name) for migration in migrations("postgres")]


def test_each_migration_records_itself(bare: str) -> None:
    """Inside its own script, so that it is applied and recorded together."""
    with closing(Raw(bare)) as raw:
        for migration in migrations(raw.database.dialect):
            raw.session.script(migration.up, PATIENCE)
            assert (
                raw.call("schema_applied")[-1].items() >= {"version": migration.version, "name": migration.name}.items()
            )


def _all(url: str) -> tuple[Migration, ...]:
    return migrations("sqlite" if url.startswith("sqlite") else "postgres")
