"""Ways to hand out a fence that was there before, or that is lower than the last one."""

from holdfast.testing.history import now
from proof.bugs.implementation import Connection, Grant, Holdfast, answer
from proof.bugs.stage import Stage


class Own(Holdfast):
    """A lease as it is often written: one row a name in a table of its own, and a function that takes it."""

    schema = "create table own (name text primary key, holder text, token uuid, fence bigint);"
    take = ""
    """`own_take(name, holder)` gives a row with fence and token, or none when somebody has it."""

    def prepare(self, connection: Connection) -> None:
        connection.execute((self.schema + self.take).encode())

    def acquire(self, connection: Connection, name: str, holder: str, ttl: float) -> Grant | None:
        asked_at = now()
        row = connection.execute("select fence, token from own_take(%s, %s)", [name, holder]).fetchone()
        return None if row is None else Grant(name, row[0], str(row[1]), asked_at + ttl)

    def release(self, connection: Connection, grant: Grant) -> bool:
        statement = "delete from own where name = %s and token = %s returning true"
        return answer(connection, statement, grant.name, grant.token)

    def protect(self, connection: Connection, grant: Grant) -> None:
        statement = "select from own where name = %s and token = %s for share"
        connection.execute(statement, [grant.name, grant.token])


class PerRowToken(Own):
    """The fence counts in the row itself, and goes with it when the lease is released."""

    take = """
    create function own_take(name text, holder text) returns setof own language sql as $$
        insert into own as o values ($1, $2, gen_random_uuid(), 1)
        on conflict (name) do update set holder = $2, token = excluded.token, fence = o.fence + 1 where o.token is null
        returning *
    $$;
    """


class DrawnTooEarly(Own):
    """The number is drawn first and the row taken after: somebody else may have come and gone in between."""

    take = """
    create sequence own_fence;
    create function own_take(name text, holder text) returns setof own language plpgsql as $$
    declare number bigint := nextval('own_fence');
    begin
        return query insert into own as o values ($1, $2, gen_random_uuid(), number) on conflict do nothing returning *;
    end $$;
    """


class CounterAlone(Own):
    """Kept in the row for ever, the counter never falls; unless the last commits are lost with the primary."""

    take = """
    create table own_counter as select 0::bigint as fence;
    create function own_take(name text, holder text) returns setof own language sql as $$
        with drawn as (update own_counter set fence = fence + 1 returning fence)
        insert into own as o select $1, $2, gen_random_uuid(), drawn.fence from drawn on conflict do nothing returning *
    $$;
    """


def released_and_acquired_again(stage: Stage) -> None:
    """A has it and gives it back, then B has it."""
    for worker in (stage.worker("a"), stage.worker("b")):
        grant = worker.acquire("job")
        assert grant is not None, "nobody has it"
        worker.take_over(grant)
        worker.write(grant)
        worker.release(grant)


def held_up_on_the_way(stage: Stage) -> None:
    """A is held up while it takes the row. Meanwhile B comes and goes, if it is let, and takes another lease too."""
    table = "own" if isinstance(stage.implementation, Own) else "holdfast.lease"
    stage.director.execute(
        f"""
        create function hold_up() returns trigger language plpgsql as
            $$ begin perform pg_advisory_xact_lock_shared(1); return new; end $$;
        create trigger hold_up before insert on {table} for each row when (new.holder = 'a') execute function hold_up();
        select pg_advisory_lock(1);
    """.encode()
    )
    a, b = stage.worker("a"), stage.worker("b")
    acquiring = stage.meanwhile(a.connection, lambda: a.acquire("job"))
    for name in ("job", "other"):
        grant = b.acquire(name)
        if grant is not None:
            b.take_over(grant)
            b.release(grant)
    stage.director.execute("select pg_advisory_unlock(1)")
    late = acquiring.result()
    assert late is not None, "B has given it back, or never had it"
    a.take_over(late)
    a.write(late)
    a.release(late)
    grant = b.acquire("job")
    assert grant is not None, "A has given it back"
    b.take_over(grant)
    b.write(grant)


def lost_with_the_primary(stage: Stage) -> None:
    """A's grant is committed on the primary alone, and lost with it; then B is granted the same lease."""
    a = stage.worker("a")
    first = a.acquire("job")
    assert first is not None, "nobody has it"
    a.take_over(first)
    a.release(first)
    stage.pair.standby.stop()
    a.connection.execute("set synchronous_commit = local")
    assert a.acquire("job") is not None, "nobody has it"
    stage.fail_over()
    b = stage.worker("b")
    grant = b.acquire("job")
    assert grant is not None, "the new primary knows nothing of A's last grant"
    b.take_over(grant)
    b.write(grant)
