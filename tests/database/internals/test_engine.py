"""What went wrong is told as it was: what may have happened, why, and once. And a failure costs nothing for ever."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

import holdfast
from holdfast.runtime.clock import now
from holdfast.testing import Proxy
from tests.children import NONE, PATIENCE, Child, eventually, query, rows
from tests.pairs import EACH_ONCE

Connect = Callable[..., Any]


def test_an_acquire_that_may_have_happened_is_given_back_although_the_second_try_is_refused(
    connect: Connect, postgres_url: str
) -> None:
    """The answer to the first is lost with the connection; the second meets a full disk. Taken for "certainly not
    granted", the lease would be renewed together with the others of the process, and nobody would know of it."""
    told: list[BaseException] = []

    def acquire() -> None:
        try:
            client.lease("ghost", ttl=60).acquire()
        except holdfast.HoldfastError as error:
            told.append(error)

    with Proxy(postgres_url) as link:
        client = connect(link.url)
        anchor = client.lease("anchor", ttl=60).acquire()
        link.stall("to_client")
        thread = threading.Thread(target=acquire)
        thread.start()
        eventually(lambda: rows(postgres_url)["lease"] == 2, "it is granted, and not yet answered")
        query(
            postgres_url,
            """create function disk_full() returns trigger language plpgsql as
               $$ begin raise exception 'could not extend file' using errcode = '53100'; end $$""",
        )
        query(
            postgres_url,
            "create trigger disk_full before update on holdfast.lease for each row execute function disk_full()",
        )
        link.cut()
        link.heal()
        thread.join(PATIENCE)
        [error] = told
        assert isinstance(error, holdfast.EngineError)
        assert "could not extend file" in f"{error} {error.__cause__}"
        eventually(
            lambda: query(postgres_url, "select name from holdfast.lease") == [("anchor",)], "the keeper gives it back"
        )
        anchor.check()
        query(postgres_url, "drop trigger disk_full on holdfast.lease")
        client.close()


def test_an_acquire_that_is_still_under_way_is_ended_before_the_second_try(postgres_url: str) -> None:
    """The first is lost with its connection in the midst of its COMMIT, where it would keep the second away, and be
    granted after that: nobody could have the lease while this process lives."""
    query(
        postgres_url,
        """create function held_up() returns trigger language plpgsql as
           $$ begin perform pg_advisory_xact_lock(4711); return null; end $$""",
    )
    query(
        postgres_url,
        """create constraint trigger held_up after insert on holdfast.lease deferrable initially deferred
           for each row when (new.name = 'ghost') execute function held_up()""",
    )
    got: list[Any] = []
    history = "select outcome from holdfast.history where name = 'ghost'"
    with psycopg.connect(postgres_url) as gate, Proxy(postgres_url) as link, holdfast.Client(link.url) as client:
        gate.execute("select pg_advisory_xact_lock(4711)")
        anchor = client.lease("anchor", ttl=60).acquire()
        thread = threading.Thread(target=lambda: got.append(client.lease("ghost", ttl=60).try_acquire()))
        thread.start()
        waiting = "select pid from pg_locks where locktype = 'advisory' and objid = 4711 and not granted"
        eventually(lambda: query(postgres_url, waiting), "it is in its COMMIT")
        first = query(postgres_url, waiting)
        link.cut()
        eventually(
            lambda: query(postgres_url, waiting) not in ([], first), "the second one is, and the first has ended"
        )
        gate.rollback()
        thread.join(PATIENCE)
        assert got[0].release()
        assert query(postgres_url, history) == [("released",)]
        anchor.check()


def test_a_release_whose_answer_was_lost_is_told_as_one(connect: Connect, postgres_url: str) -> None:
    """The second time there is nothing left to release, because the first time it was."""
    with Proxy(postgres_url) as link:
        client = connect(link.url)
        client.lease("before").acquire().release()  # so that the statement is known to the session
        grant = client.lease("a").acquire()
        link.stall("to_client")
        with ThreadPoolExecutor(1) as pool:
            releasing = pool.submit(grant.release)
            eventually(lambda: rows(postgres_url)["lease"] == 0, "it is released, and that is not yet answered")
            link.cut()
            link.heal()
            assert releasing.result(PATIENCE) is True
        assert grant.release() is False
        client.close()


def test_whoever_waits_for_a_second_does_not_wait_for_ten_because_the_database_is_silent(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls are given no more than its own limit, where others are given ten seconds, or here an hour."""
    monkeypatch.setattr("holdfast.lease.handle.CALL_TIMEOUT", 3600.0)
    with Proxy(postgres_url) as link, holdfast.Client(link.url) as client:
        assert client.leases.list() == []
        link.stall()
        with ThreadPoolExecutor(1) as pool:
            try:
                problem = pool.submit(client.lease("a").acquire, timeout=0.5).exception(PATIENCE)
            finally:
                link.heal()
        assert isinstance(problem, holdfast.EngineError)
        assert "did not answer in time" in str(problem)


def root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def test_an_engine_error_has_the_drivers_error_as_its_cause(
    connect: Connect, postgres_url: str, tmp_path: Path
) -> None:
    role = f"role_{uuid4().hex[:12]}"
    query(postgres_url, f"create role {role} login")
    (tmp_path / "letter.txt").write_text("Dear database, " * 100)
    for url, cause in (
        ("postgresql://nobody@127.0.0.1:1/app", psycopg.OperationalError),
        (f"{postgres_url}_not", psycopg.OperationalError),
        (postgres_url.replace("//postgres@", f"//{role}@"), psycopg.errors.InsufficientPrivilege),
        (f"sqlite:///{tmp_path}/letter.txt", sqlite3.DatabaseError),
    ):
        with pytest.raises(holdfast.EngineError) as raised:
            connect(url).leases.list()
        assert isinstance(root(raised.value), cause), url


def test_a_role_without_rights_is_told_what_it_needs_once(connect: Connect, postgres_url: str) -> None:
    role = f"role_{uuid4().hex[:12]}"
    query(postgres_url, f"create role {role} login")
    client = connect(postgres_url.replace("//postgres@", f"//{role}@"))
    for call in (client.leases.list, client.lease("a").acquire):
        with pytest.raises(holdfast.EngineError, match="GRANT USAGE") as raised:
            call()
        assert str(raised.value).count("The role needs") == 1


def test_a_lease_lost_to_refused_heartbeats_says_why(
    connect: Connect, postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The database did answer: that the function is not there. The keeper's clock moves on when it has heard that."""
    passed = [0.0]
    monkeypatch.setattr("holdfast.lease.keeper.now", lambda: now() + passed[0])
    client = connect(postgres_url)
    grant = client.lease("a", ttl=600, renew_every=0.1).acquire()
    query(postgres_url, "alter function holdfast.beat_renew(uuid) rename to gone")
    eventually(lambda: "a heartbeat to" in caplog.text, "a heartbeat is refused")
    assert not grant.lost
    passed[0] = 600.0
    eventually(lambda: grant.lost, "trust ends")
    with pytest.raises(holdfast.OwnershipUnknown) as raised:
        grant.check()
    assert "beat_renew" in f"{raised.value} {raised.value.__cause__}"
    query(postgres_url, "alter function holdfast.gone(uuid) rename to beat_renew")


@EACH_ONCE
def test_what_check_raises_is_fresh_each_time(connect: Connect, either: str) -> None:
    """One that is kept grows with each time it is raised, and keeps alive whatever the frames in it hold."""
    grant = connect(either).lease("a").acquire()
    grant.release()
    depths = []
    for _ in range(20):
        with pytest.raises(holdfast.LeaseLost, match="'a' was released") as raised:
            grant.check()
        depths.append(len(raised.traceback))
    assert depths[-1] == depths[0]


def test_a_keeper_that_could_not_start_starts_with_the_next_lease(either: str) -> None:
    """The limit of processes is reached once: the next lease must not be one that nobody renews."""
    program = """
    import sys, threading, time, holdfast
    client, start = holdfast.Client(sys.argv[1]), threading.Thread.start
    def fail(self):
        if self.name != "holdfast-background":
            return start(self)
        threading.Thread.start = start
        raise RuntimeError("can't start new thread")
    threading.Thread.start = fail
    try:
        client.lease("a", ttl=1).acquire()
    except RuntimeError as error:
        print(error)
    grant = client.lease("b", ttl=60, renew_every=0.1).acquire()
    begun = grant._trusted_until
    while grant._trusted_until < begun + 0.3:  # only heartbeats move the end of trust
        grant.check()
        time.sleep(0.01)
    grant.renew()
    print("kept")
    client.close()
    """
    with Child(program, either) as child:
        child.expect("can't start new thread", "kept")
        assert child.wait() == 0
    eventually(lambda: rows(either) == NONE, "the one that was not kept is gone, too")


def open_files(folder: Path) -> list[str]:
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(each.readlink()).startswith(str(folder)):
                found.append(str(each.readlink()))
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_file_that_cannot_be_opened_is_closed_again(connect: Connect, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear database, " * 100)
    client = connect(f"sqlite:///{tmp_path}/letter.txt")
    for _ in range(5):
        with pytest.raises(holdfast.EngineError, match="not a database") as raised:
            client.leases.list()
        assert "Does the folder exist" not in str(raised.value), "it does"
    assert open_files(tmp_path) == []
    good = connect(f"sqlite:///{tmp_path}/app.db")
    good.leases.list()
    assert open_files(tmp_path) != []
    good.close()
    eventually(lambda: open_files(tmp_path) == [], "and so is one that could")


def test_an_sqlite_url_with_options_is_refused(connect: Connect, tmp_path: Path) -> None:
    """Left out without a word, ``mode=ro`` would write."""
    with pytest.raises(ValueError, match="mode=ro"):
        connect(f"sqlite:///{tmp_path}/app.db?mode=ro")


@EACH_ONCE
def test_a_listing_tells_which_process_holds_a_lease(connect: Connect, either: str) -> None:
    client = connect(either)
    client.lease("a").acquire()
    [record] = client.leases.list()
    assert record.info["label"]
    assert record.info["started"]
    assert record.info["ttl"] == 30
