"""A process that uses everything holdfast has, one thread for each part, and records what it was told.

| part       | what it does                                                                                        |
|------------|-----------------------------------------------------------------------------------------------------|
| leases     | acquires leases, writes in protected transactions, also for longer than the lease lasts             |
| shards     | holds a share of the shards, and writes in protected transactions of each                           |
| reconciler | stands for election, and reconciles records with a driver while it leads                            |
| objects    | replaces notes by compare-and-swap                                                                  |
| operations | runs operations in its own transactions, the same keys as the other workers                         |
| watch      | watches the notes, from before the first fault until the last note                                  |
| relay      | publishes the log of operations while it leads                                                      |

``Workload`` starts it, with its job as JSON. It ends in order when its standard input is closed. It never judges.
"""

import json
import random
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import psycopg

import holdfast
from holdfast.lineage import Event
from holdfast.testing.fake_driver import FakeDriver
from holdfast.testing.history import Pending, Recorder
from proof import protected_tables
from proof.chaos.contender import Belief, Contender, crash
from proof.chaos.contender import Job as ContenderJob
from proof.chaos.tables import Tables

NOTE, SANDBOX, ELECTOR, SHARDS, RELAY = "note", "sandbox", "reconciler", "sweep", "lineage"
"""Types of objects, and names of the elector, the shards and the relay."""
SHARD_COUNT = 6
LAST_NOTE = "last"
"""The id of the note that is written after the last fault. A watch ends with it."""


class Job(NamedTuple):
    url: str
    folder: str
    worker: str
    names: list[str]
    """Of leases."""
    notes: list[str]
    since: str
    """The cursor of the watch."""
    ttl: float
    grace: float
    seed: int
    sane_clocks: bool


class LeaseHolder(Contender):
    def _read_gauge(self) -> None:
        """The gauge of this process counts the leases of all its parts."""


class RecordedSink:
    def __init__(self, record: Recorder) -> None:
        self._record = record

    def publish(self, events: Sequence[Event]) -> None:
        self._record.info("relayed", ids=[event.id for event in events])


class Worker:
    def __init__(self, job: Job, client: Any) -> None:
        self._job, self._client = job, client
        self._history = str(Path(job.folder) / "history")
        self._over = threading.Event()
        self._candidacy: Pending | None = None
        self._reconciler = client.reconciler(
            SANDBOX, FakeDriver(Path(job.folder)), sweep_every=job.ttl / 2, grace=job.grace
        )
        self._elector = client.elector(ELECTOR, ttl=job.ttl, retry_every=job.ttl / 5, holder=job.worker)
        self._relay = client.relay(RELAY, RecordedSink(self._recorder("relay")), poll=0.5, ttl=job.ttl)

    def run(self) -> None:
        """Run all parts until standard input is closed."""
        parts: list[Callable[[], object]] = [
            self._hold_leases,
            self._hold_shards,
            self._lead,
            self._replace_notes,
            self._run_operations,
            self._relay.run,
        ]
        threads = [threading.Thread(target=part, name=part.__name__) for part in parts]
        watch = threading.Thread(target=self._watch, name="watch")
        for thread in (watch, *threads):
            thread.start()
        sys.stdin.read()
        self._over.set()
        self._elector.stop()
        self._relay.stop()
        for thread in threads:
            thread.join()
        quiet_file(self._job.folder, self._job.worker).touch()
        watch.join()

    def _recorder(self, part: str) -> Recorder:
        return Recorder(self._history, f"{self._job.worker}-{part}")

    def _random(self, part: str) -> random.Random:
        return random.Random(f"{self._job.seed}-{self._job.worker}-{part}")

    def _hold_leases(self) -> None:
        job = self._job
        work = ContenderJob(
            job.url, self._history, f"{job.worker}-leases", job.names, job.ttl, job.seed, job.sane_clocks
        )
        LeaseHolder(work, 1, self._client, self._over, forks=threading.Event()).run()

    def _hold_shards(self) -> None:
        """Join again after an error: to join, the database has to answer."""
        record, choice = self._recorder("shards"), self._random("shards")
        tables = Tables(self._job.url, choice, sane_clocks=self._job.sane_clocks)
        while not self._over.is_set():
            with (
                suppress(holdfast.EngineError),
                self._client.shards(SHARDS, SHARD_COUNT, ttl=self._job.ttl, holder=self._job.worker) as shards,
            ):
                self._write_to_shards(shards, tables, record, choice)
        tables.close()

    def _write_to_shards(self, shards: Any, tables: Tables, record: Recorder, choice: random.Random) -> None:
        keys = {shards.shard_of(f"key-{number}"): f"key-{number}" for number in range(SHARD_COUNT * 20)}
        begun: dict[int, bool] = {}
        """By fence: whether its takeover was acknowledged. It is tried once: one without an answer may be stored."""
        while not self._over.wait(choice.uniform(0.1, 0.3)):
            grant = shards.grant_for(choice.choice(list(keys.values())))
            if grant is None:
                continue
            if grant.fence not in begun:
                with record.invoke("takeover", grant.name, grant.fence) as call:
                    begun[grant.fence] = tables.take_over(grant, call)
            if begun[grant.fence]:
                key = uuid4().hex
                with record.invoke("write", grant.name, grant.fence, key=key) as call:
                    tables.write(grant, key, call, 0.0)

    def _lead(self) -> None:
        """The acquire is recorded when the worker becomes a candidate, and completed when it leads."""
        record = self._recorder("elector")
        self._candidacy = record.invoke("acquire", ELECTOR)

        def reconcile(term: Any) -> None:
            assert self._candidacy is not None
            self._candidacy.ok(term.fence)
            belief, ended = Belief(record), threading.Event()
            belief.begin(term)
            observer = threading.Thread(target=_observe, args=(belief, ended))
            observer.start()
            try:
                self._reconciler.run(term)
            finally:
                ended.set()
                observer.join()
                belief.end()
                self._candidacy = record.invoke("acquire", ELECTOR)

        self._elector.run(reconcile)

    def _replace_notes(self) -> None:
        record, choice, objects = self._recorder("objects"), self._random("objects"), self._client.objects
        while not self._over.wait(choice.uniform(0.02, 0.2)):
            id = choice.choice(self._job.notes)
            with suppress(holdfast.EngineError):
                replace_note(objects, id, record)

    def _run_operations(self) -> None:
        record, choice, number = self._recorder("operations"), self._random("operations"), 0
        connection: psycopg.Connection[Any] | None = None
        while not self._over.wait(choice.uniform(0.05, 0.3)):
            key = f"operation-{number}"
            with record.invoke("run", key) as call:
                try:
                    if connection is None or connection.closed:
                        connection = psycopg.connect(self._job.url, autocommit=True, connect_timeout=3)
                    outcome = self._client.operation(key, tx=connection).run(lambda: _take_effect(connection, key))  # noqa: B023
                except (holdfast.HoldfastError, psycopg.Error, ValueError) as error:
                    if isinstance(error, ValueError) and "read-only" not in str(error):
                        raise  # of the server that refuses writes, it is no mistake of ours
                    call.unknown(error=f"{type(error).__name__}: {error}"[:200])
                    if connection is not None:
                        connection.close()
                else:
                    call.ok(result=outcome.result)
                    number += 1
        if connection is not None:
            connection.close()

    def _watch(self) -> None:
        """Until the last note. After CursorExpired it lists the notes and begins anew, as its documentation says."""
        record, since = self._recorder("watch"), self._job.since
        while True:
            try:
                with self._client.objects.watch(NOTE, since=since) as watch:
                    while True:
                        change = watch.next(timeout=1)
                        if change is not None:
                            record.info("watched", change.id, version=change.version, kind=change.kind)
                            if change.id == LAST_NOTE:
                                return
            except holdfast.CursorExpired:
                with suppress(holdfast.EngineError):
                    cursor = self._client.objects.cursor()
                    notes = self._client.objects.list(NOTE, limit=1000)
                    record.info("listed", versions={each.id: each.version for each in notes})
                    if any(each.id == LAST_NOTE for each in notes):
                        return
                    since = cursor
            except holdfast.EngineError:
                since = watch.cursor or since


def quiet_file(folder: str, worker: str) -> Path:
    """Created when all parts of the worker have ended, except its watch."""
    return Path(folder) / f"{worker}.quiet"


def replace_note(objects: Any, id: str, record: Recorder) -> bool:
    """Replace the note by a new one, and record it. Returns whether this was acknowledged.

    Raises EngineError if the note cannot be read.
    """
    current = objects.get(NOTE, id)
    old, value = current.payload["value"], uuid4().hex
    with record.invoke("cas", id, old=old, value=value) as call:
        try:
            written = objects.put_if(NOTE, id, {"value": value}, holdfast.MatchVersion(current.version))
        except holdfast.Conflict:
            call.fail()
        except holdfast.EngineError as error:
            call.unknown(error=f"{type(error).__name__}: {error}"[:200])
        else:
            call.ok(version=written.version)
            return True
    return False


def _take_effect(connection: Any, key: str) -> str:
    value = uuid4().hex
    connection.execute(protected_tables.with_placeholder(protected_tables.EFFECT, "%s"), (key, value))
    return value


def _observe(belief: Belief, ended: threading.Event) -> None:
    while not ended.wait(0.1):
        belief.look()


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    threading.excepthook = crash
    try:
        with holdfast.Client(job.url) as client:
            Worker(job, client).run()
    except BaseException:
        crash()


if __name__ == "__main__":
    main()
