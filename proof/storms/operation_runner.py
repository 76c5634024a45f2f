"""One process of the storm: ``python -m proof.storms.operation_runner URL FOLDER NAME KEYS``.

Runs every key until it has a result, some in a transaction and some outside, and again until its input is closed, and
records the results. The outside store refuses a fence that is older than the last one: a process that was paused for
longer than its lease must not change the store any more.
"""

from __future__ import annotations

import os
import random
import secrets
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg

import holdfast
from holdfast.testing.history import Recorder

TTL = 3.0 if os.environ.get("HOLDFAST_STORM") else 1.5
TABLES = (
    "create table proof_effect (name text not null, value text not null)",
    "create table store (name text primary key, fence bigint not null, value text)",
)
STORE = """
insert into store values (?, ?, ?) on conflict (name) do update set fence = excluded.fence, value = excluded.value
 where store.fence < excluded.fence or store.fence = excluded.fence and store.value is null
"""


class TooLate(Exception):
    """The store has seen a newer fence."""


@contextmanager
def connected(url: str) -> Iterator[Any]:
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=20, isolation_level=None)) as file:
            yield file
    else:
        with psycopg.connect(url, autocommit=True) as connection:
            yield connection


def run(connection: Any, sql: str, *parameters: object) -> Any:
    return connection.execute(sql.replace("?", "%s") if isinstance(connection, psycopg.Connection) else sql, parameters)


class Runner:
    def __init__(self, url: str, client: holdfast.Client) -> None:
        self._url, self._client = url, client

    def within(self, key: str) -> str:
        with connected(self._url) as connection:

            def effect() -> str:
                value = secrets.token_hex(8)
                run(connection, "insert into proof_effect values (?, ?)", key, value)
                time.sleep(random.uniform(0.0, 0.03))
                return value

            return str(self._client.operation(key, tx=connection, timeout=60).run(effect).result)

    def outside(self, key: str) -> str:
        def effect(op: Any) -> str:
            value = secrets.token_hex(8)
            time.sleep(random.uniform(0.0, 0.03))
            self._store(key, op.fence, value)
            return value

        def undo(op: Any) -> None:
            self._store(key, op.fence, None)

        operation = self._client.operation(key, rollback=undo, timeout=60, ttl=TTL, retry=holdfast.Retry(attempts=1000))
        return str(operation.run(effect).result)

    def _store(self, key: str, fence: int, value: str | None) -> None:
        with connected(self._url) as store:
            if run(store, STORE, key, fence, value).rowcount != 1:
                raise TooLate(key)
            run(store, "delete from proof_effect where name = ?", key)
            if value is not None:
                run(store, "insert into proof_effect values (?, ?)", key, value)
            store.commit()


def main(url: str, folder: str, name: str, count: int) -> None:
    keys = [f"{kind}-{number}" for kind in ("within", "outside") for number in range(count)]
    left = random.sample(keys, len(keys))
    over = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=listen, daemon=True).start()
    with holdfast.Client(url) as client, Recorder(folder, name) as record:
        runner = Runner(url, client)
        while left or not over.is_set():
            key = left.pop() if left else random.choice(keys)
            with record.invoke("run", key) as call:
                try:
                    call.ok(result=getattr(runner, key.partition("-")[0])(key))
                except (holdfast.HoldfastError, TooLate, sqlite3.OperationalError, psycopg.Error) as error:
                    call.unknown(why=f"{type(error).__name__}: {error}"[:200])
                    left.insert(0, key)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
