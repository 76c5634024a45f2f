"""Relays publish in the order of commits, for any interleaving of transactions and any isolation level."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg.errors import SerializationFailure
from sqlalchemy import orm
from sqlalchemy.pool import NullPool

import holdfast
from tests.lineage.recording_sink import RecordingSink

LEVELS = list(psycopg.IsolationLevel)[1:]


class Broken(Exception):
    pass


def key(dataset: str, number: int) -> holdfast.OperationKey:
    return holdfast.OperationKey(pipeline="p", task="t", dataset=dataset, operation="o", params={"number": number})


class Interleaved:
    """Transactions that are open at once and go on in turns, in one thread: so each COMMIT is answered before the next
    is sent, and the order in which that happens is the one and only that may be told."""

    def __init__(self, url: str, seed: int, stack: ExitStack) -> None:
        self.chance, self.sink = random.Random(seed), RecordingSink()
        self.client = stack.enter_context(holdfast.Client(url))
        self.relay = self.client.relay(f"r{seed}", self.sink, batch=3)
        self.idle: list[Any] = [stack.enter_context(psycopg.connect(url)) for _ in range(5)]
        engine = sqlalchemy.create_engine(url.replace("://", "+psycopg://", 1), poolclass=NullPool)
        sqlalchemy.event.listen(engine, "commit", lambda connection: self.some())  # it is about to be sent
        self.others: list[Any] = [
            stack.enter_context(
                orm.Session(engine.execution_options(isolation_level=level.name.replace("_", " ")), autobegin=False)
            )
            for level in LEVELS
        ]
        self.open: list[tuple[Any, list[tuple[str, str]]]] = []
        self.committed: list[tuple[str, str]] = []
        self.name, self.count, self.depth = f"seed {seed}:", 0, 0

    def operation(self, **options: Any) -> tuple[str, Any]:
        """Of a dataset that others work on, too, or of none; skipped while somebody else is at it."""
        self.count += 1
        name_or_key: Any = f"{self.name}{self.count}"
        if self.chance.random() < 0.5:
            name_or_key = key(f"{self.name}{self.chance.randrange(3)}", self.count)
        label = name_or_key if isinstance(name_or_key, str) else name_or_key.label
        return label, self.client.operation(name_or_key, when_locked="skip", **options)

    def some(self) -> None:
        """Others go on meanwhile."""
        if self.depth < 2:
            self.depth += 1
            for _ in range(self.chance.randrange(4)):
                self.step()
            self.depth -= 1

    def step(self) -> None:
        acts = [self.begin, self.joined, self.joined, self.end, self.own, self.own, self.outside, self.relay.step]
        self.chance.choice(acts)()

    def begin(self) -> None:
        if self.idle:
            mine = self.idle.pop(self.chance.randrange(len(self.idle)))
            mine.isolation_level = self.chance.choice(LEVELS)
            self.look(mine)
            self.open.append((mine, []))

    def look(self, mine: Any) -> None:
        """From here on it may have its snapshot, or its number, or both."""
        sql = self.chance.choice(["select 1", "select pg_current_xact_id()"])
        mine.execute(sql.encode() if isinstance(mine, psycopg.Connection) else sqlalchemy.text(sql))

    def joined(self) -> None:
        if not self.open:
            return
        mine, written = entry = self.chance.choice(self.open)
        label, operation = self.operation(tx=mine)
        self.open.remove(entry)  # it is at this now, and goes on with nothing else
        with self.unless_refused(mine, written):
            if self.chance.random() < 0.2:
                mine.execute(f"set constraints all {self.chance.choice(['immediate', 'deferred'])}".encode())
            match self.chance.randrange(4):
                case 0:
                    with mine.transaction(force_rollback=True):
                        operation.run(self.some)
                case number:
                    written += self.run(mine, label, operation, fails=number == 1)

    @contextmanager
    def unless_refused(self, mine: Any, written: Any) -> Iterator[None]:
        """With SERIALIZABLE others may be in the way: then nothing of it has happened."""
        try:
            yield
        except SerializationFailure:
            mine.rollback()
            self.idle.append(mine)
        else:
            self.open.append((mine, written))

    def end(self) -> None:
        if self.open:
            mine, written = self.open.pop(self.chance.randrange(len(self.open)))
            self.idle.append(mine)
            if self.chance.random() < 0.2:
                mine.rollback()
                return
            with suppress(SerializationFailure):
                mine.commit()
                self.committed += written

    def own(self) -> None:
        """In a transaction that run() begins and commits, by itself or one statement after the other."""
        line = self.chance.choice([line for line in (self.idle, self.others) if line] or [[]])
        if not line:
            return
        mine = line.pop(self.chance.randrange(len(line)))
        if isinstance(mine, psycopg.Connection):
            mine.isolation_level, mine.autocommit = self.chance.choice(LEVELS), True
        label, operation = self.operation(tx=mine)
        self.committed += self.run(mine, label, operation, fails=self.chance.random() < 0.2)
        if isinstance(mine, psycopg.Connection):
            mine.autocommit = False
        line.append(mine)

    def run(self, mine: Any, label: str, operation: Any, *, fails: bool) -> list[tuple[str, str]]:
        """What is to be told of it, after what was done inside of it if that is not taken back with it."""
        inner: list[tuple[str, str]] = []

        def work() -> None:
            inner.clear()
            self.look(mine)
            self.some()
            if self.chance.random() < 0.4:
                inner.extend(self.run(mine, *self.operation(tx=mine), fails=False))
            if fails:
                raise Broken

        try:
            done = operation.run(work).status == "success"
        except Broken:
            return [(label, "START"), (label, "FAIL")]
        return [*inner, (label, "START"), (label, "COMPLETE")] if done else []

    def outside(self) -> None:
        """Two commits of its own: that it begins, and that it is done."""
        label, operation = self.operation()

        def work() -> None:
            self.committed.append((label, "START"))
            self.some()

        if operation.run(work).status == "success":
            self.committed.append((label, "COMPLETE"))


def test_what_was_committed_before_is_told_before_whatever_was_open_at_once(postgres_url: str) -> None:
    for seed in (7, 18):  # between them is a case of everything
        with ExitStack() as stack:
            world = Interleaved(postgres_url, seed, stack)
            for _ in range(30):
                world.step()
            while world.open:
                world.end()
            world.relay.step()
            assert [each for each in world.sink.received() if world.name in each[0]] == world.committed, f"seed {seed}"
            assert world.client.operations.verify().passed
            assert world.client.relays.verify([json.dumps(each.as_dict()) for each in world.sink]).problems == ()


def test_what_is_joined_is_logged_where_triggers_are_switched_off(postgres_url: str) -> None:
    """As who loads much data does."""
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine:
        mine.execute("set session_replication_role = replica")
        client.operation("a", tx=mine).run(int)
        mine.commit()
        assert [each.type for each in client.relays.events()] == ["START", "COMPLETE"]


def test_on_sqlite_the_one_who_writes_is_the_one_who_commits_next(sqlite_url: str) -> None:
    path, sink = sqlite_url.removeprefix("sqlite:///"), RecordingSink()
    with (
        holdfast.Client(sqlite_url) as client,
        closing(sqlite3.connect(path, timeout=0)) as first,
        closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as second,
    ):
        relay = client.relay("r", sink)
        relay.step()
        for end in (first.rollback, first.commit):
            first.execute("begin")
            client.operation("a", tx=first).run(int)
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                client.operation("b", tx=second).run(int)
            assert list(client.relays.events()) == sink
            end()
            relay.step()
        client.operation("b", tx=second).run(int)
        relay.step()
    assert sink.received() == [(label, type) for label in "ab" for type in ("START", "COMPLETE")]
