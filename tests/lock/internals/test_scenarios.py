"""What an application does with locks, scenario by scenario, on the database that it also works in."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.lock import executor, executor_async
from holdfast.lock.monitor import HolderLookup
from holdfast.runtime.clock import now
from tests.children import PATIENCE, backends, eventually, query
from tests.lock.looks import advisory, core, waiters

Connect = Callable[..., Any]
AGENT = ("agent", 7)


def test_blocking_acquisition_survives_all_commits_in_the_block_and_is_released_on_exit(
    connect: Connect, postgres_url: str
) -> None:
    client, other = connect(postgres_url), connect(postgres_url)
    with psycopg.connect(postgres_url) as mine:
        mine.execute("create table work (step int)")
        mine.commit()
        with client.lock(AGENT) as grant:
            [held] = advisory(postgres_url)
            for step in range(5):
                mine.execute("insert into work values (%s)", [step])
                mine.commit() if step % 2 else mine.rollback()
                assert other.lock(AGENT).try_acquire() is None
                assert advisory(postgres_url) == [held], "the same lock in the same session, none of it the user's"
            grant.check()
        assert advisory(postgres_url) == []
        assert mine.execute("select count(*) from work").fetchone() == (2,)


def test_the_age_of_a_lock_counts_from_its_grant_however_long_connecting_took(
    connect: Connect, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers 100 s later, by the clock that the client uses."""
    answers, late, real = threading.Event(), threading.Event(), executor_async.open_wire

    def open_late(*arguments: Any) -> Any:
        answers.wait(PATIENCE)
        return real(*arguments)

    monkeypatch.setattr(executor_async, "open_wire", open_late)
    for module in (executor, executor_async):
        monkeypatch.setattr(module, "now", lambda: now() + 100 * late.is_set())
    with ThreadPoolExecutor(1) as thread:
        asked_at = now()
        acquiring = thread.submit(connect(postgres_url).lock("a", timeout=None).acquire)
        eventually(lambda: [each for each in threading.enumerate() if each.name == "holdfast-connect"], "it connects")
        late.set()
        answers.set()
        grant = acquiring.result(PATIENCE)
    request = getattr(grant, "_inner", grant)._request
    assert request.since - asked_at >= 100


def test_requests_that_time_out_together_share_a_lookup_and_each_names_its_holder(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second lookup is for all requests that timed out during the first one."""
    looking, found, real = threading.Event(), threading.Event(), HolderLookup._holders
    lookups: list[list[Any]] = []

    def find(lookup: HolderLookup, keys: list[Any]) -> Any:
        lookups.append(keys)
        looking.set()
        found.wait(PATIENCE)
        return real(lookup, keys)

    def refusal(name: str, timeout: float = 0.05) -> str:
        """With a timeout that is long enough for the database to answer."""
        with pytest.raises(holdfast.AcquireTimeout) as refused:
            client.lock(name, timeout=timeout).acquire()
        return refusal(name, 2 * timeout) if "has not answered" in str(refused.value) else str(refused.value)

    monkeypatch.setattr(HolderLookup, "_holders", find)
    with (
        holdfast.Client(postgres_url) as holder,
        holdfast.Client(postgres_url) as client,
        ThreadPoolExecutor(7) as pool,
    ):
        for name in ("a", "b", "c"):
            holder.lock(name).acquire()
        refusals = [pool.submit(refusal, "a")]
        assert looking.wait(PATIENCE)
        refusals += [pool.submit(refusal, name) for name in "abcabc"]
        lookup: Any = client._locks._lookup  # type: ignore[union-attr]
        eventually(lambda: len(lookup._callers) == 7, "all have timed out")
        found.set()
        for refused in refusals:
            assert f":{os.getpid()}" in refused.result(PATIENCE)
    assert [len(keys) for keys in lookups] == [1, 3]


def test_a_lookup_that_fails_is_not_repeated_for_those_that_waited_for_it(
    either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, fails = threading.Event(), threading.Event()
    lookups = []

    def find(lookup: HolderLookup, keys: list[Any]) -> Any:
        lookups.append(keys)
        looking.set()
        fails.wait(PATIENCE)
        raise holdfast.Unanswered("frozen")

    monkeypatch.setattr(HolderLookup, "_holders", find)
    with holdfast.Client(either) as client, ThreadPoolExecutor(3) as pool:
        lookup = HolderLookup(client._engine)
        answers = [pool.submit(lookup.find, (b"1",))]
        assert looking.wait(PATIENCE)
        answers += [pool.submit(lookup.find, key) for key in ((b"1",), (b"2",))]
        eventually(lambda: len(lookup._next.keys) == 2, "two wait")
        fails.set()
        assert [answer.result(PATIENCE) for answer in answers] == [None, None, None]
    assert len(lookups) == 1


def test_timeout_raises_acquire_timeout_and_its_session_is_free_again(connect: Connect, postgres_url: str) -> None:
    holder, waiter = connect(postgres_url), connect(postgres_url)
    holder.lock("a").acquire()
    assert waiter.lock("a").try_acquire() is None
    for _ in range(3):
        with pytest.raises(holdfast.AcquireTimeout):
            waiter.lock("a").acquire(timeout=0.05)
    eventually(lambda: waiters(postgres_url) == [], "nobody stands in the server's line")
    assert len(advisory(postgres_url)) == 1
    holder.lock("b").acquire()
    with pytest.raises(holdfast.AcquireTimeout):
        waiter.lock("b").acquire(timeout=0.05)
    eventually(lambda: len(backends(postgres_url)) == 1, "only the session that holds is left")


@pytest.mark.parametrize("how", ["acquire", "with"])
def test_by_default_it_is_waited_for_fifteen_seconds(connect: Connect, either: str, how: str) -> None:
    holder, client = connect(either), connect(either)
    held = holder.lock("a").acquire()
    assert client.lock("a").try_acquire() is None
    requests: list[Any] = []

    def stands_in_line() -> bool:
        queued = (request for entry in list(core(client).pool.entries.values()) for request in [*entry.queue])
        requests.extend(request for request in queued if request.deadline)  # on a loop it gets one after it is queued
        return bool(requests)

    def wait() -> None:
        if how == "acquire":
            client.lock("a").acquire().release()
            return
        with client.lock("a"):
            pass

    with ThreadPoolExecutor(1) as pool:
        asked, waiting = now(), pool.submit(wait)
        eventually(lambda: stands_in_line() or waiting.done(), "it stands in line")
        assert asked + 15 <= requests[0].deadline <= now() + 15
        held.release()
        with suppress(holdfast.AcquireTimeout):  # the machine may pause for fifteen seconds
            waiting.result(PATIENCE)


def test_a_read_only_path_takes_no_lock(connect: Connect, postgres_url: str) -> None:
    """Making a handle asks nobody and opens nothing."""
    eventually(lambda: backends(postgres_url) == [], "whoever made the tables is gone")
    client = connect(postgres_url)
    lock = client.lock(AGENT)
    assert lock.name == AGENT
    assert (backends(postgres_url), advisory(postgres_url)) == ([], [])
    client.leases.list()
    assert advisory(postgres_url) == []


def test_an_idle_client_has_no_connection_and_one_lock_has_one(
    connect: Connect, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_async, "SWEEP", 0.1)
    client = connect(postgres_url)
    client.lock("a").acquire().release()
    eventually(lambda: backends(postgres_url) == [], "the session is closed when nobody needs it")
    grants = [client.lock(f"lock {number}").acquire() for number in range(20)]
    eventually(lambda: len(backends(postgres_url)) == 1, "all of them in one session")
    assert len({pid for *_, pid in advisory(postgres_url)}) == 1
    assert [grant.release() for grant in grants] == [True] * 20


def test_names_and_namespaces_are_for_everybody_to_see(connect: Connect, postgres_url: str) -> None:
    client, other = connect(postgres_url), connect(postgres_url)
    for number in range(20):
        client.lock(f"for an instant {number}").acquire().release()
    client.lock("import").acquire()
    client.lock(("agent", -7)).acquire()
    other.lock(("order", 7)).acquire()
    with psycopg.connect(postgres_url, autocommit=True) as database:

        def ask(sql: str) -> Any:
            row = database.execute(sql.encode()).fetchone()
            return None if row is None else row[0]

        agent, order = (ask(f"select holdfast.lock_namespace('{name}')") for name in ("agent", "order"))
        assert agent != order
        pairs = {row[:2] for row in advisory(postgres_url) if row[2] == 2}
        assert pairs == {(agent, 2**32 - 7), (order, 7)}
        assert ask("select pg_try_advisory_lock(holdfast.lock_key('import'))") is False, "psql computes the same key"
        eventually(lambda: ask("select name from holdfast.lock_name where key = holdfast.lock_key('import')"), "named")
        written = ask("select count(*) from holdfast.lock_name where name like 'for an instant%'")
        assert written < 10, "what is held at a look is written down, and nothing else"
    assert connect(postgres_url).lock(("agent", -7)).try_acquire() is None, "the number is stable"


def test_the_number_of_a_namespace_outlives_its_row(connect: Connect, postgres_url: str) -> None:
    """A failover or an older backup may take the row along, and whoever knows the number goes on with it."""
    knows, other = connect(postgres_url), connect(postgres_url)
    for name in ("order", "agent"):
        knows.lock((name, 7)).acquire()
    query(postgres_url, "delete from holdfast.lock_namespace")
    assert other.lock(AGENT).try_acquire() is None
    same = "update holdfast.lock_namespace set name = 'somebody else''s' where name = 'agent'"
    query(postgres_url, same)
    assert connect(postgres_url).lock(AGENT).try_acquire() is not None, "two names never share a number"


class Kind(str, Enum):  # noqa: UP042 - a StrEnum's str() is its text
    AGENT = "kind of agent"


class Number(int, Enum):
    SEVEN = 7


def test_a_member_of_an_enum_names_what_it_is_equal_to(connect: Connect, either: str) -> None:
    """Its str() is another text, and another process may spell the name out."""
    client = connect(either)
    with client.lock((Kind.AGENT, Number.SEVEN)):
        assert [(each.namespace, each.entity_id) for each in client.locks.list()] == [("kind of agent", 7)]
    with client.lease(Kind.AGENT):
        assert [each.name for each in client.leases.list()] == ["kind of agent"]


@pytest.mark.parametrize("options", [{"lock_sessions": 0}, {"lock_sessions": 1, "lock_overflow": 0}])
def test_limits_that_are_none(either: str, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="lock_"):
        holdfast.Client(either, **options)  # type: ignore[arg-type]


def test_a_database_without_our_tables_says_what_to_run(connect: Connect) -> None:
    from tests.conftest import server

    client = connect(server().database())
    for name in ("a", AGENT):
        with pytest.raises(holdfast.SchemaMismatch, match="holdfast migrate up"):
            client.lock(name).acquire()
