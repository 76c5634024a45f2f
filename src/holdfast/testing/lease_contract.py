"""What every engine promises of a lease, as tests. An engine is complete when they pass.

Subclass it in a test module, and define two fixtures: ``url``, an empty and migrated database, and ``connect``, which
creates clients on it and closes them at the end of the test.

    class TestLeaseOnMyEngine(LeaseContract):
        @pytest.fixture
        def url(self, tmp_path):
            return f"mine:///{tmp_path}/app.db"

        @pytest.fixture
        def connect(self):
            with contextlib.ExitStack() as clients:
                yield lambda url, **options: clients.enter_context(holdfast.Client(url, **options))

For an ``AsyncClient``, wrap it in ``holdfast.testing.sync_facade``. Override ``rows`` to let the tests read the tables
themselves; by default they see what the public listings show.

The tests use public names only. They assert order and outcome, never speed: they wait for a TTL only where its end is
what they test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

import holdfast
from holdfast.testing.server import until

Connect = Callable[..., Any]

LONG = 60.0
"""A TTL that does not end during a test, and the limit of every wait."""
SHORT = 0.25
"""A TTL whose end a test waits for."""
OUTLIVED = (0.5, 4.0, 20.0)
"""TTLs that a renewed lease must outlive. If the machine pauses for longer than one of them, the next is tried."""
SOON = 0.05
"""An interval of heartbeats short enough for a test to wait for one."""


def refused_after_waiting(acquire: Callable[[], Any]) -> holdfast.AcquireTimeout:
    """The AcquireTimeout of an ``acquire`` with a short timeout.

    Such an acquire gives the database one second to answer. If it does not, ``acquire`` is called again.
    """
    while True:
        try:
            grant = acquire()
        except holdfast.AcquireTimeout as error:
            return error
        except holdfast.EngineError:
            continue
        raise AssertionError(f"it was acquired: {grant}")


@contextmanager
def waiting(acquire: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run ``acquire`` in a thread during the block. Its result is in the list after the block."""
    results: list[Any] = []
    started = threading.Event()

    def run() -> None:
        started.set()
        results.append(acquire())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait()
    yield results
    thread.join(2 * LONG)
    assert results, "the waiter never acquired it"


class LeaseContract:
    """The lease, through public names."""

    def rows(self, url: str, client: Any) -> dict[str, list[Any]]:
        """All rows by table. ``lease`` (and ``beat``, if there is one) must be empty when no lease is held."""
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
        for part in ("'import'", "worker-1", f"{error.expires_at:%Y-%m-%d %H:%M:%S}"):
            assert part in str(error)

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
            assert second.leases.get("import").fence == grant.fence, "the skipped block released nothing"
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
        client, error = connect(url), LookupError("no such order")
        with pytest.raises(LookupError) as raised, client.lease("import", ttl=LONG):
            raise error
        assert raised.value is error
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

    def test_renewing_by_hand_outlives_the_ttl(self, connect: Connect, url: str) -> None:
        """A pause of the machine may lose the grant before it is renewed: then a longer TTL is tried."""
        client, other = connect(url), connect(url)
        for ttl in OUTLIVED:
            if self._outlives_its_ttl(client, other, ttl):
                return
        pytest.fail(f"a lease renewed by hand was lost with a TTL of {OUTLIVED[-1]:g} s")

    @staticmethod
    def _outlives_its_ttl(client: Any, other: Any, ttl: float) -> bool:
        name = f"import-{ttl}"
        grant = client.lease(name, ttl=ttl, auto_renew=False).acquire()
        renewals, acquired_at = 0, datetime.now(UTC)
        while datetime.now(UTC) < acquired_at + timedelta(seconds=1.2 * ttl):
            try:
                assert grant.renew() is True
            except (holdfast.LeaseLost, holdfast.OwnershipUnknown):
                return False
            assert grant.remaining() <= ttl
            if (heir := other.lease(name, ttl=LONG).try_acquire()) is not None:
                assert grant.lost, f"two holders: {grant} and {heir}"
                return False
            renewals += 1
            threading.Event().wait(0.05)
        return renewals > 1

    def test_an_expired_lease_cannot_be_renewed(self, connect: Connect, url: str) -> None:
        grant = connect(url).lease("import", ttl=SHORT, auto_renew=False).acquire()
        other = connect(url)
        until(lambda: other.leases.get("import") is None, what="the lease expires")
        assert grant.lost
        assert grant.remaining() == 0
        with pytest.raises((holdfast.LeaseLost, holdfast.OwnershipUnknown)):
            grant.renew()
        assert other.leases.get("import") is None

    def test_renewing_after_theft_raises_lease_lost(self, connect: Connect, url: str) -> None:
        grant = connect(url).lease("import", ttl=LONG, auto_renew=False).acquire()
        other = connect(url)
        other.leases.force_release("import", actor="operator", reason="stuck")
        heir = other.lease("import", ttl=LONG).acquire()
        with pytest.raises(holdfast.LeaseLost, match="'import'"):
            grant.renew()
        assert grant.lost
        assert other.leases.get("import").fence == heir.fence

    def test_an_active_lease_outlives_its_ttl_and_cannot_be_stolen(self, connect: Connect, url: str) -> None:
        """A pause of the machine may lose the grant before its heartbeat: then a longer TTL is tried."""
        client, other = connect(url), connect(url)
        for ttl in OUTLIVED:
            grant = client.lease(f"import-{ttl}", ttl=ttl).acquire()
            try:
                heir = other.lease(f"import-{ttl}", ttl=LONG).acquire(timeout=1.2 * ttl)
            except (holdfast.AcquireTimeout, holdfast.EngineError):
                if not grant.lost and grant.release():
                    return
            else:
                assert grant.lost, f"two holders: {grant} and {heir}"
        pytest.fail(f"a lease that its holder renews was lost with a TTL of {OUTLIVED[-1]:g} s")

    def test_the_same_explicit_holder_re_enters_with_its_secret(self, connect: Connect, url: str) -> None:
        first, second, secret = connect(url), connect(url), "a long random text"
        old = first.lease("import", ttl=LONG, holder="op-7", renew_every=SOON, reenter=secret).acquire()
        assert second.lease("import", ttl=LONG, holder="op-7").try_acquire() is None
        new = second.lease("import", ttl=LONG, holder="op-7", reenter=secret).acquire()
        assert new.token != old.token
        assert new.fence > old.fence
        until(lambda: old.lost, what="the heartbeat reports that the old grant is lost")
        with pytest.raises(holdfast.LeaseLost):
            old.check()
        assert old.release() is False
        new.check()
        assert second.leases.get("import").fence == new.fence

    def test_a_default_holder_does_not_re_enter(self, connect: Connect, url: str) -> None:
        client = connect(url)
        grant = client.lease("import", ttl=LONG).acquire()
        assert client.lease("import", ttl=LONG).try_acquire() is None
        grant.check()

    def test_at_least_keeps_it_after_an_early_release(self, connect: Connect, url: str) -> None:
        first, second = connect(url), connect(url)
        grant = first.lease("import", ttl=LONG, at_least=10 * LONG, holder="op-7").acquire()
        assert grant.release() is True
        assert grant.lost
        with pytest.raises(holdfast.NotAcquired) as refused:
            second.lease("import", ttl=LONG).acquire()
        assert refused.value.holder == "op-7"
        assert grant.release() is False

    def test_what_at_least_keeps_is_free_when_its_time_is_over(self, connect: Connect, url: str) -> None:
        first, second = connect(url), connect(url)
        grant = first.lease("import", ttl=LONG, at_least=SHORT, holder="op-7").acquire()
        assert grant.release() is True
        assert second.lease("import", ttl=LONG).acquire(timeout=LONG).fence > grant.fence

    def test_at_least_of_a_long_block_keeps_nothing(self, connect: Connect, url: str) -> None:
        client = connect(url)
        with client.lease("import", ttl=LONG, at_least=0.001):
            until(
                lambda: client.leases.get("import").acquired_at < datetime.now(UTC) - timedelta(seconds=0.01), what=""
            )
        assert client.leases.get("import") is None

    def test_adopt_makes_a_grant_of_a_token_handed_over(self, connect: Connect, url: str) -> None:
        grant = connect(url).lease("import", ttl=LONG, holder="parent").acquire()
        other = connect(url)
        adopted = other.lease("import").adopt(grant.token)
        assert (adopted.name, adopted.holder, adopted.fence) == ("import", "parent", grant.fence)
        assert 0 < adopted.remaining() <= LONG
        assert adopted.renew() is True
        assert adopted.release() is True
        assert other.leases.get("import") is None
        assert grant.release() is False

    def test_what_adopts_a_lease_and_releases_it_tells_whoever_keeps_it(self, connect: Connect, url: str) -> None:
        """Otherwise two would trust it: the process that renews it with its other leases, and the next holder."""
        grant = connect(url).lease("import", ttl=LONG, renew_every=SOON).acquire()
        connect(url).lease("import").adopt(grant.token).release()
        until(lambda: grant.lost, what="the holder knows")
        with pytest.raises(holdfast.LeaseLost):
            grant.check()

    def test_adopt_refuses_a_token_that_does_not_hold_it(self, connect: Connect, url: str) -> None:
        client = connect(url)
        grant = client.lease("import", ttl=LONG).acquire()
        foreign = str(uuid4())
        with pytest.raises(holdfast.LeaseLost) as refused:
            client.lease("import").adopt(foreign)
        assert foreign not in str(refused.value), "a token is a secret"
        with pytest.raises(holdfast.LeaseLost):
            client.lease("export").adopt(grant.token)
        with pytest.raises(ValueError, match="token"):
            client.lease("import").adopt("not a token")
        grant.check()
        grant.release()
        with pytest.raises(holdfast.LeaseLost):
            client.lease("import").adopt(grant.token)

    def test_fences_only_rise(self, connect: Connect, url: str) -> None:
        clients = [connect(url), connect(url)]
        fences = []
        for number in range(12):
            with clients[number % 2].lease(f"job-{number % 3}", ttl=LONG) as grant:
                fences.append(grant.fence)
        assert fences == sorted(set(fences))

    def test_listings_show_who_holds_what_but_no_secret(self, connect: Connect, url: str) -> None:
        client, other = connect(url), connect(url)
        started = datetime.now(UTC) - timedelta(seconds=1)
        grants = [client.lease(name, ttl=LONG, holder="worker-1").acquire() for name in ("b", "a")]
        records = other.leases.list()
        assert [record.name for record in records] == ["a", "b"]
        assert records[1] == other.leases.get("b")
        record = records[1]
        assert (record.holder, record.fence) == ("worker-1", grants[0].fence)
        assert started < record.acquired_at < record.expires_at <= datetime.now(UTC) + timedelta(seconds=LONG)
        assert not [grant for grant in grants if grant.token in repr(records)]
        assert other.leases.get("c") is None

    def test_history_tells_how_each_grant_ended(self, connect: Connect, url: str) -> None:
        client = connect(url)
        released = client.lease("import", ttl=LONG, holder="one").acquire()
        released.release()
        forced = client.lease("import", ttl=LONG, holder="two").acquire()
        client.leases.force_release("import", actor="operator", reason="stuck since noon")
        expired = client.lease("import", ttl=SHORT, holder="three", auto_renew=False).acquire()
        reentered = client.lease("import", ttl=LONG, holder="four").acquire(timeout=LONG)
        client.lease("import", ttl=LONG, holder="four").acquire()
        client.lease("other", ttl=LONG).acquire().release()
        records = client.leases.history("import")
        assert [(record.outcome, record.holder, record.fence) for record in records] == [
            ("reentered", "four", reentered.fence),
            ("expired", "three", expired.fence),
            ("forced", "two", forced.fence),
            ("released", "one", released.fence),
        ]
        assert (records[2].actor, records[2].reason) == ("operator", "stuck since noon")
        assert all(each.acquired_at <= each.ended_at <= datetime.now(UTC) for each in records)
        assert [each.name for each in client.leases.history(limit=1)] == ["other"]

    def test_a_forced_release_is_told_with_the_next_heartbeat(self, connect: Connect, url: str) -> None:
        client, operator = connect(url), connect(url)
        grant = client.lease("import", ttl=LONG, renew_every=SOON).acquire()
        kept = client.lease("export", ttl=LONG, renew_every=SOON).acquire()
        assert operator.leases.force_release("import", actor="operator", reason="stuck") is True
        assert operator.leases.get("import") is None
        until(lambda: grant.lost, what="the holder knows")
        with pytest.raises(holdfast.LeaseLost, match="'import'"):
            grant.check()
        assert grant.remaining() == 0
        kept.check()
        assert operator.leases.force_release("import", actor="operator", reason="again") is False

    def test_on_lost_is_called_once_with_the_grant(self, connect: Connect, url: str) -> None:
        client = connect(url)
        lost: list[Any] = []
        grant = client.lease("import", ttl=LONG, renew_every=SOON, on_lost=lost.append).acquire()
        ended = client.lease("export", ttl=LONG, renew_every=SOON, on_lost=lost.append).acquire()
        ended.release()
        client.leases.force_release("import", actor="operator", reason="stuck")
        until(lambda: bool(lost), what="on_lost is called")
        assert grant.lost
        before = client.lease("third", ttl=LONG, renew_every=SOON).acquire()
        expires = client.leases.get("third").expires_at
        until(lambda: client.leases.get("third").expires_at > expires, what="another heartbeat")
        before.check()
        assert [each.token for each in lost] == [grant.token]

    def test_names_are_separate_and_nest(self, connect: Connect, url: str) -> None:
        client = connect(url)
        with client.lease("outer", ttl=LONG) as outer:
            with client.lease("inner", ttl=LONG) as inner:
                assert [record.name for record in client.leases.list()] == ["inner", "outer"]
            assert inner.lost
            outer.check()
            assert [record.name for record in client.leases.list()] == ["outer"]

    def test_any_printable_name_and_holder_will_do(self, connect: Connect, url: str) -> None:
        client, other = connect(url), connect(url)
        for name in ("a" * 200, "größe/日本語/🔒", "it's; drop table lease --", 'quote"d', "%s :name $1 {now}", " "):
            with client.lease(name, ttl=LONG, holder=name) as grant:
                record = client.leases.get(name)
                assert (record.name, record.holder, record.fence) == (name, name, grant.fence)
                assert other.lease(name, ttl=LONG).try_acquire() is None
            assert client.leases.list() == []

    def test_closing_a_client_releases_what_it_holds_and_no_more(self, connect: Connect, url: str) -> None:
        client, other = connect(url), connect(url)
        grants = [client.lease(f"job-{number}", ttl=LONG, holder="one").acquire() for number in range(3)]
        grants.append(client.lease("by hand", ttl=LONG, auto_renew=False).acquire())
        kept = other.lease("kept", ttl=LONG).acquire()
        client.close()
        assert [grant for grant in grants if not grant.lost] == [], "a grant must show that it has ended"
        assert grants[0].release() is False
        client.close()
        until(lambda: [each.name for each in other.leases.list()] == ["kept"], what="the others are released")
        kept.check()

    def test_nothing_is_left_at_rest(self, connect: Connect, url: str) -> None:
        client, observer = connect(url), connect(url)
        connect(url).lease("crashed", ttl=SHORT, auto_renew=False).acquire()
        client.lease("crashed", ttl=LONG).acquire(timeout=LONG)
        client.lease("import", ttl=LONG).acquire().release()
        client.lease("export", ttl=20, renew_every=SOON).acquire()
        client.close()

        def stored() -> dict[str, list[Any]]:
            return {table: rows for table, rows in self.rows(url, observer).items() if table in ("lease", "beat")}

        until(lambda: not any(stored().values()), what="no lease and no heartbeat is stored")
