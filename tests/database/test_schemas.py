"""A schema that somebody else has made: what is theirs in it stays theirs, on the way up and on the way down."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

import holdfast
from tests.conftest import server

THEIRS = ("create function {}.price(text) returns int language sql as 'select 7'", "create table {}.orders ()")
SCHEMAS = ("app", "holdfast", "public")


@pytest.fixture
def bare() -> str:
    return server().database()


def execute(url: str, *sql: str) -> None:
    with psycopg.connect(url, autocommit=True) as database:
        for each in sql:
            database.execute(each.encode())


def schemas(url: str) -> set[str]:
    with psycopg.connect(url) as database:
        return {name for (name,) in database.execute("select nspname::text from pg_namespace where nspname !~ '^pg_'")}


def as_role(url: str, *sql: str) -> tuple[str, str]:
    """The database as a new role sees it, and the role's name, which is {} in the statements."""
    name = f"role_{uuid4().hex[:12]}"
    execute(url, f"create role {name} login", *(each.format(name) for each in sql))
    return url.replace("//postgres@", f"//{name}@"), name


@pytest.mark.parametrize("schema", SCHEMAS)
def test_migrations_leave_the_rights_on_functions_that_are_not_ours_alone(bare: str, schema: str) -> None:
    """PUBLIC may execute what others have put there; of ours, nothing."""
    with holdfast.Client(bare, schema=schema) as client:
        if schema != "public":
            execute(bare, f"create schema {schema}")
        execute(bare, *(each.format(schema) for each in THEIRS))
        theirs, name = as_role(bare, f"grant usage on schema {schema} to {{}}")
        client.migrate()
        client.migrations.down(to=3)
        client.migrate()
    may = (
        "select proname::text from pg_proc where pronamespace = %s::regnamespace"
        " and has_function_privilege(oid, 'execute')"
    )
    with psycopg.connect(theirs) as nobody:
        assert nobody.execute(f"select {schema}.price('x')".encode()).fetchone() == (7,), name
        assert nobody.execute(may, [schema]).fetchall() == [("price",)]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_way_back_leaves_a_schema_that_was_there_before(bare: str, schema: str) -> None:
    """Empty as it was; and one that the first migration made goes with it."""
    with holdfast.Client(bare, schema=schema) as client, holdfast.Client(bare, schema="made") as other:
        if schema != "public":
            execute(bare, f"create schema {schema}")
        before = schemas(bare)
        for each in (client, other):
            each.migrate()
        assert schemas(bare) == before | {"made"}
        for each in (client, other):
            each.migrations.down(to=0)
        assert schemas(bare) == before


def test_a_public_schema_that_we_had_to_make_stays(bare: str) -> None:
    """Too much believes that it is there."""
    execute(bare, "drop schema public")
    with holdfast.Client(bare, schema="public") as client:
        client.migrate()
        client.migrations.down(to=0)
    assert "public" in schemas(bare)


def test_whoever_owns_the_schema_migrates_without_rights_on_the_database(bare: str) -> None:
    url, name = as_role(bare, "create schema app authorization {}")
    with psycopg.connect(url) as owner, pytest.raises(psycopg.errors.InsufficientPrivilege):
        owner.execute("create schema if not exists app")
    with holdfast.Client(url, schema="app") as client:
        assert client.migrate()
        with client.lease("import"), client.lock("import"):
            client.objects.put_if("box", "b-1", 1, holdfast.MustCreate())
        client.migrations.down(to=0)
    assert "app" in schemas(bare), name


@pytest.mark.parametrize("schema", ["information_schema", "pg_catalog", "pg_temp", "pg_toast"])
def test_a_schema_of_the_servers_is_refused(schema: str, tmp_path: Path) -> None:
    for url in ("postgresql://127.0.0.1:1/none", f"sqlite:///{tmp_path / 'app.db'}"):
        with pytest.raises(ValueError, match=r"^schema must be .* 'pg_', .*information_schema.*: '" + schema):
            holdfast.Client(url, schema=schema)


@pytest.mark.parametrize("schema", ["sqlite", "sqlite_leases"])
def test_tables_of_a_file_cannot_have_the_names_of_its_own(schema: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^schema must not be 'sqlite' or begin with 'sqlite_'.*: '{schema}'"):
        holdfast.Client(f"sqlite:///{tmp_path / 'app.db'}", schema=schema)
    assert list(tmp_path.iterdir()) == []
    with holdfast.Client(f"sqlite:///{tmp_path / 'app.db'}", schema="sqlited") as client, client.lease("import"):
        pass


def test_the_command_that_mends_a_missing_schema_names_it(bare: str) -> None:
    with holdfast.Client(bare, schema="tenant_a") as client:
        words = r"'tenant_a' .* is not there.*'holdfast --schema tenant_a migrate up'"
        with pytest.raises(holdfast.SchemaMismatch, match=words):
            client.lease("import").acquire()
        [schema] = [each for each in client.doctor().findings if each.check == "schema"]
        assert schema.remedy == "Run: holdfast --schema tenant_a migrate up"
        client.migrate()
        execute(bare, "drop table tenant_a.lease cascade")
        with pytest.raises(holdfast.SchemaMismatch, match=r"not complete: run 'holdfast --schema tenant_a migrate up'"):
            client.lease("import").acquire()


def test_a_schema_has_locks_of_its_own(either: str) -> None:
    """Advisory locks are the whole database's, and namespaces are counted in each schema."""
    with holdfast.Client(either, schema="mine") as mine, holdfast.Client(either, schema="yours") as yours:
        if either.startswith("postgres"):
            mine.migrate()
            yours.migrate()
        with mine.lock("import"), mine.lock(("agent", 7)):
            for name in ("import", ("agent", 7), ("order", 7)):
                with yours.lock(name).or_skip() as grant:
                    assert grant is not None, name
            labels = [each.label for each in mine.locks.list()]
            assert labels == ["import", "(agent, 7)"]
            assert "import" not in [each.label for each in yours.locks.list()]
