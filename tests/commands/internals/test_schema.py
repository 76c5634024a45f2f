"""The tables: the foundation is created before leases and audit exist, all later migrations under governance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import commands as operator
from holdfast.database import statements as sql
from holdfast.database.statements import FOUNDATION, Dialect, Migration
from holdfast.runtime.clock import now
from tests.children import query
from tests.cli.command import at, call, invoke, printed
from tests.conftest import server

JANE: dict[str, Any] = {"actor": "jane", "reason": "a new version"}
NEWEST = sql.migrations("postgres")[-1].version


@pytest.fixture(params=["sqlite", "postgres"])
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'app.db'}" if request.param == "sqlite" else server().database()


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> str:
    """A later holdfast, which knows one migration more."""
    migrations = sql.migrations

    def more(dialect: Dialect, schema: str = sql.SCHEMA) -> tuple[Migration, ...]:
        dot = "_" if dialect == "sqlite" else "."
        up = f"create table holdfast{dot}extra (x integer);\ninsert into holdfast{dot}schema_version (version, name) "
        down = (
            f"delete from holdfast{dot}schema_version where version = {NEWEST + 1};\ndrop table holdfast{dot}extra;\n"
        )
        extra = Migration(NEWEST + 1, "extra", f"{up}values ({NEWEST + 1}, 'extra');\n", down)
        return (*migrations(dialect, schema), extra)

    for module in ("database.engine", "database.migrate"):
        monkeypatch.setattr(f"holdfast.{module}.migrations", more)
    return f"migration {NEWEST + 1:04} extra is applied"


def recorded(client: holdfast.Client, *actions: str) -> list[tuple[Any, ...]]:
    """The earliest first."""
    return [
        (each.action, each.actor, each.outcome, bool(each.detail and each.detail.get("bootstrap")))
        for each in reversed(client.audit.list())
        if each.action in actions
    ]


def windows(client: holdfast.Client) -> list[str]:
    return [each.subject for each in client.audit.list() if each.action == "gate.window"]


def test_the_first_migration_is_recorded_in_what_it_made(bare: str) -> None:
    """Before it there is neither a lease nor an audit: bootstrap. A dry run does not create them."""
    with holdfast.Client(bare) as client:
        with pytest.raises(ValueError, match=r"^actor must not contain control"):
            operator.run(client, "schema.migrate", actor="a\nb", reason="nobody could be told")
        plan = operator.run(client, "schema.migrate", dry_run=True, **JANE)
        assert "migration 0001 lease is applied" in plan.changes
        assert client.migrations.version() == 0
        outcome = operator.run(client, "schema.migrate", **JANE)
        assert outcome.changes == plan.changes
        first = client.audit.list()[-1]
        assert (first.action, first.actor, first.outcome) == ("schema.migrate", "jane", "done")
        assert first.detail["bootstrap"] is True
        assert first.fence is not None
        assert len(first.detail["changes"]) == FOUNDATION, "the foundation is bootstrapped, and nothing after it"
        count = len(client.audit.list())
        again = operator.run(client, "schema.migrate", **JANE)
        assert (again.changes, client.migrations.version()) == ([], NEWEST)
        assert [each.action for each in client.audit.list()[:-count]] == ["gate.window", "schema.migrate"]


def test_on_an_empty_database_nothing_is_bootstrapped_but_what_governs_the_rest(bare: str, newer: str) -> None:
    with holdfast.Client(bare) as client:
        outcome = operator.run(client, "schema.migrate", **JANE)
        assert (outcome.changes[-1], client.migrations.version()) == (newer, NEWEST + 1)
        first, *_, last = [each for each in reversed(client.audit.list()) if each.action == "schema.migrate"]
        assert first.detail["changes"] == outcome.changes[:FOUNDATION]
        assert (last.detail["changes"], last.outcome, last.fence) == (
            outcome.changes[FOUNDATION:], "done", outcome.fence,
        )  # fmt: skip
        assert windows(client) == ["schema"]


def test_a_later_migration_is_governed_like_every_command(bare: str, newer: str) -> None:
    """Under the runtime lease, with its gate open, with actor and reason; although the tables are old."""
    with holdfast.Client(bare) as client:
        client.migrations.up(to=NEWEST)
        assert operator.run(client, "schema.migrate", dry_run=True, **JANE).changes == [newer]
        with holdfast.Client(bare) as rival, rival.migrations.governed(), rival.gates.runtime(ttl=60):
            with pytest.raises(holdfast.NotAcquired, match="holdfast:runtime"):
                _impatient(client)
            assert client.migrations.version() == NEWEST
        outcome = operator.run(client, "schema.migrate", **JANE)
        assert (outcome.changes, client.migrations.version()) == ([newer], NEWEST + 1)
        [refused, done] = recorded(client, "schema.migrate")
        assert (refused[2].partition(":")[0], done) == ("refused", ("schema.migrate", "jane", "done", False))
        assert windows(client) == ["schema"]
        entry = client.audit.list()[1]
        assert (entry.fence, entry.detail["changes"]) == (outcome.fence, [newer])
        with client.lease("work"):
            assert client.leases.get("work") is not None


def test_what_has_begun_goes_on_when_a_later_holdfast_migrates_under_it(bare: str) -> None:
    """As in a deploy, where both versions run for a while: operations complete and leases are released at once. A
    client of the earlier version that starts later is refused, and cannot migrate the tables any more."""
    dot = "_" if bare.startswith("sqlite") else "."

    def reconnect() -> None:  # as after a second without a call
        assert client._engine._dispatcher.sessions
        client._engine._dispatcher.close(now() + 60)

    def effect() -> str:
        query(bare, f"insert into holdfast{dot}schema_version (version, name) values (99, 'later')")
        reconnect()
        return "done"

    with holdfast.Client(bare) as client:
        client.migrate()
        grant = client.lease("work", ttl=60).acquire()
        client.lease("left to close", ttl=60).acquire()
        assert client.operation("publish").run(effect).result == "done"
        reconnect()
        assert grant.release() is True
        for act in (client.migrations.status, client.migrate, lambda: client.migrations.down(to=0)):
            with pytest.raises(holdfast.SchemaMismatch, match="upgrade holdfast"):
                act()
        with holdfast.Client(bare) as late, pytest.raises(holdfast.SchemaMismatch, match="upgrade holdfast"):
            late.leases.list()
        reconnect()
    assert query(bare, f"select name from holdfast{dot}lease") == []


def _impatient(client: holdfast.Client) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.commands.execute._RUNTIME_TIMEOUT", 0.1)
        operator.run(client, "schema.migrate", **JANE)


def test_whichever_way_tables_are_changed_it_is_told_in_their_audit(bare: str, newer: str) -> None:
    """By a program at its start, or because a file is opened by a later holdfast."""
    with holdfast.Client(bare) as client:
        client.migrations.up(to=NEWEST)
        assert client.migrations.version() == NEWEST
        if bare.startswith("sqlite"):
            client.leases.list()
        else:
            with pytest.raises(holdfast.SchemaMismatch, match="migrate up"):
                client.leases.list()
            client.migrate()
        assert client.migrations.version() == NEWEST + 1
        [(action, actor, outcome, bootstrap)] = recorded(client, "schema.migrate")
        assert (action, outcome, bootstrap) == ("schema.migrate", "done", False)
        assert actor == client._engine.process["label"]
        client.migrations.down(to=NEWEST)
        assert query(bare, "select outcome from holdfast{}audit where action = 'schema.revert'".format(
            "_" if bare.startswith("sqlite") else "."
        )) == [("done",)]  # fmt: skip


def test_the_command_line_migrates_through_the_governed_command(bare: str) -> None:
    first = printed(*at(bare, "migrate", "up", "--actor", "jane"))
    assert first.splitlines()[0] == "migration 0001 lease is applied"
    assert printed(*at(bare, "migrate")) == "nothing to do: the schema is up to date\n"
    with holdfast.Client(bare) as client:
        assert recorded(client, "schema.migrate")[0] == ("schema.migrate", "jane", "done", True)
        missing = invoke(*at(bare, "migrate", "down", "--to", "0", "--yes"))
        assert (missing.returncode, "--reason" in missing.stderr) == (2, True)
        assert client.migrations.version() == NEWEST


def test_taking_migrations_back_is_governed_as_far_as_there_is_something_to_govern_it_with(
    bare: str, newer: str
) -> None:
    with holdfast.Client(bare) as client:
        client.migrations.up()
        outcome = operator.run(client, "schema.revert", {"to": NEWEST}, **JANE)
        assert outcome.changes == [
            f"migration {NEWEST + 1:04} extra is reverted, and the data in its tables is deleted"
        ]
        assert client.migrations.version() == NEWEST
        client.migrations.up()
        assert recorded(client, "schema.revert") == [("schema.revert", "jane", "done", False)]
        assert windows(client) == ["schema"]
        with pytest.raises(operator.CommandRefused, match="the tables are at"):
            operator.run(client, "schema.revert", {"to": NEWEST + 1}, **JANE)


def test_the_end_of_all_tables_is_said_where_it_can_be(bare: str) -> None:
    """The audit is removed with them, so it is logged on stderr."""
    printed(*at(bare, "migrate", "up"))
    done = call(*at(bare, "migrate", "down", "--to", "0", "--yes", "--actor", "jane", "--reason", "not needed"))
    assert (done.returncode, "migration 0001 lease is reverted" in done.stdout) == (0, True)
    lines = done.stderr.splitlines()
    assert len(lines) == FOUNDATION, done.stderr
    assert lines[-1] == "migration 0001 lease was reverted by jane: not needed"
    with holdfast.Client(bare) as client:
        assert client.migrations.version() == 0
    assert printed(*at(bare, "migrate", "down", "--to", "0", "--yes", "--reason", "again")) == "nothing to do\n"
