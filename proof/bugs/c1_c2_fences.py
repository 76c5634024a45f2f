"""C1 and C2: implementations that hand out a fence twice, or a lower one than before."""

from holdfast.testing.history import now
from proof.bugs.implementation import Connection, Grant, Holdfast, fetch_bool
from proof.bugs.testbed import Testbed


class OwnTable(Holdfast):
    """A typical hand-written lease: a table with one row per name, and a function that acquires it."""

    schema = "create table own (name text primary key, holder text, token uuid, fence bigint);"
    take = ""
    """Creates `own_take(name, holder)`, which returns a row with fence and token, or none if it is held."""

    def prepare(self, connection: Connection) -> None:
        connection.execute((self.schema + self.take).encode())

    def acquire(self, connection: Connection, name: str, holder: str, ttl: float) -> Grant | None:
        requested_at = now()
        row = connection.execute("select fence, token from own_take(%s, %s)", [name, holder]).fetchone()
        return None if row is None else Grant(name, row[0], str(row[1]), requested_at + ttl)

    def release(self, connection: Connection, grant: Grant) -> bool:
        statement = "delete from own where name = %s and token = %s returning true"
        return fetch_bool(connection, statement, grant.name, grant.token)

    def protect(self, connection: Connection, grant: Grant) -> None:
        statement = "select from own where name = %s and token = %s for share"
        connection.execute(statement, [grant.name, grant.token])


class PerRowToken(OwnTable):
    """The fence is counted in the row, which a release deletes."""

    take = """
    create function own_take(name text, holder text) returns setof own language sql as $$
        insert into own as o values ($1, $2, gen_random_uuid(), 1)
        on conflict (name) do update set holder = $2, token = excluded.token, fence = o.fence + 1 where o.token is null
        returning *
    $$;
    """


class DrawnTooEarly(OwnTable):
    """The fence is drawn before the row is locked: in between, others may acquire and release."""

    take = """
    create sequence own_fence;
    create function own_take(name text, holder text) returns setof own language plpgsql as $$
    declare number bigint := nextval('own_fence');
    begin
        return query insert into own as o values ($1, $2, gen_random_uuid(), number) on conflict do nothing returning *;
    end $$;
    """


class CounterAlone(OwnTable):
    """The counter is a row that is never deleted. It falls when a failover loses the last commits."""

    take = """
    create table own_counter as select 0::bigint as fence;
    create function own_take(name text, holder text) returns setof own language sql as $$
        with drawn as (update own_counter set fence = fence + 1 returning fence)
        insert into own as o select $1, $2, gen_random_uuid(), drawn.fence from drawn on conflict do nothing returning *
    $$;
    """


def released_and_acquired_again(testbed: Testbed) -> None:
    """A acquires and releases, then B acquires."""
    for worker in (testbed.worker("a"), testbed.worker("b")):
        grant = worker.acquire("job")
        assert grant is not None, "it is free"
        worker.take_over(grant)
        worker.write(grant)
        worker.release(grant)


def held_up_on_the_way(testbed: Testbed) -> None:
    """A is delayed while it inserts the row. Meanwhile B tries to acquire and release it, and another lease."""
    table = "own" if isinstance(testbed.implementation, OwnTable) else "holdfast.lease"
    testbed.admin.execute(
        f"""
        create function hold_up() returns trigger language plpgsql as
            $$ begin perform pg_advisory_xact_lock_shared(1); return new; end $$;
        create trigger hold_up before insert on {table} for each row when (new.holder = 'a') execute function hold_up();
        select pg_advisory_lock(1);
    """.encode()
    )
    a, b = testbed.worker("a"), testbed.worker("b")
    acquiring = testbed.submit_and_wait_for_lock(a.connection, lambda: a.acquire("job"))
    for name in ("job", "other"):
        grant = b.acquire(name)
        if grant is not None:
            b.take_over(grant)
            b.release(grant)
    testbed.admin.execute("select pg_advisory_unlock(1)")
    late = acquiring.result()
    assert late is not None, "B has released it, or never had it"
    a.take_over(late)
    a.write(late)
    a.release(late)
    grant = b.acquire("job")
    assert grant is not None, "A has released it"
    b.take_over(grant)
    b.write(grant)


def lost_with_the_primary(testbed: Testbed) -> None:
    """A's grant is committed only on the primary, and lost with it; then B acquires the same lease."""
    a = testbed.worker("a")
    first = a.acquire("job")
    assert first is not None, "it is free"
    a.take_over(first)
    a.release(first)
    testbed.pair.standby.stop()
    a.connection.execute("set synchronous_commit = local")
    assert a.acquire("job") is not None, "it is free"
    testbed.fail_over()
    b = testbed.worker("b")
    grant = b.acquire("job")
    assert grant is not None, "the new primary lacks A's last grant"
    b.take_over(grant)
    b.write(grant)
