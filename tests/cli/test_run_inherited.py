"""holdfast.inherited: a Python program under `holdfast run` protects its own transactions with the lease of the run."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

import holdfast
from tests.children import query
from tests.cli.runs import Run

BEGIN = """
import time
later, clock = 0.0, time.clock_gettime
time.clock_gettime = lambda which: clock(which) + later  # before holdfast takes it for the clock of its trust
import asyncio, json, os, sys, holdfast
url = os.environ["HOLDFAST_URL"]
def say(*what): print(*what, flush=True)
"""
SYNC = (
    BEGIN
    + """
import sqlite3
connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
with holdfast.Client() as client:
    grant = holdfast.inherited(client)
    say(json.dumps([os.getpid(), grant.name, grant.fence]))
    for value in sys.stdin:
        later = 600.0 if int(value) > 1 else 0.0
        try:
            with grant.transaction(connection):
                connection.execute(f"insert into effect values ({value})")
            say("done", grant.lost)
        except holdfast.FencedOut:
            say("fenced out")
"""
)
ASYNC = (
    BEGIN
    + """
async def main():
    global later
    import psycopg
    connecting = psycopg.AsyncConnection.connect(url, autocommit=True)
    async with holdfast.AsyncClient() as client, await connecting as connection:
        grant = await holdfast.inherited(client)
        say(json.dumps([os.getpid(), grant.name, grant.fence]))
        for value in sys.stdin:
            later = 600.0 if int(value) > 1 else 0.0
            try:
                async with grant.transaction(connection):
                    await connection.execute(f"insert into effect values ({value})")
                say("done", grant.lost)
            except holdfast.FencedOut:
                say("fenced out")
asyncio.run(main())
"""
)


@pytest.mark.parametrize(
    ("engine", "program"),
    [("sqlite", SYNC), ("postgres", ASYNC)],
    ids=["sqlite", "postgres-async"],
)
def test_a_python_command_protects_its_own_transactions(
    request: pytest.FixtureRequest, engine: str, program: str
) -> None:
    """They commit for as long as the run renews the lease, also when the trust that was inherited is over (the
    program's clock is ten minutes ahead from its second transaction on); and they are refused when the lease was taken
    away, with holdfast stopped so that nothing else ends the program. The schema is another one than by default, and
    the program need not know it."""
    url = request.getfixturevalue(f"{engine}_url")
    options, command = ("--schema", "tenant_a", "--ttl", "600"), (sys.executable, "-c", program)
    with holdfast.Client(url, schema="tenant_a") as client:
        client.migrate()
    with holdfast.Client(url, schema="tenant_a") as client, Run(url, *options, command=command) as run:
        query(url, "create table effect (value int)")
        pid, *known = json.loads(run.line())
        run.family.append(pid)
        lease = client.leases.get("job")
        assert lease is not None
        assert known == ["job", lease.fence]
        run.say("1")
        assert run.line() == "done False"
        run.say("2")
        assert run.line() == "done True"
        os.kill(run.pid, signal.SIGSTOP)
        assert client.leases.force_release("job", actor="test", reason="test")
        run.say("3")
        assert run.line() == "fenced out"
    assert query(url, "select value from effect order by value") == [(1,), (2,)]


def test_outside_of_run_it_says_what_to_do(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    with holdfast.Client(sqlite_url) as client, pytest.raises(LookupError, match="holdfast run NAME -- "):
        holdfast.inherited(client)


def test_of_a_lease_that_has_passed_on_it_says_so(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with holdfast.Client(sqlite_url) as client:
        with client.lease("job") as grant:
            monkeypatch.setenv("HOLDFAST_LEASE", "job")
            monkeypatch.setenv("HOLDFAST_TOKEN", grant.token)
            assert holdfast.inherited(client).fence == grant.fence
        with pytest.raises(holdfast.LeaseLost, match="'job'"):
            holdfast.inherited(client)
