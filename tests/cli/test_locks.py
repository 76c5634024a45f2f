"""holdfast locks and locks end, as processes of their own."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

import holdfast
from tests.children import PATIENCE, Child, eventually, query
from tests.cli.command import (
    SCRIPT,
    Running,
    ask,
    at,
    call,
    columns_of,
    environment,
    invoke,
    on_terminal,
    printed,
    valid,
)
from tests.conftest import server

LONG = "a lock with a rather long name, as people give them"
WAIT = """
import sys, holdfast
with holdfast.Client(sys.argv[1]) as client:
    print("asking", flush=True)
    client.lock(sys.argv[2], timeout=600).acquire()
    print("got it", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def foreign(url: str, statement: str, name: str = "somebody else") -> Iterator[tuple[Any, int]]:
    """A session of another program that took a lock."""
    with closing(psycopg.connect(url, autocommit=True, application_name=name)) as connection:
        connection.execute(statement.encode())
        yield connection, connection.info.backend_pid


def listed(url: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = valid("locks", printed(*at(url, "locks", "--json")))
    return rows


def audit(url: str) -> list[tuple[Any, ...]]:
    table = "holdfast_audit" if url.startswith("sqlite") else "holdfast.audit"
    about = "select actor, action, subject, reason, outcome"
    return query(url, f"{about} from {table} where action = 'lock.end' order by id")


def named(url: str, name: str) -> None:
    """Until its name is written down, off the hot path."""
    with holdfast.Client(url) as client:
        eventually(lambda: name in {each.name for each in client.locks.list()}, f"{name!r} has its name")


def test_locks_of_anybody_are_listed_with_who_blocks_whom(postgres_url: str) -> None:
    with (
        holdfast.Client(postgres_url) as client,
        foreign(postgres_url, "select pg_advisory_lock(42, -7)") as (_, pid),
        foreign(postgres_url, "select pg_advisory_lock_shared(-5)", "") as (_, other),
        client.lock("nightly import") as grant,
        Child(WAIT, postgres_url, "nightly import") as child,
    ):
        client.lock(("agent", -7)).acquire()
        child.expect("asking")
        named(postgres_url, "nightly import")
        eventually(lambda: any(not each["granted"] for each in listed(postgres_url)), "the other waits")
        records = listed(postgres_url)
        assert [(each["namespace"], each["entity_id"], each["mode"]) for each in records if each["name"] is None] == [
            (None, -5, "shared"),
            ("42", -7, "exclusive"),
            ("agent", -7, "exclusive"),
        ]
        holds, waits = (each for each in records if each["name"] == "nightly import")
        assert (holds["granted"], holds["blocked_by"], holds["waiting"]) == (True, [], 1)
        assert holds["application_name"] == f"holdfast:{holds['holder']}"
        assert holds["holder"].split(":")[1] == str(os.getpid())
        assert (waits["granted"], waits["blocked_by"], waits["state"]) == (False, [holds["pid"]], "active")
        assert {each["pid"] for each in records} == {pid, other, holds["pid"], waits["pid"]}
        assert all(each["duration"] >= 0 for each in records)

        rows = columns_of(ask(*at(postgres_url, "locks")))
        assert [(row["lock"], row["granted"]) for row in rows[:2]] == [
            ("nightly import", "yes"),
            ("nightly import", "waits"),
        ]
        assert rows[1]["blocked by"] == str(holds["pid"])
        assert {row["lock"] for row in rows[2:]} == {"-5", "(42, -7)", "(agent, -7)"}
        grant.release()
        child.expect("got it")


def test_a_client_knows_the_names_of_its_own_locks_at_once(connect: Callable[..., Any], either: str) -> None:
    """Others read them where they are written down a moment later. Neighbours are one lock for the kernel."""
    client = connect(either)
    with client.lock(LONG), client.lock(("agent", 7)), client.lock(("agent", 8)), client.lock("import"):
        assert [each.label for each in client.locks.list()] == [LONG, "import", "(agent, 7)", "(agent, 8)"]


def test_what_leases_lock_is_called_what_it_is(postgres_url: str) -> None:
    """A lease with a session of its own, a standby that watches that session, and one that waits to be told."""
    waits = (
        "import sys, holdfast\nholdfast.Client(sys.argv[1]).lease('sweep', timeout=600, failover='session').acquire()"
    )
    with holdfast.Client(postgres_url) as client, ExitStack() as stack:
        client.lease("sweep", failover="session").acquire()
        stack.enter_context(Child(waits, postgres_url))
        label = client.leases.list()[0].info["label"]

        def seen() -> set[tuple[str | None, str | None, str, bool]]:
            return {(each.namespace, each.name, each.mode, each.granted) for each in client.locks.list()}

        mine = (None, f"session of {label}", "exclusive", True)
        standby = (None, f"session of {label}", "shared", False)
        listens = (None, "waiter of lease sweep", "shared", True)
        ready = (None, "session without a lease", "exclusive", True)
        eventually(lambda: seen() >= {mine, standby, listens, ready}, "all of them are there")


def test_another_schema_has_names_of_its_own(postgres_url: str) -> None:
    with holdfast.Client(postgres_url, schema="other") as client:
        client.migrate()
        client.lock(("agent", 7)).acquire()
        [row] = valid("locks", printed("--schema", "other", *at(postgres_url, "locks", "--json")))
        assert (row["namespace"], row["entity_id"]) == ("agent", 7)


def test_on_sqlite_the_kernel_tells_who_holds_what(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    with holdfast.Client(url) as client, Child(WAIT, url, "theirs") as child:
        client.lock("ours").acquire()
        client.lock(("agent", -7)).acquire()
        child.expect("asking", "got it")
        named(url, "ours")
        named(url, "theirs")
        rows = listed(url)
        assert {(each["namespace"], each["name"], each["pid"]) for each in rows} == {
            (None, "ours", os.getpid()),
            (None, "theirs", child.pid),
            ("agent", None, os.getpid()),
        }
        assert [each["entity_id"] for each in rows if each["namespace"]] == [-7]
        child.kill()
        assert "theirs" not in {each["name"] for each in listed(url)}


def test_an_empty_list_says_so_beside_the_data(either: str) -> None:
    done = invoke(*at(either, "locks"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no lock is held\n")
    assert listed(either) == []


def test_narrow_terminals_pipes_and_no_color_read_well(postgres_url: str) -> None:
    with holdfast.Client(postgres_url) as client, foreign(postgres_url, "select 1", "a\nb[red]\x1b[2J") as (theirs, _):
        client.lock(LONG).acquire()
        theirs.execute("select pg_advisory_lock(1, 2)")
        named(postgres_url, LONG)
        narrow = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(*at(postgres_url, "locks"), columns=40))
        assert max(map(len, narrow.splitlines())) <= 40
        assert len(narrow.splitlines()) == 3
        assert LONG in on_terminal(*at(postgres_url, "locks", "--wide"), columns=40)
        piped = ask(*at(postgres_url, "locks"))
        assert len(piped.splitlines()) == 3
        assert "\x1b" not in piped
        assert "\x1b[1m" in on_terminal(*at(postgres_url, "locks"), columns=200)
        plain = on_terminal(*at(postgres_url, "locks"), columns=200, NO_COLOR="1")
        assert set(re.findall(r"\x1b\[([0-9;]*)m", plain)) <= {"0", "1"}


def test_watch_in_a_pipe_prints_when_somebody_takes_or_frees_one(postgres_url: str) -> None:
    with Running(*at(postgres_url, "locks", "--watch", "--json", "--every", "0.1")) as running:
        running.until_it_says("[]\n")
        with foreign(postgres_url, "select pg_advisory_lock(1, 2)") as (_, pid):
            running.until_it_says(f'"pid": {pid}')
        eventually(lambda: running.text.endswith("[]\n") and running.text.count("[]\n") == 2, "it is free again")
        assert running.end(signal.SIGINT) == (0, "")
        assert [len(valid("locks", line)) for line in running.text.splitlines()] == [0, 1, 0]
    with (
        foreign(postgres_url, "select pg_advisory_lock(1, 2)"),
        Running(*at(postgres_url, "locks", "--watch", "--every", "0.1"), columns=120) as live,
    ):
        live.until_it_says("1 lock held at ")
        assert live.end(signal.SIGINT) == (0, "")


def test_watch_ends_with_whoever_reads_it(sqlite_url: str) -> None:
    """As ``| head -1``, although nothing happens any more that could be written."""
    command = [SCRIPT, *at(sqlite_url, "locks", "--watch", "--json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline() == b"[]\n"
        watching.stdout.close()
        try:
            assert watching.wait(PATIENCE) == 0
        finally:
            watching.kill()


def test_break_ends_the_session_frees_its_locks_and_is_recorded(postgres_url: str) -> None:
    with holdfast.Client(postgres_url) as client, foreign(postgres_url, "select pg_advisory_lock(8, 1)") as (_, pid):
        lost: list[Any] = []
        grant = client.lock("nightly import", on_lost=lost.append).acquire()
        named(postgres_url, "nightly import")
        [holder] = [each.pid for each in client.locks.list() if each.name == "nightly import"]
        output = ask(
            *at(postgres_url, "locks", "end", str(holder), "--reason", "its host [is] gone", "--actor", "jane")
        )
        assert f"ended session {holder}, which held nightly import; recorded: jane: its host [is] gone" in output
        eventually(lambda: lost, "its holder has learned")
        assert grant.lost
        assert [each.pid for each in client.locks.list()] == [pid], "nobody else's"
        ask(*at(postgres_url, "locks", "end", str(pid), "--reason", "again"))
        assert client.locks.list() == []
    me = f"{getpass.getuser()}@{socket.gethostname()}"
    assert audit(postgres_url) == [
        ("jane", "lock.end", f"session {holder}", "its host [is] gone", "done"),
        (me, "lock.end", f"session {pid}", "again", "done"),
    ]
    [(detail, role, fence), _] = query(
        postgres_url, "select detail, role, fence from holdfast.audit where action = 'lock.end' order by id"
    )
    assert detail["changes"] == [f"session {holder}, which holds nightly import, is ended"]
    assert (role, fence > 0) == ("postgres", True)


def test_break_ends_one_that_waits(postgres_url: str) -> None:
    with (
        foreign(postgres_url, "select pg_advisory_lock(1)") as (_, holder),
        foreign(postgres_url, "select pg_advisory_lock(2)") as (waits, waiter),
    ):
        waits.pgconn.send_query(b"select pg_advisory_lock(1)")
        with holdfast.Client(postgres_url) as client:
            eventually(lambda: any(not each.granted for each in client.locks.list()), "it waits")
        output = ask(*at(postgres_url, "locks", "end", str(waiter), "--reason", "stuck"))
        assert f"ended session {waiter}, which held 2 and waited for 1;" in output
        assert holder in {each["pid"] for each in listed(postgres_url)}


def test_break_of_a_session_without_a_lock_is_refused_and_recorded(postgres_url: str) -> None:
    """Whatever else it locks, and whatever it locks in another database."""
    with (
        foreign(postgres_url, "begin; lock table holdfast.audit in access share mode") as (connection, pid),
        foreign(server().database(), "select pg_advisory_lock(1)") as (_, elsewhere),
    ):
        for number in (pid, elsewhere, 2**31 - 1):
            done = invoke(*at(postgres_url, "locks", "end", str(number), "--reason", "x"))
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr == (
                f"holdfast: session {number} was not ended: it neither holds nor waits for an advisory lock "
                "in this database\n"
            )
        assert connection.execute("select 1").fetchone() == (1,)
    assert [outcome.partition(":")[0] for *_, outcome in audit(postgres_url)] == ["refused"] * 3


def test_break_needs_the_servers_leave(postgres_url: str) -> None:
    """Whoever may use locks may not therefore end others' sessions."""
    name = f"role_{uuid4().hex[:12]}"
    for statement in ("create role {} login", "grant usage on schema holdfast to {}",
                      "grant execute on all functions in schema holdfast to {}"):  # fmt: skip
        query(postgres_url, statement.format(name))
    url = postgres_url.replace("//postgres@", f"//{name}@")
    with foreign(postgres_url, "select pg_advisory_lock(1, 2)") as (connection, pid):
        [row] = listed(url)
        assert (row["pid"], row["state"]) == (pid, None), "of another role's session the server tells little"
        done = call(*at(url, "locks", "end", str(pid), "--reason", "x", "--actor", "jane"))
        assert done.returncode == 1
        assert f"session {pid} was not ended: permission denied" in done.stderr
        assert connection.execute("select 1").fetchone() == (1,)
    [(actor, _, _, _, outcome)] = audit(postgres_url)
    assert (actor, outcome.partition(":")[0]) == ("jane", "refused")
    assert query(postgres_url, "select distinct role from holdfast.audit") == [(name,)]


def test_break_on_sqlite_is_refused_in_clear_words_and_recorded(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.lock("x").acquire()
        done = call(*at(sqlite_url, "locks", "end", str(os.getpid()), "--reason", "x", "--actor", "me"))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.endswith("was not ended: on SQLite a lock is its process's: end that\n")
    [(actor, *_, outcome)] = audit(sqlite_url)
    assert (actor, outcome.partition(":")[0]) == ("me", "refused")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("end",), "Missing argument 'PID'"),
        (("end", "7"), "Missing option '--reason'"),
        (("end", "x", "--reason", "y"), "not a valid integer"),
        (("end", "0", "--reason", "y"), "not in the range"),
        (("end", "7", "--reason", ""), "reason must have"),
        (("end", "7", "--reason", "y", "--actor", "a\nb"), "actor must not contain control"),
        (("mend",), "No such command"),
        (("--every", "0"), "not in the range"),
    ],
)
def test_wrong_arguments_are_explained_and_nothing_is_done(
    sqlite_url: str, arguments: tuple[str, ...], wanted: str
) -> None:
    done = invoke(*at(sqlite_url, "locks", *arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert wanted in done.stderr


async def test_the_same_on_an_event_loop(either: str) -> None:
    async with holdfast.AsyncClient(either) as client:
        async with client.lock(("agent", 7)):
            [record] = await client.locks.list()
            assert (record.namespace, record.entity_id, record.label) == ("agent", 7, "(agent, 7)")
        assert await client.locks.list() == []
        with pytest.raises(holdfast.EngineError, match="was not ended"):
            await client.locks.end_session(1, actor="me", reason="none")
        for pid in (0, -1, 2**31):
            with pytest.raises(ValueError, match="pid must be from 1"):
                await client.locks.end_session(pid, actor="me", reason="none")
        assert json.dumps([each[-1] for each in audit(either)]).count("refused") == 1
