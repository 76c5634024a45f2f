"""A transaction protected by a lease: committed by its holder, refused to whoever held it before. On every driver."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast import EngineError, FencedOut
from tests import user_connections
from tests.children import eventually
from tests.user_connections import Subject, ask, entered, settled, shared_postgres

ON_POSTGRES = [*user_connections.POSTGRES, *user_connections.ALCHEMY]
ON_SQLITE = [*user_connections.SQLITE, *user_connections.ALCHEMY_SQLITE]
AT = ("start", "commit")
SIDE = pytest.mark.parametrize(
    "subject",
    ["psycopg", "connection-pg8000", "session-asyncpg-async", "sqlite3", "sqlite3-manual"],
    indirect=True,
)
"""Kinds for what the user does beside the promise itself: of each way to end a transaction, one."""


@pytest.fixture(params=ON_POSTGRES + ON_SQLITE)
async def subject(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    on_postgres = request.param in ON_POSTGRES
    url = shared_postgres() if on_postgres else f"sqlite:///{tmp_path / 'app.db'}"
    async with user_connections.subject(request.param, url) as made:
        yield made
        await made.rollback()


@pytest.fixture(params=ON_POSTGRES)
async def on_postgres(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """Where a successor can come in between. On SQLite the protected transaction is the only writer until it ends."""
    async with user_connections.subject(request.param, shared_postgres()) as made:
        yield made
        await made.rollback()


def at_rest(subject: Subject) -> bool:
    return not subject.on_postgres or ask(subject.url, "select count(*) from holdfast.commit_check") == [(0,)]


async def test_the_holder_commits_a_transaction_opened_for_it(subject: Subject) -> None:
    for number, at in enumerate(AT, 1):
        grant = await subject.acquire()
        async with entered(grant.transaction(subject.connection, at=at)) as connection:
            assert connection is subject.connection
            await subject.write("done")
        assert subject.rows() == ["done"] * number
        assert at_rest(subject)
        assert await settled(grant.release())
    await commits_its_own(subject, 2)


def has_one_traceback(refusal: FencedOut) -> None:
    """And it shows the public name."""
    text = "".join(traceback.format_exception(refusal))
    assert text.count("Traceback (most recent call last)") == 1, text
    assert text.splitlines()[-1].startswith("holdfast.FencedOut: ") or "\nholdfast.FencedOut: " in text, text


async def commits_its_own(subject: Subject, before: int) -> None:
    """A transaction that the user begins and commits. Protecting it returns the fence."""
    grant = await subject.acquire()
    for number, at in enumerate(AT, before):
        await subject.begin()
        assert await settled(grant.protect(subject.connection, at=at)) == grant.fence
        await subject.write("done")
        assert subject.rows() == ["done"] * number
        await subject.commit()
        assert subject.rows() == ["done"] * (number + 1)
        assert at_rest(subject)


async def test_a_superseded_holder_is_refused_when_it_begins(subject: Subject) -> None:
    """And its connection is as good as before, once it has rolled back."""
    grant = await subject.acquire()
    assert subject.supersede().fence > grant.fence
    for number, at in enumerate(AT, 1):
        with pytest.raises(FencedOut, match=subject.name) as refused:
            await subject.write_within(grant, at, "stale")
        has_one_traceback(refused.value)
        await subject.begin()
        with pytest.raises(FencedOut):
            await settled(grant.protect(subject.connection, at=at))
        await subject.rollback()
        await subject.begin()
        await subject.write("unprotected")
        await subject.commit()
        assert subject.rows() == ["unprotected"] * number


@pytest.mark.parametrize("subject", ["psycopg", "session-asyncpg-async", "sqlite3", "sqlite3-async"], indirect=True)
async def test_a_holder_whose_time_is_over_is_refused_although_nobody_has_taken_over(subject: Subject) -> None:
    grant = await subject.acquire(ttl=0.05, auto_renew=False)
    eventually(lambda: subject.other.leases.get(subject.name) is None, "the TTL has passed")
    for at in AT:
        with pytest.raises(FencedOut):
            await settled(grant.protect(subject.connection, at=at))
        await subject.rollback()


@SIDE
async def test_an_error_in_the_block_rolls_back_and_stays_the_error_it_was(subject: Subject) -> None:
    grant = await subject.acquire()
    for number, at in enumerate(AT):
        with pytest.raises(KeyError, match="mine"):
            await subject.write_within(grant, at, "never", lambda: dict[str, int]()["mine"])
        assert subject.rows() == ["next"] * number
        assert at_rest(subject)
        await subject.write_within(grant, at, "next")
        assert subject.rows() == ["next"] * (number + 1)


async def test_a_superseded_holder_is_refused_by_its_own_commit(on_postgres: Subject) -> None:
    """The commit is the user's; holdfast is not on the stack, and FencedOut comes out of it all the same. Then that at
    the end of a block, which is holdfast's."""
    subject = on_postgres
    grant = await subject.acquire()
    await subject.begin()
    await settled(grant.protect(subject.connection, at="commit"))
    await subject.write("stale")
    successor = subject.supersede()
    with pytest.raises(FencedOut, match=subject.name):
        await subject.commit()
    await subject.rollback()
    assert successor.release()
    grant = await subject.acquire()
    with pytest.raises(FencedOut, match=subject.name) as refused:
        await subject.write_within(grant, "commit", "stale", subject.supersede)
    has_one_traceback(refused.value)
    assert subject.rows() == []
    assert at_rest(subject)


@pytest.mark.parametrize("subject", ["psycopg", "sqlite3"], indirect=True)
async def test_without_protection_the_stale_write_goes_through(subject: Subject) -> None:
    """What all of this is for: nothing else stops it."""
    await subject.acquire()
    if subject.on_postgres:
        await subject.begin()
        await subject.write("stale")
        subject.supersede()
    else:
        subject.supersede()
        await subject.begin()
        await subject.write("stale")
    await subject.commit()
    assert subject.rows() == ["stale"]


@SIDE
async def test_a_rolled_back_transaction_leaves_nothing(subject: Subject) -> None:
    """Tables the user made in it included; and the lease is free to go at once."""
    for at in AT:
        grant = await subject.acquire()
        await subject.begin()
        await settled(grant.protect(subject.connection, at=at))
        await subject.run(f"create table {subject.table}_more (what text)")
        await subject.rollback()
        assert at_rest(subject)
        with pytest.raises(Exception, match="_more"):
            ask(subject.url, f"select * from {subject.table}_more")
        assert await settled(grant.release())
        with subject.other.lease(subject.name) as heir:
            assert heir.fence > grant.fence


@SIDE
async def test_an_open_transaction_is_not_opened_again(subject: Subject) -> None:
    if getattr(subject.connection, "autocommit", None) is False and not subject.on_postgres:
        pytest.skip("this connection always has one open, and nobody can tell whether it has written")
    grant = await subject.acquire()
    await subject.begin()
    await subject.write("first")
    for at in AT:
        with pytest.raises(ValueError, match=r"already open.*grant\.protect"):
            async with entered(grant.transaction(subject.connection, at=at)):
                raise AssertionError
    await subject.commit()
    assert subject.rows() == ["first"]


@pytest.mark.parametrize("subject", ["psycopg", "sqlite3-async"], indirect=True)
async def test_only_two_forms_are_known(subject: Subject) -> None:
    grant = await subject.acquire()
    with pytest.raises(ValueError, match="'start' or 'commit', not 'never'"):
        await settled(grant.protect(subject.connection, at="never"))
    with pytest.raises(ValueError, match="'start' or 'commit', not 'never'"):
        async with entered(grant.transaction(subject.connection, at="never")):
            raise AssertionError


@pytest.mark.parametrize("on_postgres", ["psycopg-async", "session-asyncpg-async"], indirect=True)
async def test_a_failed_transaction_is_told_as_such(on_postgres: Subject) -> None:
    """Not as a lease that has passed on: it has not."""
    subject = on_postgres
    grant = await subject.acquire()
    with pytest.raises(Exception, match="division"):
        await subject.run("select 1 / 0")
    with pytest.raises(EngineError, match=subject.name) as caught:
        await settled(grant.protect(subject.connection))
    assert not isinstance(caught.value, FencedOut)
    assert caught.value.__cause__ is not None
