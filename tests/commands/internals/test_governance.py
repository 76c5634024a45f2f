"""No command bypasses the rules, and a command cannot write while it plans: by construction, not by good behaviour."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import commands as operator
from holdfast.commands import registry
from holdfast.database.statements import statements
from tests.children import query
from tests.cli.command import ask

JANE: dict[str, Any] = {"actor": "jane", "reason": "its machine is gone"}


@pytest.fixture
def client(either: str) -> Iterator[holdfast.Client]:
    with holdfast.Client(either) as client:
        yield client


@pytest.fixture
def on_file(sqlite_url: str) -> Iterator[holdfast.Client]:
    """For rules that no database takes part in."""
    with holdfast.Client(sqlite_url) as client:
        yield client


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


def contents(url: str) -> list[Any]:
    """All rows of the tables, and the last number of the fence."""
    dot = "_" if url.startswith("sqlite") else "."
    tables = [
        f"holdfast{dot}{name}"
        for name in ("lease", "beat", "history", "audit", "object", "fence", "schema_version", "idempotency_log", "wal")
    ]
    return [query(url, f"select * from {table} order by 1") for table in tables]


def test_no_registered_command_bypasses_the_rules() -> None:
    assert operator.check() == {name: [] for name in operator.commands()}
    output = ask("commands", "check")
    assert output.splitlines() == [f"{name}: governed" for name in operator.commands()]


def test_the_check_runs_nothing_of_a_command() -> None:
    """Neither its plan nor its change: it may do harm outside of the temporary database."""
    steps: list[str] = []

    @operator.command("a.harmful", gate="x", subject="all", destructive=True)
    def harmful(window: Any) -> Any:
        """Do harm."""
        steps.append("planned")
        yield ["harm"]
        steps.append("applied")

    assert operator.check()["a.harmful"] == []
    assert steps == []


def detour() -> None:
    """In the module of a command, and called by it."""
    holdfast.Client("sqlite:///own.db").close()


def test_the_check_finds_what_bypasses(tmp_path: Path) -> None:
    class Open(operator.Command):
        def steps(self, window: Any, **values: Any) -> Any:
            return iter([["it is done"]])

    @operator.command("a.nameless", gate="", subject="{nobody}", destructive=True)
    def nameless(window: Any) -> Any:
        yield []

    @operator.command("a.sudden", gate="x", subject="x", destructive=True)
    def sudden(window: Any) -> Any:
        """Do it without a word."""
        return iter([[]])

    @operator.command("a.double", gate="x", subject="x", destructive=True)
    def double(window: Any) -> Any:
        """Tell twice."""
        yield ["one"]
        yield ["two"]

    @operator.command("a.other", gate="x", subject="x", destructive=True, name=operator.Parameter("the name"))
    def other(window: Any) -> Any:
        """Go another way."""
        yield [str(holdfast.Client(f"sqlite:///{tmp_path}/own.db"))]

    @operator.command("a.secret", gate="x", subject="x", destructive=True)
    def secret(window: Any) -> Any:
        """Let others go another way."""
        yield []
        detour()

    @operator.command("a.nested", gate="x", subject="x", destructive=True)
    def nested(window: Any) -> Any:
        """Hide it inside."""

        def inside() -> Any:
            return [holdfast.AsyncClient(f"sqlite:///{each}") for each in ("own.db",)]

        yield inside()

    @operator.command(
        "a.talkative", gate="x", subject="{token}", destructive=True, token=operator.Parameter("it", secret="X")
    )
    def talkative(window: Any, *, token: str) -> Any:
        """Tell a secret."""
        yield []

    good = operator.commands()["gate.close"]
    registry._registry["a.open"] = Open("a.open", "x", "x", True, {}, "x", False, good.function)
    problems_by_name = {name: problems for name, problems in operator.check().items() if problems}
    assert problems_by_name == {
        "a.nameless": [
            "it has no gate", "it has no summary", "its subject is empty, or names an unknown parameter",
        ],
        "a.sudden": ["it does not yield its changes before it makes them"],
        "a.double": ["it does not yield exactly once"],
        "a.other": [
            "its arguments are not a window and the declared parameters",
            "it creates a client instead of using that of its window",
        ],
        "a.secret": ["it creates a client instead of using that of its window"],
        "a.nested": ["it creates a client instead of using that of its window"],
        "a.talkative": ["its subject contains a secret"],
        "a.open": [
            "it is a subclass of Command, which may bypass the checks of Command",
            "its arguments are not a window and the declared parameters",
            "it runs without a window", "it runs in a window that was not opened by run",
        ],
    }  # fmt: skip


ACTS: dict[str, Any] = {
    "a lease": lambda client: client.lease("x").acquire(),
    "a slot": lambda client: client.slots("x", 1).claim(),
    "a forced release": lambda client: client.leases.force_release("held", actor="x", reason="x"),
    "a recall": lambda client: client.leases.recall("held", fence=1, actor="x", reason="x"),
    "a gate": lambda client: client.gates.open("x", seconds=60, actor="x", reason="x"),
    "a window": lambda client: client.gate("x", actor="x", reason="x").__enter__(),
    "an entry": lambda client: client.audit.begin("x.y", "x", actor="x", reason="x"),
    "an object": lambda client: client.objects.put_if("box", "b", {}, holdfast.MustCreate()),
    "a migration": lambda client: client.migrations.down(to=0),
    "a rehearsal": lambda client: client.leases.probe(),
    "a session's end": lambda client: client.locks.end_session(7, actor="x", reason="x"),
    "a lock": lambda client: client.lock("x").acquire(),
    "a reset": lambda client: client.operations.reset("done", actor="x", reason="x"),
    "an operation": lambda client: client.operation("new").run(lambda: 1),
}


def test_whatever_a_command_tries_while_it_looks_nothing_is_changed(client: holdfast.Client, either: str) -> None:
    """On a dry run and on a real one alike: its client sends no writes, and the database would refuse them, too."""
    held = client.lease("held", ttl=300, auto_renew=False).acquire()
    with holdfast.Client(either) as other:  # closed here, so that its heartbeat does not change rows below
        other.operation("done").run(lambda: 1)
    assert client.operations.get("done") is not None
    acts = iter(())

    @operator.command("a.hasty", gate="hasty", subject="x", destructive=True)
    def hasty(window: Any) -> Any:
        """Write before it has yielded its plan."""
        next(acts)(window.client)
        yield ["too late"]

    before = contents(either)
    acts = iter(ACTS.values())
    for what in ACTS:
        with pytest.raises(holdfast.HoldfastError) as refused:
            operator.run(client, "a.hasty", dry_run=True, **JANE)
        assert any(word in str(refused.value) for word in ("read-only", "only looks")), (what, str(refused.value))
    assert contents(either) == before
    acts = iter(ACTS.values())
    for _ in ACTS:
        with pytest.raises(holdfast.HoldfastError):
            operator.run(client, "a.hasty", **JANE)
    assert [each.name for each in client.leases.list()] == ["held"]
    assert held.renew()
    assert {(each.outcome or "").partition(":")[0] for each in client.audit.list() if each.action == "a.hasty"} == {
        "refused"
    }


def test_the_database_itself_refuses_a_session_that_looks(
    client: holdfast.Client, either: str, monkeypatch: Any
) -> None:
    """Even if a statement that writes is mistaken for one that reads."""
    client.leases.list()
    taken_for = dict.fromkeys(["lease_acquire", "purge"], statements("sqlite")["lease_list"])
    monkeypatch.setattr("holdfast.database.read_only.statements", lambda _: taken_for)
    before = contents(either)
    with client.read_only() as reader:
        with pytest.raises(holdfast.EngineError, match="read-only"):
            reader.lease("x").acquire()
        with pytest.raises(holdfast.EngineError, match="read-only"):
            reader._engine.call("purge", {})
    assert contents(either) == before


def test_looking_at_a_file_that_is_not_there_does_not_make_it(tmp_path: Path) -> None:
    with holdfast.Client(f"sqlite:///{tmp_path / 'app.db'}") as client:
        with pytest.raises(holdfast.SchemaMismatch, match="migrate up"):
            operator.run(client, "lease.release", {"name": "x"}, dry_run=True, **JANE)
        assert operator.run(client, "schema.migrate", dry_run=True, **JANE).changes != []
    assert list(tmp_path.iterdir()) == []


def test_whoever_looks_waits_for_nobody_who_writes(sqlite_url: str) -> None:
    path = sqlite_url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path, isolation_level=None)) as writer, holdfast.Client(sqlite_url) as client:
        client.lease("held").acquire()
        writer.execute("begin immediate")
        with client.read_only() as reader:
            assert [each.name for each in reader.leases.list()] == ["held"]
        writer.execute("rollback")


def test_a_window_that_was_kept_is_good_for_nothing(on_file: holdfast.Client) -> None:
    """Whether it is forged, borrowed from another command, or used after the run."""
    kept: list[operator.Window] = []

    @operator.command("a.keeper", gate="keeper", subject="x", destructive=False)
    def keeper(window: Any) -> Any:
        """Keep the window."""
        kept.append(window)
        yield ["it is kept"]
        window.client.lease("in time").acquire().release()

    operator.run(on_file, "a.keeper", **JANE)
    [window] = kept
    release = operator.commands()["lease.release"]
    forged = operator.Window(release, on_file, on_file, "x", "x", break_glass=True)
    on_file.lease("held").acquire()
    for command, given in ((keeper, window), (release, window), (release, forged), (release, None)):
        with pytest.raises(holdfast.PolicyDenied, match=r"can only be run by holdfast\.commands\.run"):
            next(command.steps(given, **({} if command is keeper else {"name": "held"})))
    with pytest.raises(holdfast.HoldfastError):
        window.client.lease("too late").acquire()
    assert on_file.leases.get("held") is not None


@pytest.mark.parametrize("changes", [None, "a line", [1]])
def test_a_command_that_does_not_tell_what_it_is_about_to_change_does_nothing(
    on_file: holdfast.Client, changes: Any
) -> None:
    done: list[str] = []

    @operator.command("a.mute", gate="mute", subject="x", destructive=False)
    def mute(window: Any) -> Any:
        """Say nothing."""
        if changes is None:
            return
        yield changes
        done.append("never")

    with pytest.raises(TypeError, match=r"^command a\.mute must first yield its plan"):
        operator.run(on_file, "a.mute", **JANE)
    assert done == []


def test_a_command_that_yields_twice_is_stopped(on_file: holdfast.Client) -> None:
    done: list[str] = []

    @operator.command("a.double", gate="doubles", subject="x", destructive=False)
    def double(window: Any) -> Any:
        """Tell twice."""
        yield ["one"]
        yield ["two"]
        done.append("never")

    with pytest.raises(RuntimeError, match="second yield"):
        operator.run(on_file, "a.double", **JANE)
    assert done == []
    [entry] = [each for each in on_file.audit.list() if each.action == "a.double"]
    assert (entry.outcome or "").startswith("failed: RuntimeError")
    with pytest.raises(ValueError, match="already"):
        operator.command("a.double", gate="x", subject="x", destructive=False)
