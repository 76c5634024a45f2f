"""C7: implementations that trust a grant for too long."""

from collections import defaultdict
from concurrent.futures import Future
from typing import Any

import holdfast
from holdfast.testing.history import now
from holdfast.testing.server import until
from proof.bugs.implementation import MARGIN, Connection, Grant, Holdfast, fetch_bool
from proof.bugs.testbed import Testbed
from proof.bugs.worker import Worker

_ATTEMPTS = 5


class SubSelectRenewal(Holdfast):
    """Reads the token from the lease's row, but updates another row: before a takeover commits, the read still finds
    the old token, and no lock makes it wait."""

    def prepare(self, connection: Connection) -> None:
        connection.execute("""
            create table own_beat (id uuid primary key, expires_at timestamptz);
            create table own (name text primary key, token uuid, fence bigint, beat uuid);
            create sequence own_fence;
            create function own_take(name text, ttl interval) returns setof own language sql as $$
                with started as (insert into own_beat values (gen_random_uuid(), clock_timestamp() + $2) returning id)
                insert into own as o select $1, gen_random_uuid(), nextval('own_fence'), id from started
                on conflict (name) do update set token = excluded.token, fence = excluded.fence, beat = excluded.beat
                where not exists (select from own_beat b where b.id = o.beat and b.expires_at > clock_timestamp())
                returning *
            $$;
        """)

    def acquire(self, connection: Connection, name: str, holder: str, ttl: float) -> Grant | None:
        requested_at = now()
        statement = "select fence, token from own_take(%s, make_interval(secs => %s))"
        row = connection.execute(statement, [name, ttl]).fetchone()
        return None if row is None else Grant(name, row[0], str(row[1]), requested_at + ttl * (1 - MARGIN))

    def renew(self, connection: Connection, grant: Grant) -> bool:
        statement = (
            "update own_beat set expires_at = clock_timestamp() + interval '30 s'"
            " where id = (select beat from own where name = %s and token = %s) returning true"
        )
        return fetch_bool(connection, statement, grant.name, grant.token)


class ThroughTheClient(Holdfast):
    """The real implementation through the Python client, which decides how long a grant is trusted."""

    def open(self, url: str) -> None:
        self._clients = defaultdict[str, holdfast.Client](lambda: holdfast.Client(url))

    def acquire(self, connection: Connection, name: str, holder: str, ttl: float) -> Grant | None:
        grant = self._clients[holder].lease(name, ttl=ttl, auto_renew=False).try_acquire()
        return None if grant is None else Grant(name, grant.fence, grant.token, now() + grant.remaining())

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


class WarningIgnored(Holdfast):
    """Ignores the warning that the commit did not wait for the standby: it calls the SQL function, and no more."""


class TrustFromTheReply(Holdfast):
    """Counts trust from the reply, although the TTL began before."""

    def acquire(self, connection: Connection, name: str, holder: str, ttl: float) -> Grant | None:
        grant = super().acquire(connection, name, holder, ttl)
        return None if grant is None else grant._replace(trusted_until=now() + ttl * (1 - MARGIN))


def renewed_while_being_replaced(testbed: Testbed) -> None:
    """A renews its expired lease while B's takeover is not committed yet."""
    a, b, ttl = testbed.worker("a"), testbed.worker("b"), 0.3
    old = a.acquire("job", ttl)
    since = now()
    assert old is not None, "it is free"
    until(lambda: now() > old.trusted_until + ttl, what="it has expired")
    a.believe(old, since)
    with b.record.invoke("acquire", "job") as call:
        with b.connection.transaction():
            new = testbed.implementation.acquire(b.connection, "job", "b", 30.0)
            assert new is not None, "it has expired"
            requested_at = now()
            renewing = testbed.submit_and_wait_for_lock(a.connection, lambda: a.renew(old))
        call.ok(new.fence)
    since = now()
    renewed = renewing.result()
    until(lambda: now() > since + 0.01, what="both have worked for a moment")
    b.believe(new, since)
    if renewed:
        a.believe(old, requested_at, until=requested_at + 30.0)


def acknowledged_by_the_primary_alone(testbed: Testbed) -> None:
    """The standby is down, and an operator cancels the commit that waits for it. Then the primary is lost."""
    a = testbed.worker("a")
    testbed.pair.standby.stop()
    acquiring: Future[Any] = testbed.submit(lambda: a.acquire("job", 60.0))
    cancel = "select count(pg_cancel_backend(pid)) from pg_stat_activity where wait_event = 'SyncRep'"

    def answered() -> bool:
        testbed.admin.execute(cancel)
        return acquiring.done()

    until(answered, what="the operator has cancelled the wait")
    since = now()
    try:
        old = acquiring.result()
    except holdfast.EngineError:
        old = None
    testbed.fail_over()
    b = testbed.worker("b")
    new = b.acquire("job", 60.0)
    began = now()
    assert new is not None, "the new primary has no grant"
    until(lambda: now() > began + 0.01, what="both have worked for a moment")
    b.believe(new, began)
    if old is not None:
        a.believe(old, since)


def answered_late(testbed: Testbed) -> None:
    """A's grant commits late. Its TTL began when it was written, and B acquires it when the TTL has ended."""
    a, b = testbed.worker("a"), testbed.worker("b")
    testbed.admin.execute("""
        create function be_slow() returns trigger language plpgsql as
            $$ begin perform pg_sleep(1.5); return null; end $$
    """)
    for number in range(_ATTEMPTS):
        if _answered_late(testbed, a, b, f"job-{number}"):
            return


def _answered_late(testbed: Testbed, a: Worker, b: Worker, name: str) -> bool:
    """Returns False if a busy machine delayed A or B for so long that the bug could not show."""
    ttl = 2.0
    testbed.admin.execute(
        "create constraint trigger be_slow after insert on holdfast.beat deferrable initially deferred"
        " for each row execute function be_slow()"
    )
    old = a.acquire(name, ttl)
    since = now()
    testbed.admin.execute("drop trigger be_slow on holdfast.beat")
    if old is None:
        return False
    new: list[Grant] = []

    def taken_over() -> bool:
        new.extend(filter(None, [b.acquire(name, 600.0)]))
        return bool(new)

    until(taken_over, what="A's lease has expired")
    began = now()
    until(lambda: now() > began + 0.01, what="both have worked for a moment")
    a.believe(old, since)
    b.believe(new[0], began)
    return began < since + ttl * (1 - MARGIN) - 0.1
