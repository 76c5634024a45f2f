"""Through PgBouncer in transaction mode: row leases work, what lives in a session is refused by name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

import holdfast
from holdfast.testing.server import until
from tests.children import PATIENCE, kept
from tests.raw_session import Raw, waiters


def test_leases_work_through_a_pooler_in_transaction_mode(pooled_url: str) -> None:
    """More clients than server sessions: every statement may run in another session than the one before."""
    clients = [holdfast.Client(pooled_url) for _ in range(5)]
    fences = []
    for _ in range(3):
        for client in clients:
            grant = client.lease("x", ttl=60).acquire()
            fences.append(grant.fence)
            others = [other.lease("x").try_acquire() for other in clients if other is not client]
            assert others == [None] * 4
            assert grant.release()
    assert fences == sorted(set(fences))
    for client in clients:
        client.close()


def test_the_heartbeat_and_protect_work_through_a_pooler(pooled_url: str) -> None:
    with (
        holdfast.Client(pooled_url) as client,
        holdfast.Client(pooled_url) as thief,
        psycopg.connect(pooled_url, prepare_threshold=None) as users,
    ):
        grant = client.lease("x", ttl=30, renew_every=0.2).acquire()
        kept(grant)
        with grant.transaction(users):
            users.execute("select 1")
        assert thief.leases.force_release("x", actor="operator", reason="test")
        with pytest.raises(holdfast.FencedOut), grant.transaction(users):
            pass
        until(lambda: grant.lost, what="the forced release is learned of")


def test_a_database_whose_transactions_are_serializable_is_asked_again(postgres_url: str, pooled_url: str) -> None:
    """Where nobody sets up the session, a statement that has met another one is refused, and was not carried out."""
    with psycopg.connect(postgres_url) as other, holdfast.Client(pooled_url) as client, ThreadPoolExecutor() as aside:
        other.execute(f"alter database {other.info.dbname} set default_transaction_isolation = serializable".encode())
        other.commit()
        grant = client.lease("x", auto_renew=False).acquire()
        other.execute("update holdfast.beat set label = 'met'")
        renewing = aside.submit(grant.renew)
        until(lambda: waiters(other) == 1, what="the renewal waits")
        other.commit()
        assert renewing.result()


def test_a_waiter_behind_a_pooler_gets_the_lease(pooled_url: str) -> None:
    with holdfast.Client(pooled_url) as client, holdfast.Client(pooled_url) as waiter:
        client.lease("x", ttl=0.5, auto_renew=False).acquire()
        assert waiter.lease("x", ttl=60).acquire(timeout=PATIENCE).release()


def test_what_lives_in_a_session_is_refused_by_name(pooled_url: str) -> None:
    with holdfast.Client(pooled_url) as client, pytest.raises(holdfast.SessionUnsafe, match="pooler"):
        client.lease("x", failover="session").acquire()


@pytest.mark.parametrize("prepared", [True, False])
def test_a_pooler_is_noticed_and_nothing_is_prepared_through_it(pooled_url: str, prepared: bool) -> None:
    raws = [Raw(pooled_url, prepared=prepared) for _ in range(6)]
    assert all(raw.session.pooled for raw in raws)
    for raw in raws:
        assert raw.call("lease_list", name=None) == []
        raw.close()
