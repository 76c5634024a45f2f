"""Gates: closed at rest, open only while the lease behind them is held, and closed only by their own opener."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import commands as operator
from tests.children import NONE, PATIENCE, Child, eventually, query, rows
from tests.cli.command import ask, at, call, invoke, printed

Connect = Callable[..., Any]
GATE = "dot_config"
WINDOW = """
import sys, holdfast
with holdfast.Client(sys.argv[1]) as client:
    try:
        with client.gate("dot_config", actor=sys.argv[2], reason="new addresses", ttl=float(sys.argv[3])):
            print("open", flush=True)
            sys.stdin.readline()
        print("closed", flush=True)
    except holdfast.NotAcquired as refusal:
        print(refusal, flush=True)
"""


@pytest.fixture
def client(either: str) -> Iterator[holdfast.Client]:
    with holdfast.Client(either) as opened:
        yield opened


def is_open(client: Any) -> bool:
    try:
        client.gates.require(GATE)
    except holdfast.PolicyDenied:
        return False
    return True


def story(client: Any) -> list[tuple[str, str, str | None]]:
    """Who did what, and how it ended; the earliest first."""
    return [(each.actor, each.action, each.outcome) for each in reversed(client.audit.list())]


def test_a_gate_is_open_in_its_window_and_closed_before_and_after(connect: Connect, either: str) -> None:
    client, other = connect(either), connect(either)
    with pytest.raises(holdfast.PolicyDenied, match="gate 'dot_config' is closed"):
        client.gates.require(GATE)
    with client.gate(GATE, actor="jane", reason="new addresses") as grant:
        assert other.gates.require(GATE).holder == "jane"
        assert [each.fence for each in other.gates.list()] == [grant.fence]
        with pytest.raises(holdfast.PolicyDenied):
            other.gates.require("another")
    assert not is_open(other)
    [entry] = client.audit.list()
    assert (entry.actor, entry.action, entry.subject, entry.reason) == ("jane", "gate.window", GATE, "new addresses")
    assert (entry.fence, entry.outcome) == (grant.fence, "closed")
    assert entry.ended_at >= entry.at
    client.close()
    assert rows(either) == NONE, "0 rows at rest"


def test_an_answer_in_doubt_is_told_as_such_and_leaves_no_gate_open(
    client: holdfast.Client, either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database has opened it, and the answer was lost: that is not a refusal."""
    client.leases.list()
    monkeypatch.setenv("HOLDFAST_FAILPOINTS", "after:gate_acquire=error;after:gate_open=error")
    with holdfast.Client(either) as unlucky:
        with pytest.raises(holdfast.EngineError), unlucky.gate(GATE, actor="jane", reason="why"):
            pytest.fail("nothing runs")
        eventually(lambda: not is_open(client), "it is closed again")
        with pytest.raises(holdfast.EngineError):
            unlucky.gates.open(GATE, seconds=600, actor="jane", reason="why")
    eventually(lambda: not is_open(client), "it is closed again")
    assert [(action, (outcome or "").partition(":")[0]) for _, action, outcome in story(client)] == [
        ("gate.window", "unknown"), ("gate_open", "done"),
    ], "the database has opened it, and wrote that down with it"  # fmt: skip


def test_a_gate_is_opened_and_closed_with_its_entry_or_not_at_all(connect: Connect, url: str) -> None:
    client = connect(url)
    client.audit.list()
    audit = "holdfast_audit" if url.startswith("sqlite") else "holdfast.audit"
    if url.startswith("sqlite"):
        no_room = f"create trigger no_room before insert on {audit} begin select raise(abort, 'no room'); end"
        room = "drop trigger no_room"
    else:
        no_room = f"alter table {audit} add constraint no_room check (false) not valid"
        room = f"alter table {audit} drop constraint no_room"
    query(url, no_room)
    with pytest.raises(holdfast.EngineError, match=r"no.room"):
        client.gates.open(GATE, seconds=600, actor="jane", reason="why")
    assert not is_open(client)
    query(url, room)
    assert client.gates.open(GATE, seconds=600, actor="jane", reason="why").token
    query(url, no_room)
    with pytest.raises(holdfast.EngineError, match=r"no.room"):
        client.gates.close(GATE, actor="jane", reason="why")
    assert is_open(client)
    query(url, room)
    assert client.gates.close(GATE, actor="jane", reason="why")
    assert not is_open(client)
    assert story(client) == [("jane", "gate_open", "done"), ("jane", "gate_close", "done")]


BY_PYTHON: dict[str, Callable[[Any, Any], object]] = {
    "open": lambda client, mine: client.gates.open(GATE, seconds=60, actor="joe", reason="early"),
    "close": lambda client, mine: client.gates.close(GATE, actor="joe", reason="early"),
}
BY_SQL: dict[str, Callable[[Any, Any], object]] = {
    "open": lambda client, mine: mine.execute("select holdfast.gate_open('dot_config', 60, 'joe', 'early')"),
    "close": lambda client, mine: mine.execute("select holdfast.gate_close('dot_config', 'joe', 'early')"),
}


@pytest.mark.parametrize(
    ("either", "way"), [("sqlite", "python"), ("postgres", "python"), ("postgres", "sql")], indirect=["either"]
)
def test_what_is_refused_leaves_the_same_entry_as_what_is_done_whichever_way(either: str, way: str) -> None:
    """SQLite has no functions."""
    act = BY_SQL if way == "sql" else BY_PYTHON
    path = either.removeprefix("sqlite:///")
    with (
        holdfast.Client(either) as client,
        closing(psycopg.connect(either, autocommit=True) if path == either else sqlite3.connect(path)) as mine,
    ):

        def attempt(what: str) -> None:
            with suppress(holdfast.NotAcquired, holdfast.PolicyDenied):
                act[what](client, mine)

        attempt("close")
        with client.gate(GATE, actor="jane", reason="why") as grant:
            attempt("open")
            attempt("close")
            assert client.gates.require(GATE).fence == grant.fence
        attempt("open")
        opened = client.gates.require(GATE)
        assert (opened.holder, opened.info["for"], opened.info["reason"]) == ("joe", 60, "early")
        attempt("open")
        attempt("close")
        assert not is_open(client)
        entries = [each for each in reversed(client.audit.list()) if each.action != "gate.window"]
        assert [(each.action, each.subject, each.outcome, each.fence) for each in entries] == [
            ("gate_close", GATE, "refused: it is not open", None),
            ("gate_open", GATE, "refused: it is held by jane", None),
            ("gate_close", GATE, "refused: a window of jane", grant.fence),
            ("gate_open", GATE, "done", opened.fence),
            ("gate_open", GATE, "refused: it is held by joe", None),
            ("gate_close", GATE, "done", opened.fence),
        ]
        assert {(each.actor, each.reason) for each in entries} == {("joe", "early")}
        assert client.leases.history(f"@gate:{GATE}")[0].reason == "early"


FORKING = """
import os, sys, holdfast
from holdfast import commands as operator

def fork():
    if (pid := os.fork()) == 0:
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0

@operator.command("a.fork", gate="forks", subject="x", destructive=False)
def forks(window):
    "Fork in the middle."
    yield []
    fork()

with holdfast.Client(sys.argv[1]) as client:
    with client.gate("dot_config", actor="jane", reason="why"):
        fork()
        client.gates.require("dot_config")
    operator.run(client, "a.fork", actor="jane", reason="why")
    print("done", flush=True)
    sys.stdin.readline()
"""


def test_a_fork_that_leaves_a_window_or_a_command_does_not_tell_its_end(client: holdfast.Client, either: str) -> None:
    client.leases.list()
    with Child(FORKING, either) as child:
        child.expect("done")
    assert [(action, outcome) for _, action, outcome in story(client)] == [
        ("gate.window", "closed"), ("a.fork", "done"), ("gate.window", "closed"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["@gate:dot_config", "holdfast:runtime"])
def test_holdfasts_own_leases_are_nobodys_to_take_past_what_they_are_for(
    connect: Connect, tmp_path: Any, name: str
) -> None:
    """Else a gate could be open without an entry in the audit, and any lease of that name would keep operators out."""
    client = connect(url := f"sqlite:///{tmp_path / 'app.db'}")
    for take in (client.lease, client.guard, client.elector, lambda name: client.shards(name, 4)):
        with pytest.raises(ValueError, match=rf"^(name|key) must not begin with '@' or 'holdfast:'.*: '{name}'$"):
            take(name)
    for guard in ([], ["--guard"]):
        done = call(*at(url, "run", *guard, name, "--", "touch", str(tmp_path / "ran")))
        assert (done.returncode, "must not begin with '@' or 'holdfast:'" in done.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_gate_is_closed_whatever_happens_in_its_window(connect: Connect, either: str) -> None:
    client = connect(either)
    with pytest.raises(ZeroDivisionError), client.gate(GATE, actor="jane", reason="why"):
        _ = 1 / 0
    assert not is_open(client)
    assert story(client) == [("jane", "gate.window", "closed after ZeroDivisionError: division by zero")]


def test_nobody_opens_or_closes_it_underneath_not_even_the_same_actor(connect: Connect, either: str) -> None:
    client, other = connect(either), connect(either)
    with client.gate(GATE, actor="jane", reason="why") as grant:
        with pytest.raises(holdfast.NotAcquired, match="is held by jane"), other.gate(GATE, actor="jane", reason="x"):
            pytest.fail("not twice")
        with pytest.raises(holdfast.NotAcquired):
            other.gates.open(GATE, seconds=60, actor="jane", reason="x")
        with pytest.raises(holdfast.PolicyDenied, match="window that jane has open"):
            other.gates.close(GATE, actor="jane", reason="x")
        grant.check()
        assert is_open(other)
    with other.gate(GATE, actor="jane", reason="why") as later:
        assert later.fence > grant.fence
    outcomes = [(action, (outcome or "").partition(":")[0]) for _, action, outcome in story(client)]
    assert outcomes == [
        ("gate.window", "closed"), ("gate.window", "refused"), ("gate_open", "refused"), ("gate_close", "refused"),
        ("gate.window", "closed"),
    ]  # fmt: skip


def test_a_window_that_was_taken_away_says_so_at_its_end(connect: Connect, either: str) -> None:
    client = connect(either)
    window = client.gate(GATE, actor="jane", reason="why", ttl=600)
    with pytest.raises(holdfast.LeaseLost), window as grant:  # noqa: PT012
        assert client.leases.force_release(f"@gate:{GATE}", actor="joe", reason="stuck")
        with pytest.raises(holdfast.LeaseLost):
            grant.renew()
    assert ("jane", "gate.window", "lost while it was open") in story(client)


def test_of_two_that_share_a_window_each_leaves_its_own(sqlite_url: str) -> None:
    """The first was taken away from it, and leaves while the second is in there."""
    with holdfast.Client(sqlite_url) as client:
        window = client.gate(GATE, actor="jane", reason="why", ttl=600)
        window.__enter__()
        assert client.leases.force_release(f"@gate:{GATE}", actor="joe", reason="stuck")
        opened, go = threading.Event(), threading.Event()

        def second() -> None:
            with window:
                opened.set()
                go.wait(PATIENCE)

        other = threading.Thread(target=second)
        other.start()
        assert opened.wait(PATIENCE)
        with suppress(holdfast.LeaseLost):
            window.__exit__(None, None, None)
        assert is_open(client), "the other window is not closed"
        go.set()
        other.join()
        assert not is_open(client)


def test_two_operators_race_and_one_is_killed_in_its_window(client: holdfast.Client, either: str) -> None:
    """The other is refused, the gate is closed by expiry and by nothing else, then the other succeeds."""
    client.leases.list()
    with Child(WINDOW, either, "jane", 600) as jane, Child(WINDOW, either, "joe", 600) as joe:
        lines = {"jane": jane.line(), "joe": joe.line()}
        [winner] = [name for name, line in lines.items() if line == "open"]
        [loser] = lines.keys() - {winner}
        assert f"is held by {winner}" in lines[loser]
        assert is_open(client)
        (jane if winner == "jane" else joe).kill()
        assert is_open(client), "its lease has not expired: it is open"
        with pytest.raises(holdfast.NotAcquired), client.gate(GATE, actor=loser, reason="x"):
            pytest.fail("it is open still")
        dot = "_" if either.startswith("sqlite") else "."
        query(either, f"update holdfast{dot}beat set expires_at = started")
        assert not is_open(client), "the lease has expired"
        with Child(WINDOW, either, loser, 600) as again:
            again.expect("open")
            assert client.gates.require(GATE).holder == loser
            again.say("enough")
            again.expect("closed")
    assert not is_open(client)
    entries = story(client)
    assert (winner, "gate.window", None) in entries[:2], "no outcome was recorded"
    assert [actor for actor, _, outcome in entries if (outcome or "").startswith("refused")] == [loser, loser]
    assert entries[3:] == [(loser, "gate.window", "closed")]
    assert client.leases.history(f"@gate:{GATE}")[1].outcome == "expired"


def test_a_window_that_a_protected_transaction_keeps_open_is_not_told_as_closed(
    connect: Connect, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease cannot be released while the transaction is open, so the gate stays open until that ends."""
    for flavour in ("", "_async"):
        monkeypatch.setattr(f"holdfast.lease.grant{flavour}._RELEASE_PATIENCE", 0.1)
    client = connect(postgres_url)
    with closing(psycopg.connect(postgres_url)) as mine:
        with client.gate(GATE, actor="jane", reason="why", ttl=600) as grant:
            protect(client, grant, mine)
        assert is_open(client)
        [(_, _, outcome)] = story(client)
        assert outcome is not None
        assert outcome.startswith("not closed yet, at the latest when its lease expires: ")
        mine.rollback()
    eventually(lambda: not is_open(client), "it is closed as soon as it can be")


def protect(client: Any, grant: Any, connection: psycopg.Connection[Any]) -> None:
    """Protect the user's own transaction, for a client of either flavour."""
    statement = "select holdfast.lease_protect(%s, %s)"
    connection.execute(statement, [grant.name, grant.token])


def test_one_that_cannot_be_closed_yet_says_so(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.recipes.gate._PATIENCE", 0.1)
    other = holdfast.Client(postgres_url)
    with other, closing(psycopg.connect(postgres_url)) as mine:
        grant = other.gates.open(GATE, seconds=300, actor="jane", reason="why")
        protect(other, grant, mine)
        with pytest.raises(holdfast.EngineError, match="cannot be closed while"):
            other.gates.close(GATE, actor="joe", reason="early")
        assert is_open(other)
        assert [action for _, action, _ in story(other)] == ["gate_open"]


def test_from_sql_a_gate_is_not_closed_under_who_has_passed_it_nor_is_a_window(postgres_url: str) -> None:
    close = "select holdfast.gate_close('dot_config', 'joe', 'early', false)"
    with (
        holdfast.Client(postgres_url) as client,
        psycopg.connect(postgres_url, autocommit=True) as joe,
        closing(psycopg.connect(postgres_url)) as writer,
    ):
        opened = "select fence from holdfast.gate_open('dot_config', 300, 'jane', 'new addresses')"
        [(fence,)] = joe.execute(opened).fetchall()
        record = client.gates.require(GATE)
        assert (record.fence, record.holder, record.info["for"]) == (fence, "jane", 300)
        assert writer.execute("select holdfast.gate_require('dot_config')").fetchall() == [(fence,)]
        with pytest.raises(psycopg.errors.LockNotAvailable):
            joe.execute(close)
        listed = {each.name: each.pid for each in client.locks.list()}
        assert listed["transaction under lease @gate:dot_config"] == writer.info.backend_pid
        writer.rollback()
        assert joe.execute(close).fetchall() == [("closed",)]
        assert not is_open(client)
        with client.gate(GATE, actor="jane", reason="why"):
            assert joe.execute(close).fetchall() == [("window",)]
        assert [each.action for each in client.audit.list()] == [
            "gate_close", "gate.window", "gate_close", "gate_open",
        ]  # fmt: skip


def test_one_that_was_open_for_a_time_leaves_nothing(connect: Connect, either: str) -> None:
    """Its opener clears it away when the time is over; if that is gone, the next caller that sees it closed does."""
    client = connect(either)
    client.gates.open(GATE, seconds=1, actor="jane", reason="why")
    eventually(lambda: rows(either) == NONE, "0 rows at rest")
    assert client.leases.history(f"@gate:{GATE}")[0].outcome == "expired"
    client.close()  # it would purge rows of others
    with holdfast.Client(either) as gone:
        gone.gates.open(GATE, seconds=600, actor="jane", reason="why")
    assert rows(either) == {"lease": 1, "beat": 1}
    dot = "_" if either.startswith("sqlite") else "."
    query(either, f"update holdfast{dot}beat set expires_at = started where solo")
    assert rows(either)["lease"] == 1
    assert not is_open(connect(either))
    assert rows(either)["lease"] == 0


def test_from_the_command_line_a_gate_is_held_for_a_stated_time(client: holdfast.Client, either: str) -> None:
    by_jane = ("--actor", "jane", "--reason", "new addresses")
    if either.startswith("sqlite"):
        missing = invoke(*at(either, "do", "gate.open", GATE, *by_jane))
        assert (missing.returncode, "Missing option '--for'" in missing.stderr) == (2, True)
    output = ask(*at(either, "do", "gate.open", GATE, "--for", "300", *by_jane))
    assert "gate 'dot_config' is open for 300 s" in output
    assert "recorded: jane: new addresses" in output
    record = client.gates.require(GATE)
    assert (record.holder, record.info["for"], record.info["reason"]) == ("jane", 300, "new addresses")
    assert 200 < record.remaining <= 300
    with pytest.raises(holdfast.NotAcquired), client.gate(GATE, actor="joe", reason="x"):
        pytest.fail("it is open already")
    jane: dict[str, Any] = {"actor": "jane", "reason": "new addresses"}
    with pytest.raises(holdfast.NotAcquired, match="is held by jane"):
        operator.run(client, "gate.open", {"name": GATE, "seconds": 1}, **jane)
    printed(*at(either, "do", "gate.close", GATE, "--actor", "joe", "--reason", "done early"))
    assert not is_open(client)
    with pytest.raises(holdfast.HoldfastError, match=r"^gate 'dot_config' is already closed$"):
        operator.run(client, "gate.close", {"name": GATE}, **jane)
    operator.run(client, "gate.open", {"name": GATE, "seconds": 60}, **jane)
    dot = "_" if either.startswith("sqlite") else "."
    query(either, f"update holdfast{dot}beat set expires_at = started where solo")
    assert not is_open(client), "when its time is over it is closed by itself"
    entries = [each for each in reversed(client.audit.list()) if each.action in ("gate.open", "gate.close")]
    assert [(each.action, each.actor, (each.outcome or "").partition(":")[0]) for each in entries] == [
        ("gate.open", "jane", "done"), ("gate.open", "jane", "refused"), ("gate.close", "joe", "done"),
        ("gate.close", "jane", "refused"), ("gate.open", "jane", "done"),
    ]  # fmt: skip
    assert all(each.fence for each in entries)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"name": ""}, "name must"), ({"name": "x" * 181}, "name must"), ({"actor": ""}, "actor must"),
        ({"reason": ""}, "reason must"), ({"ttl": 0}, "ttl must"), ({"actor": "a\nb"}, "actor must"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_refused_before_anything_is_written(
    connect: Connect, tmp_path: Any, arguments: dict[str, Any], wanted: str
) -> None:
    client = connect(f"sqlite:///{tmp_path / 'app.db'}")
    with pytest.raises(ValueError, match=f"^{wanted}"):
        client.gate(**{"name": GATE, "actor": "jane", "reason": "why"} | arguments)
    if "name" in arguments:
        with pytest.raises(ValueError, match=r"^name must have 1 to 180 characters"):
            client.gates.require(arguments["name"])
    assert list(tmp_path.iterdir()) == []
