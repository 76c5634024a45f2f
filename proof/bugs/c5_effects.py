"""C5: implementations of an operation with two effects, with none, with the result of another run, or with a refusal
because of an owner that lives."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg

import holdfast
from holdfast.testing.history import Recorder
from holdfast.testing.server import until
from proof.bugs.implementation import Connection, Holdfast
from proof.bugs.testbed import Testbed

KEY = "charge"
LIMIT = 30.0
Hook = Callable[[], None]


class Killed(BaseException):
    """Stands for the death of the worker: it records no outcome."""


class Runner(Holdfast):
    """The real implementation. ``value`` is the effect and the result; ``then`` is called after the effect."""

    def outside(self, url: str, value: str, then: Hook) -> str:
        """The effect is committed on another connection; that of a dead owner is undone first."""
        with holdfast.Client(url) as client:
            return str(
                client.operation(KEY, rollback=lambda: undo(url), timeout=LIMIT)
                .run(_effect_outside(url, value, then))
                .result
            )

    def within(self, url: str, value: str, then: Hook) -> str:
        """The effect is in the transaction of the operation."""
        with holdfast.Client(url) as client, psycopg.connect(url, autocommit=True) as connection:

            def effect() -> str:
                do(connection, value)
                then()
                return value

            return str(client.operation(KEY, tx=connection, timeout=LIMIT).run(effect).result)


class Naive(Runner):
    """A table of results."""

    def prepare(self, connection: Connection) -> None:
        connection.execute("create table naive (name text primary key, result text, taken boolean not null)")


class UnfencedFinish(Naive):
    """Writes its result without checking that it is still the owner."""

    def outside(self, url: str, value: str, then: Hook) -> str:
        with psycopg.connect(url, autocommit=True) as connection:
            with suppress(psycopg.errors.UniqueViolation):
                connection.execute("insert into naive values (%s, null, true)", [KEY])
            row = connection.execute("select result from naive where name = %s", [KEY]).fetchone()
            if row is not None and row[0] is not None:
                return str(row[0])
            undo(url)
            _effect_outside(url, value, then)()
            connection.execute("update naive set result = %s where name = %s", [value, KEY])
        return value


class ResultFirst(Naive):
    """Stores the result before the effect, to avoid a second effect."""

    def within(self, url: str, value: str, then: Hook) -> str:
        with psycopg.connect(url, autocommit=True) as connection:
            with suppress(psycopg.errors.UniqueViolation):
                connection.execute("insert into naive values (%s, %s, true)", [KEY, value])
                then()
                do(connection, value)
            [(result,)] = connection.execute("select result from naive where name = %s", [KEY]).fetchall()
        return str(result)


class ClaimOutside(Naive):
    """Checks for a result before the transaction begins."""

    def within(self, url: str, value: str, then: Hook) -> str:
        with psycopg.connect(url, autocommit=True) as connection:
            row = connection.execute("select result from naive where name = %s", [KEY]).fetchone()
            if row is not None:
                return str(row[0])
            then()
            with connection.transaction():
                do(connection, value)
                store = (
                    "insert into naive values (%s, %s, true) on conflict (name) do update set result = excluded.result"
                )
                connection.execute(store, [KEY, value])
        return value


class LivenessAskedLater(Naive):
    """Reads the log, and asks whether the owner lives in a later statement: the owner may have ended in between."""

    def __init__(self) -> None:
        super().__init__()
        self.owner_ended = threading.Event()

    def outside(self, url: str, value: str, then: Hook) -> str:
        with psycopg.connect(url, autocommit=True) as connection:
            owns = connection.execute("insert into naive values (%s, null, true) on conflict do nothing", [KEY])
            if owns.rowcount:
                connection.execute("select pg_advisory_lock(1)")
                _effect_outside(url, value, then)()
                connection.execute("update naive set result = %s where name = %s", [value, KEY])
                connection.execute("select pg_advisory_unlock(1)")
                self.owner_ended.set()
                return value
            row = connection.execute("select result from naive where name = %s", [KEY]).fetchone()
            if row is not None and row[0] is not None:
                return str(row[0])
            assert self.owner_ended.wait(LIMIT)
            if connection.execute("select pg_try_advisory_lock(1)").fetchone() == (True,):
                raise holdfast.OperationFailed("its owner died", key=KEY, label=KEY, status="partial", error=None)
        raise AssertionError("the owner has ended")


def do(connection: Any, value: str) -> None:
    connection.execute("insert into proof_effect values (%s, %s)", [KEY, value])


def undo(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as other:
        other.execute("delete from proof_effect where name = %s", [KEY])


def _effect_outside(url: str, value: str, then: Hook) -> Callable[[], str]:
    def effect() -> str:
        with psycopg.connect(url, autocommit=True) as other:
            do(other, value)
        then()
        return value

    return effect


def record_run(testbed: Testbed, worker: str, run: Callable[[], str]) -> None:
    with Recorder(testbed.folder, worker) as record, record.invoke("run", KEY) as call, suppress(Killed):
        try:
            call.ok(result=run())
        except holdfast.OperationFailed as error:
            call.fail(refused=str(error), dead=error.status == "partial")
        except (holdfast.HoldfastError, psycopg.Error) as error:
            call.fail(refused=str(error))


def finished_late(testbed: Testbed) -> None:
    """A pauses after its effect and loses its lease; B undoes the effect and runs; then A continues."""
    runner, begun, go_on = _runner(testbed), threading.Event(), threading.Event()

    def stop() -> None:
        begun.set()
        assert go_on.wait(LIMIT)

    late = testbed.submit(lambda: record_run(testbed, "a", lambda: runner.outside(testbed.url, "a", stop)))
    assert begun.wait(LIMIT)
    testbed.admin.execute("delete from holdfast.lease")
    record_run(testbed, "b", lambda: runner.outside(testbed.url, "b", _nothing))
    go_on.set()
    late.result(LIMIT)
    record_run(testbed, "c", lambda: runner.outside(testbed.url, "c", _nothing))


def killed_half_way(testbed: Testbed) -> None:
    """A dies after its effect, then B runs."""
    runner = _runner(testbed)

    def die() -> None:
        raise Killed

    record_run(testbed, "a", lambda: runner.within(testbed.url, "a", die))
    record_run(testbed, "b", lambda: runner.within(testbed.url, "b", _nothing))


def both_at_once(testbed: Testbed) -> None:
    """A pauses until B has begun."""
    runner, begun, go_on = _runner(testbed), threading.Event(), threading.Event()

    def stop() -> None:
        begun.set()
        assert go_on.wait(LIMIT)

    first = testbed.submit(lambda: record_run(testbed, "a", lambda: runner.within(testbed.url, "a", stop)))
    assert begun.wait(LIMIT)
    second = testbed.submit(lambda: record_run(testbed, "b", lambda: runner.within(testbed.url, "b", _nothing)))
    b_has_begun = (
        "select from pg_stat_activity where query ~ 'operation_begin|from naive' and pid <> pg_backend_pid() limit 1"
    )
    until(
        lambda: second.done() or testbed.admin.execute(b_has_begun.encode()).fetchone() is not None, what="B has begun"
    )
    if not isinstance(runner, Naive):
        go_on.set()
    else:
        second.result(LIMIT)
        go_on.set()
    first.result(LIMIT)
    second.result(LIMIT)


def ended_between_two_looks(testbed: Testbed) -> None:
    """A pauses in its effect until B has found it running; then A ends, and B looks again."""
    runner, begun, go_on = _runner(testbed), threading.Event(), threading.Event()

    def stop() -> None:
        begun.set()
        assert go_on.wait(LIMIT)

    first = testbed.submit(lambda: record_run(testbed, "a", lambda: runner.outside(testbed.url, "a", stop)))
    assert begun.wait(LIMIT)
    second = testbed.submit(lambda: record_run(testbed, "b", lambda: runner.outside(testbed.url, "b", _nothing)))
    b_has_looked = (
        "select from pg_stat_activity where query ~ 'operation_get|result from naive' and state = 'idle' limit 1"
    )
    until(
        lambda: second.done() or testbed.admin.execute(b_has_looked.encode()).fetchone() is not None,
        what="B has looked",
    )
    go_on.set()
    first.result(LIMIT)
    second.result(LIMIT)


def _runner(testbed: Testbed) -> Runner:
    assert isinstance(testbed.implementation, Runner)
    return testbed.implementation


def _nothing() -> None:
    return None
