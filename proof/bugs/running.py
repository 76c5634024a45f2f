"""Ways to have an effect twice, none at all, or one with another's result."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg

import holdfast
from holdfast.testing.history import Recorder
from holdfast.testing.server import until
from proof.bugs.implementation import Connection, Holdfast
from proof.bugs.stage import Stage

KEY = "charge"
LIMIT = 30.0
Step = Callable[[], None]


class Killed(BaseException):
    """Whoever this happens to says nothing any more."""


class Runner(Holdfast):
    """The real implementation. ``value`` is the effect and the result; ``then`` is what happens in the middle."""

    def outside(self, url: str, value: str, then: Step) -> str:
        """The effect is committed elsewhere; what a dead owner left is undone first."""
        with holdfast.Client(url) as client:
            return str(
                client.operation(KEY, rollback=lambda: undo(url), timeout=LIMIT).run(_did(url, value, then)).result
            )

    def within(self, url: str, value: str, then: Step) -> str:
        """The effect is one with the transaction."""
        with holdfast.Client(url) as client, psycopg.connect(url) as mine:

            def effect() -> str:
                do(mine, value)
                then()
                return value

            return str(client.operation(KEY, tx=mine, timeout=LIMIT).run(effect).result)


class Naive(Runner):
    """A table of results with a time-out, as one would make it in an afternoon."""

    def prepare(self, connection: Connection) -> None:
        connection.execute("create table naive (name text primary key, result text, taken boolean not null)")


class UnfencedFinish(Naive):
    """Whoever finishes writes what came of it, be it the owner still or not."""

    def outside(self, url: str, value: str, then: Step) -> str:
        with psycopg.connect(url, autocommit=True) as mine:
            with suppress(psycopg.errors.UniqueViolation):
                mine.execute("insert into naive values (%s, null, true)", [KEY])
            row = mine.execute("select result from naive where name = %s", [KEY]).fetchone()
            if row is not None and row[0] is not None:
                return str(row[0])
            undo(url)
            _did(url, value, then)()
            mine.execute("update naive set result = %s where name = %s", [value, KEY])
        return value


class ResultFirst(Naive):
    """The result is kept before the effect is there, lest it be had twice."""

    def within(self, url: str, value: str, then: Step) -> str:
        with psycopg.connect(url, autocommit=True) as mine:
            with suppress(psycopg.errors.UniqueViolation):
                mine.execute("insert into naive values (%s, %s, true)", [KEY, value])
                then()
                do(mine, value)
            [(result,)] = mine.execute("select result from naive where name = %s", [KEY]).fetchall()
        return str(result)


class ClaimOutside(Naive):
    """Whether it was done is asked before the transaction begins."""

    def within(self, url: str, value: str, then: Step) -> str:
        with psycopg.connect(url, autocommit=True) as mine:
            row = mine.execute("select result from naive where name = %s", [KEY]).fetchone()
            if row is not None:
                return str(row[0])
            then()
            with mine.transaction():
                do(mine, value)
                keep = (
                    "insert into naive values (%s, %s, true) on conflict (name) do update set result = excluded.result"
                )
                mine.execute(keep, [KEY, value])
        return value


def do(connection: Any, value: str) -> None:
    connection.execute("insert into proof_effect values (%s, %s)", [KEY, value])


def undo(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as elsewhere:
        elsewhere.execute("delete from proof_effect where name = %s", [KEY])


def _did(url: str, value: str, then: Step) -> Callable[[], str]:
    def effect() -> str:
        with psycopg.connect(url, autocommit=True) as elsewhere:
            do(elsewhere, value)
        then()
        return value

    return effect


def _recorded(stage: Stage, worker: str, run: Callable[[], str]) -> None:
    with Recorder(stage.folder, worker) as record, record.invoke("run", KEY) as call, suppress(Killed):
        try:
            call.ok(result=run())
        except (holdfast.HoldfastError, psycopg.Error) as error:
            call.fail(refused=str(error))


def finished_late(stage: Stage) -> None:
    """A stops when it has done it; B takes over, undoes it, does it, and then A goes on."""
    user, begun, go_on = _runner(stage), threading.Event(), threading.Event()

    def stop() -> None:
        begun.set()
        assert go_on.wait(LIMIT)

    late = stage.ask(lambda: _recorded(stage, "a", lambda: user.outside(stage.url, "a", stop)))
    assert begun.wait(LIMIT)
    stage.director.execute("delete from holdfast.lease")
    _recorded(stage, "b", lambda: user.outside(stage.url, "b", _nothing))
    go_on.set()
    late.result(LIMIT)
    _recorded(stage, "c", lambda: user.outside(stage.url, "c", _nothing))


def killed_half_way(stage: Stage) -> None:
    """A dies in the middle, and B comes after."""
    user = _runner(stage)

    def die() -> None:
        raise Killed

    _recorded(stage, "a", lambda: user.within(stage.url, "a", die))
    _recorded(stage, "b", lambda: user.within(stage.url, "b", _nothing))


def both_at_once(stage: Stage) -> None:
    """A stops in the middle for as long as it takes B to begin."""
    user, begun, go_on = _runner(stage), threading.Event(), threading.Event()

    def stop() -> None:
        begun.set()
        assert go_on.wait(LIMIT)

    first = stage.ask(lambda: _recorded(stage, "a", lambda: user.within(stage.url, "a", stop)))
    assert begun.wait(LIMIT)
    second = stage.ask(lambda: _recorded(stage, "b", lambda: user.within(stage.url, "b", _nothing)))
    asked = (
        "select from pg_stat_activity where query ~ 'operation_begin|from naive' and pid <> pg_backend_pid() limit 1"
    )
    until(lambda: second.done() or stage.director.execute(asked.encode()).fetchone() is not None, what="B has asked")
    if not isinstance(user, Naive):
        go_on.set()
    else:
        second.result(LIMIT)
        go_on.set()
    first.result(LIMIT)
    second.result(LIMIT)


def _runner(stage: Stage) -> Runner:
    assert isinstance(stage.implementation, Runner)
    return stage.implementation


def _nothing() -> None:
    return None
