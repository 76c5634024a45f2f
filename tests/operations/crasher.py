"""Runs operations that are killed, one after the other: ``python -m tests.operations.crasher URL MODE POLICY...``.

Every attempt is a process of its own, forked off before there is a client but after all that it needs was imported, so
that hundreds are a matter of seconds.
For each policy and boundary: one attempt that is killed there, and then one that is not. What is printed is the policy,
the boundary, how both ended, and how many effects there are.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import psycopg

import holdfast
from tests.children import query

UNTOUCHED = ("before:operation_claim=kill@1",)
HALF_DONE = ("after:operation_claim=kill@1", "after:operation_write=kill@1", "effect:after")
FINISHED = ("after:operation_finish=kill@1",)
"""What an operation outside of a transaction writes, in this order: the lease with the claim, a checkpoint, the effect,
the end with the release. A kill before a statement leaves the same as one after the statement before it."""
RETRIED = (
    "retry:before:operation_acquire=kill@1", "retry:after:operation_acquire=kill@1",
    "retry:after:operation_write=kill@1", "retry:after:operation_write=kill@2", "retry:after:operation_write=kill@3",
    "retry:after:operation_finish=kill@1",
)  # fmt: skip
"""A retry writes the lease, a mark that it undoes the dead attempt, its claim, the checkpoint, and the end."""
OF_BATCHES = ("operation_claim_many", "operation_finish_many", "lease_release")


def boundaries(mode: str, url: str, policy: str) -> Iterator[str]:
    if mode == "external":
        yield from HALF_DONE
        if policy == "rollback":
            yield from RETRIED
        if policy == "refuse":  # elsewhere no policy is asked
            yield from (*UNTOUCHED, *FINISHED)
    elif mode == "batch":
        yield from (f"{moment}:{statement}=kill@1" for statement in OF_BATCHES for moment in ("before", "after"))
        yield from ("effect:before", "effect:after")
    elif url.startswith("sqlite"):
        yield from (f"statement:{number}" for number in range(1, 100))
    else:
        yield from (f"{moment}:{number}" for number in (1, 2, 3) for moment in ("before", "sent", "after"))


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def external(url: str, key: str, policy: str, boundary: str) -> Any:
    """The effect is a row that is committed on a connection which has nothing to do with the operation."""
    if "=" in boundary:
        os.environ["HOLDFAST_FAILPOINTS"] = boundary
    with holdfast.Client(url) as client:

        def effect(op: Any) -> str:
            op.checkpoint("begun")
            query(url, "insert into effect values (%s)", key)
            if boundary == "effect:after":
                die()
            return "done"

        def undo() -> None:
            query(url, "delete from effect where what = %s", key)

        def probe() -> bool:
            return bool(query(url, "select 1 from effect where what = %s", key))

        known: dict[str, Any] = {"rollback": {"rollback": undo}, "verify": {"verify": probe}, "refuse": {}}
        try:
            return client.operation(key, timeout=60, **known[policy]).run(effect).status
        except holdfast.OperationFailed as error:
            return error.status


def batch(url: str, key: str, policy: str, boundary: str) -> Any:
    """Three at once, of which the second is the one that is looked at."""
    if "=" in boundary:
        os.environ["HOLDFAST_FAILPOINTS"] = boundary
    with holdfast.Client(url) as client:

        def effect(item: str) -> str:
            if item == key and boundary == "effect:before":
                die()
            query(url, "insert into effect values (%s)", item)
            if item == key and boundary == "effect:after":
                die()
            return "done"

        keys = [f"{key} a", key, f"{key} c"]
        found = client.operations.run_many(keys, effect, timeout=60)
        assert all(effects(url, each) <= 1 for each in keys)
        error = found[1].error
        return error.status if isinstance(error, holdfast.OperationFailed) else found[1].status


def effects(url: str, what: str) -> int:
    return len(query(url, "select 1 from effect where what = %s", what))


def transaction(url: str, key: str, policy: str, boundary: str) -> Any:
    with holdfast.Client(url) as client:
        if url.startswith("sqlite"):
            client.operations.list()  # makes the tables
            with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=60, isolation_level=None)) as file:
                if boundary:
                    file.set_trace_callback(nth(int(boundary.rpartition(":")[2])))
                effect = lambda: file.execute("insert into effect values (?)", (key,)).close()  # noqa: E731
                return client.operation(key, tx=file).run(effect).status
        with psycopg.connect(url, autocommit=True) as connection:
            arm(connection, boundary)
            effect = lambda: connection.execute("insert into effect values (%s)", [key]).close()  # noqa: E731
            return client.operation(key, tx=connection).run(effect).status


def nth(number: int) -> Callable[[str], None]:
    left = [number]

    def count(_: str) -> None:
        left[0] -= 1
        if not left[0]:
            die()

    return count


def arm(connection: Any, boundary: str) -> None:
    """Every message to the server is one call of ``wait``: the claim, the effect, the end."""
    if not boundary:
        return
    moment, _, number = boundary.partition(":")
    left, wait = [int(number)], connection.wait

    def counted(generator: Any, *args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and moment == "before":
            die()
        if left[0] == 0 and moment == "sent":
            while connection.pgconn.flush():
                pass
            die()
        answer = wait(generator, *args, **kwargs)
        if left[0] == 0 and moment == "after":
            die()
        return answer

    connection.wait = counted


def forked(work: Callable[[], Any]) -> tuple[int, Any]:
    """What a process of its own returned, and how it ended."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.write(theirs, json.dumps(work()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), json.loads(said or b"null")


def release_leases(url: str) -> None:
    """What the dead one held would be free when its time is over: the test does not wait for that."""
    query(url, f"delete from holdfast{'_' if url.startswith('sqlite') else '.'}lease")


def learn(run: Callable[[], Any]) -> None:
    """Import what an attempt imports: it would otherwise be imported anew in each."""

    def imported() -> list[str]:
        run()
        return list(sys.modules)

    _, modules = forked(imported)
    for module in modules:
        importlib.import_module(module)


def main(url: str, mode: str, *policies: str) -> None:
    run = {"external": external, "batch": batch, "transaction": transaction}[mode]
    learn(partial(run, url, "first", policies[0], ""))
    for policy in policies:
        for place in boundaries(mode, url, policy):
            key, boundary = f"{mode}-{policy}-{place}", place.removeprefix("retry:")
            if boundary != place:
                forked(partial(run, url, key, policy, "effect:after"))
                release_leases(url)
            ended, _ = forked(partial(run, url, key, policy, boundary))
            release_leases(url)
            again, said = forked(partial(run, url, key, policy, ""))
            print(json.dumps([policy, place, ended, again, said, effects(url, key)]), flush=True)  # noqa: T201
            if mode == "transaction" and ended == 0:
                break  # it has no further statement


if __name__ == "__main__":
    main(*sys.argv[1:])
