"""What every engine promises of taking a lease and giving it back: the half of the contract about who gets it."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import holdfast
from holdfast.testing.lease_stage import LONG, SHORT, Connect, refused_after_waiting, waiting


class TakingContract:
    """Acquire, be refused, skip, wait in line, release."""

    def rows(self, url: str, client: Any) -> dict[str, list[Any]]:
        """Everything stored, by table; ``lease`` (and ``beat``, if there is one) must be empty at rest."""
        return {"lease": client.leases.list(), "history": client.leases.history()}

    def test_a_grant_says_what_it_is(self, connect: Connect, url: str) -> None:
        grant = connect(url).lease("import", ttl=LONG, holder="worker-1").acquire()
        assert (grant.name, grant.holder, grant.lost) == ("import", "worker-1", False)
        assert isinstance(grant.token, str)
        assert isinstance(grant.fence, int)
        assert 0 < grant.remaining() <= LONG
        assert grant.check() is None
        assert grant.token not in repr(grant)

    def test_the_loser_is_told_who_has_it_and_until_when(self, connect: Connect, url: str) -> None:
        connect(url).lease("import", ttl=LONG, holder="worker-1").acquire()
        before = datetime.now(UTC)
        with pytest.raises(holdfast.NotAcquired) as refused:
            connect(url).lease("import", ttl=LONG).acquire()
        error = refused.value
        assert (error.name, error.holder) == ("import", "worker-1")
        assert before < error.expires_at <= datetime.now(UTC) + timedelta(seconds=LONG)  # type: ignore[operator]
        assert not isinstance(error, TimeoutError), "it did not wait"
        for told in ("'import'", "worker-1", f"{error.expires_at:%Y-%m-%d %H:%M:%S}"):
            assert told in str(error)

    def test_a_refused_acquire_writes_nothing(self, connect: Connect, url: str) -> None:
        holder, loser = connect(url), connect(url)
        holder.lease("import", ttl=LONG).acquire()
        assert loser.lease("import", ttl=LONG).try_acquire() is None
        before = self.rows(url, holder)
        for _ in range(3):
            assert loser.lease("import", ttl=LONG).try_acquire() is None
        assert loser.lease("import", ttl=LONG, auto_renew=False, at_least=5).try_acquire() is None
        assert self.rows(url, holder) == before

    def test_try_acquire_answers_none_when_somebody_has_it(self, connect: Connect, url: str) -> None:
        first, second = connect(url), connect(url)
        grant = first.lease("import", ttl=LONG).try_acquire()
        assert grant is not None
        assert second.lease("import", ttl=LONG).try_acquire() is None
        assert grant.release() is True
        assert second.lease("import", ttl=LONG).try_acquire() is not None

    def test_or_skip_runs_the_block_either_way(self, connect: Connect, url: str) -> None:
        first, second = connect(url), connect(url)
        with first.lease("import", ttl=LONG).or_skip() as grant:
            assert grant is not None
            with second.lease("import", ttl=LONG).or_skip() as nothing:
                assert nothing is None
            assert second.leases.get("import").fence == grant.fence, "skipping took nothing away"
        assert first.leases.get("import") is None

    def test_with_holds_it_for_the_block(self, connect: Connect, url: str) -> None:
        client = connect(url)
        with client.lease("import", ttl=LONG) as grant:
            assert client.leases.get("import").fence == grant.fence
        assert client.leases.get("import") is None
        assert grant.lost
        with pytest.raises(holdfast.LeaseLost):
            grant.check()

    def test_with_raises_when_somebody_has_it(self, connect: Connect, url: str) -> None:
        connect(url).lease("import", ttl=LONG).acquire()
        entered = False
        with pytest.raises(holdfast.NotAcquired), connect(url).lease("import", ttl=LONG):
            entered = True
        assert not entered

    def test_an_exception_in_the_block_releases_and_propagates(self, connect: Connect, url: str) -> None:
        client, problem = connect(url), LookupError("no such order")
        with pytest.raises(LookupError) as raised, client.lease("import", ttl=LONG):
            raise problem
        assert raised.value is problem
        assert client.leases.get("import") is None

    def test_the_decorator_holds_it_for_each_call(self, connect: Connect, url: str) -> None:
        client, other = connect(url), connect(url)
        calls = []

        @client.lease("import", ttl=LONG)  # type: ignore[untyped-decorator]
        def load(rows: int, *, dry: bool) -> int:
            calls.append((rows, dry))
            return rows * 2

        assert [load(1, dry=True), load(2, dry=False)] == [2, 4]
        assert client.leases.list() == []
        with other.lease("import", ttl=LONG), pytest.raises(holdfast.NotAcquired):
            load(3, dry=False)
        assert calls == [(1, True), (2, False)]

    def test_waiting_ends_with_acquire_timeout(self, connect: Connect, url: str) -> None:
        grant = connect(url).lease("import", ttl=LONG, holder="worker-1").acquire()
        other = connect(url)
        refused = refused_after_waiting(lambda: other.lease("import", ttl=LONG).acquire(timeout=0.1))
        assert isinstance(refused, TimeoutError)
        assert isinstance(refused, holdfast.NotAcquired)
        assert (refused.name, refused.holder) == ("import", "worker-1")
        assert "waited 0.1 s" in str(refused)
        assert not grant.lost
        assert refused_after_waiting(lambda: other.lease("import", ttl=LONG, timeout=0.1).__enter__()).name == "import"

    def test_a_waiter_gets_it_when_another_client_releases(self, connect: Connect, url: str) -> None:
        holder, waiter = connect(url), connect(url)
        grant = holder.lease("import", ttl=LONG).acquire()
        with waiting(lambda: waiter.lease("import", ttl=LONG).acquire(timeout=LONG)) as won:
            assert grant.release() is True
        assert won[0].fence > grant.fence

    def test_a_waiter_gets_it_when_the_holder_stops_renewing(self, connect: Connect, url: str) -> None:
        dead = connect(url).lease("import", ttl=SHORT, auto_renew=False).acquire()
        heir = connect(url).lease("import", ttl=LONG).acquire(timeout=LONG)
        assert heir.fence > dead.fence
        assert dead.lost

    def test_every_one_of_several_waiters_gets_its_turn(self, connect: Connect, url: str) -> None:
        client = connect(url)
        turns: list[int] = []

        def take_a_turn() -> None:
            with connect(url).lease("import", ttl=LONG, timeout=LONG) as grant:
                turns.append(grant.fence)

        with client.lease("import", ttl=LONG) as grant:
            threads = [threading.Thread(target=take_a_turn) for _ in range(3)]
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join(LONG)
        assert len(turns) == 3
        assert [grant.fence, *turns] == sorted({grant.fence, *turns})

    def test_a_second_release_is_harmless(self, connect: Connect, url: str) -> None:
        client, other = connect(url), connect(url)
        grant = client.lease("import", ttl=LONG).acquire()
        assert [grant.release(), grant.release()] == [True, False]
        heir = other.lease("import", ttl=LONG).acquire()
        assert grant.release() is False
        assert other.leases.get("import").fence == heir.fence

    def test_a_stale_release_takes_nothing_from_the_next_holder(self, connect: Connect, url: str) -> None:
        stale = connect(url).lease("import", ttl=SHORT, auto_renew=False).acquire()
        other = connect(url)
        heir = other.lease("import", ttl=LONG).acquire(timeout=LONG)
        assert stale.release() is False
        assert not heir.lost
        assert other.leases.get("import").fence == heir.fence
