"""Ways to believe an answer that does not say what it seems to say."""

from collections import defaultdict
from concurrent.futures import Future
from typing import Any

import holdfast
from holdfast.testing.history import now
from holdfast.testing.server import until
from proof.bugs.implementation import MARGIN, Connection, Grant, Holdfast, answer
from proof.bugs.stage import Stage
from proof.bugs.worker import Worker

_ATTEMPTS = 5


class SubSelectRenewal(Holdfast):
    """The secret is looked up in the lease's row, but another row is renewed: while a takeover is about to commit, the
    look-up still finds what was, and nothing makes it wait."""

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
        asked_at = now()
        statement = "select fence, token from own_take(%s, make_interval(secs => %s))"
        row = connection.execute(statement, [name, ttl]).fetchone()
        return None if row is None else Grant(name, row[0], str(row[1]), asked_at + ttl * (1 - MARGIN))

    def renew(self, connection: Connection, grant: Grant) -> bool:
        statement = (
            "update own_beat set expires_at = clock_timestamp() + interval '30 s'"
            " where id = (select beat from own where name = %s and token = %s) returning true"
        )
        return answer(connection, statement, grant.name, grant.token)


class ThroughTheClient(Holdfast):
    """The real implementation with all of its Python: what a worker is told, and how long it trusts it."""

    def open(self, url: str) -> None:
        self._clients = defaultdict[str, holdfast.Client](lambda: holdfast.Client(url))

    def acquire(self, connection: Connection, name: str, holder: str, ttl: float) -> Grant | None:
        grant = self._clients[holder].lease(name, ttl=ttl, auto_renew=False).try_acquire()
        return None if grant is None else Grant(name, grant.fence, grant.token, now() + grant.remaining())

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


class WarningIgnored(Holdfast):
    """The answer is a success, with a warning that the standby was not waited for; and nobody listens to warnings.

    To call the function in the database is all it takes."""


class TrustFromTheReply(Holdfast):
    """The time that the answer took is time in which the lease grew older."""

    def acquire(self, connection: Connection, name: str, holder: str, ttl: float) -> Grant | None:
        grant = super().acquire(connection, name, holder, ttl)
        return None if grant is None else grant._replace(trusted_until=now() + ttl * (1 - MARGIN))


def renewed_while_being_replaced(stage: Stage) -> None:
    """A comes back after its time is over, and asks for more in the moment in which B takes over."""
    a, b, ttl = stage.worker("a"), stage.worker("b"), 0.3
    old = a.acquire("job", ttl)
    since = now()
    assert old is not None, "nobody has it"
    until(lambda: now() > old.trusted_until + ttl, what="its time is over")
    a.believe(old, since)
    with b.record.invoke("acquire", "job") as call:
        with b.connection.transaction():
            new = stage.implementation.acquire(b.connection, "job", "b", 30.0)
            assert new is not None, "its holder's time is over"
            asked_at = now()
            renewing = stage.meanwhile(a.connection, lambda: a.renew(old))
        call.ok(new.fence)
    since = now()
    renewed = renewing.result()
    until(lambda: now() > since + 0.01, what="they have gone on for a moment")
    b.believe(new, since)
    if renewed:
        a.believe(old, asked_at, until=asked_at + 30.0)


def acknowledged_by_the_primary_alone(stage: Stage) -> None:
    """The standby is away, and an operator cancels what waits for it. Then the primary is gone for good."""
    a = stage.worker("a")
    stage.pair.standby.stop()
    acquiring: Future[Any] = stage.ask(lambda: a.acquire("job", 60.0))
    cancel = "select count(pg_cancel_backend(pid)) from pg_stat_activity where wait_event = 'SyncRep'"

    def answered() -> bool:
        stage.director.execute(cancel)
        return acquiring.done()

    until(answered, what="the operator has ended the wait")
    since = now()
    try:
        old = acquiring.result()
    except holdfast.EngineError:
        old = None
    stage.fail_over()
    b = stage.worker("b")
    new = b.acquire("job", 60.0)
    began = now()
    assert new is not None, "the new primary knows of nobody"
    until(lambda: now() > began + 0.01, what="they have gone on for a moment")
    b.believe(new, began)
    if old is not None:
        a.believe(old, since)


def answered_late(stage: Stage) -> None:
    """A's grant is slow to commit. Its time runs from the moment it was written; B has it as soon as that is over."""
    a, b = stage.worker("a"), stage.worker("b")
    stage.director.execute("""
        create function be_slow() returns trigger language plpgsql as
            $$ begin perform pg_sleep(1.5); return null; end $$
    """)
    for number in range(_ATTEMPTS):
        if _answered_late(stage, a, b, f"job-{number}"):
            return


def _answered_late(stage: Stage, a: Worker, b: Worker, name: str) -> bool:
    """False when a busy machine held A or B up for so long that no mistake could still be seen."""
    ttl = 2.0
    stage.director.execute(
        "create constraint trigger be_slow after insert on holdfast.beat deferrable initially deferred"
        " for each row execute function be_slow()"
    )
    old = a.acquire(name, ttl)
    since = now()
    stage.director.execute("drop trigger be_slow on holdfast.beat")
    if old is None:
        return False
    new: list[Grant] = []

    def taken_over() -> bool:
        new.extend(filter(None, [b.acquire(name, 600.0)]))
        return bool(new)

    until(taken_over, what="A's time is over")
    began = now()
    until(lambda: now() > began + 0.01, what="they have gone on for a moment")
    a.believe(old, since)
    b.believe(new[0], began)
    return began < since + ttl * (1 - MARGIN) - 0.1
