"""A cluster run: a Patroni cluster, worker processes, and faults of its leader, one after the other."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

import holdfast
from holdfast.testing.fake_driver import FakeDriver
from holdfast.testing.faults import faketime
from holdfast.testing.history import DatabaseRows, Recorder, now, read, write_database
from holdfast.testing.standstill import Standstill
from proof import protected_tables
from proof.cluster.node import Cut
from proof.cluster.patroni_cluster import PATIENCE, PatroniCluster
from proof.cluster.verdicts import FinalState
from proof.cluster.worker import (
    ELECTOR,
    LAST_NOTE,
    NOTE,
    RELAY,
    SANDBOX,
    SHARD_COUNT,
    SHARDS,
    Job,
    RecordedSink,
    quiet_file,
    replace_note,
)

KINDS = ("kill", "stop", "partition", "switchover", "clock")
NO_CLOCK = "libfaketime is not installed: apt-get install libfaketime"
DATABASE, PROBE = "app", "probe"
STEPS = (5.0, -5.0, 30.0, -30.0)
"""Seconds by which the leader's clock is stepped: more than the TTL of a lease, or than that of Patroni's leader."""
_LEASES = ["alpha", "beta"]
_NOTES = [PROBE, *(f"note-{number}" for number in range(6))]
_SANDBOXES = [f"sb-{number}" for number in range(6)]
_WORKERS = 3
_GRACE = 3600.0
"""Of the reconciler. No backend is removed here, so no record may be pruned."""
_PROBE_EVERY = 0.05
_CHANGES = (
    "create table proof_change (id text not null, version bigint not null)",
    """create function proof_store_change() returns trigger language plpgsql security definer as $$ begin
    insert into public.proof_change values (new.id, new.version); return null; end $$""",
    f"""create trigger proof_store_change after insert or update on holdfast.object for each row
    when (new.type = '{NOTE}') execute function proof_store_change()""",
)
"""All versions of all notes; holdfast's own log of changes is trimmed."""


class FaultRecord(NamedTuple):
    """One fault and what followed, in seconds."""

    kind: str
    detail: str
    at: float
    """Since the start of the run."""
    new_leader: float | None
    """From the fault until another node accepted writes; None if the leader stayed."""
    pause: float
    """The longest time without an acknowledged write, from the fault until the cluster was whole again."""
    standstill: float
    """How long the machine stood still meanwhile, which is part of both."""


def available_kinds() -> list[str]:
    """The kinds of faults that this machine can cause."""
    return [kind for kind in KINDS if kind != "clock" or faketime() is not None]


class ClusterRun:
    """``fail(kind)`` causes one fault, and returns when the cluster is whole again; ``finish()`` ends the workers."""

    def __init__(self, folder: Path, seed: int, *, kinds: list[str], ttl: float) -> None:
        self._folder, self._random, self._ttl, self._seed = folder, random.Random(seed), ttl, seed
        self._history = folder / "history"
        self._sane_clocks = "clock" not in kinds
        self._resources = ExitStack()
        self._workers: list[subprocess.Popen[bytes]] = []
        self._stopped = threading.Event()
        self._acknowledged: list[float] = []
        """When writes of the probe were acknowledged."""
        self._ready: dict[str, bool] = {}
        """What the driver reports of each sandbox."""
        self._driver = FakeDriver(folder)
        self.faults: list[FaultRecord] = []
        self.expired = 0
        """How often a watch was told that its cursor has expired."""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _start(self) -> None:
        self.standstill = self._resources.enter_context(Standstill())
        self._record = self._resources.enter_context(Recorder(self._history, "nemesis"))
        self._cluster = self._resources.enter_context(
            PatroniCluster(self.standstill, with_clocks=not self._sane_clocks)
        )
        self._resources.callback(self._store_logs)
        self.started = now()
        self._execute(f"create database {DATABASE}", database="postgres")
        self._url = self._cluster.url(DATABASE)
        self._client = self._resources.enter_context(holdfast.Client(self._url))
        self._client.migrate()
        for statement in (*protected_tables.TABLES, *_CHANGES):
            self._execute(statement)
        self._since = self._client.objects.cursor()
        for id in _NOTES:
            self._client.objects.put_if(NOTE, id, {"value": None}, holdfast.MustCreate())
        for id in _SANDBOXES:
            self._client.objects.put_if(SANDBOX, id, {}, holdfast.MustCreate())
            self._set_state(id)
        self._resources.callback(self._kill_workers)
        for number in range(1, _WORKERS + 1):
            self._start_worker(f"worker-{number}")
        probe = threading.Thread(target=self._probe, name="probe")
        probe.start()
        self._resources.callback(probe.join)
        self._resources.callback(self._stopped.set)
        self._wait_settled("at the start")

    def fail(self, kind: str) -> FaultRecord:
        """Cause a fault of the leader at a random moment. Raises TimeoutError if the cluster does not become whole."""
        time.sleep(self._random.uniform(0, self._ttl / 2))
        name = self._cluster.wait_leader()
        fault: Callable[[str], Any] = getattr(self, f"_{kind}")
        new_leader: float | None = None
        for id in self._random.sample(_SANDBOXES, 2):
            self._set_state(id)
        began = now()
        self._record.info("fault", fault=kind, phase="begin")
        with fault(name) as (detail, leader_leaves):
            if leader_leaves:
                self._cluster.wait_for(
                    lambda: self._cluster.successor(name) is not None, what=f"{name} is succeeded after {kind}"
                )
                new_leader = now() - began
                self._wait_acknowledged(kind)
            else:
                self._wait_acknowledged(kind)
                time.sleep(self._ttl)
                if self._cluster.successor(name) is not None:
                    new_leader = now() - began
        self._record.info("fault", fault=kind, phase="end")
        self._wait_settled(f"after {kind} of {name}")
        ended = now()
        record = FaultRecord(
            kind, detail, began - self.started, new_leader, self._longest_pause(began, ended),
            self.standstill.seconds(began, ended),
        )  # fmt: skip
        self.faults.append(record)
        return record

    def finish(self) -> FinalState:
        """Write the last note, end the workers, and read what the database has."""
        objects = self._client.objects
        self._stopped.set()
        self._close_workers()
        with self._record.invoke("cas", LAST_NOTE, old=None, value="last") as call:
            written = objects.put_if(NOTE, LAST_NOTE, {"value": "last"}, holdfast.MustCreate())
            call.ok(version=written.version)
        self._record.info("leftover", what="processes", count=len(remaining := self._end_workers()), found=remaining)
        for name in _LEASES:
            self._reacquire(name)
        for each in objects.list(NOTE, limit=1000):
            self._record.invoke("read", each.id, value=each.payload["value"]).ok()
        self._client.relay(RELAY, RecordedSink(self._record), ttl=self._ttl).step()
        self._record.info("standstill", **self.standstill.figures())
        write_database(self._history, self._read_rows())
        self.expired = sum(event.op == "listed" for event in read(self._history))
        return FinalState(
            changes=[(id, version) for id, version in self._execute("select id, version from proof_change")],
            events=[event.id for event in self._client.relays.events()],
            parked=len(self._client.relays.parked(RELAY)),
            disagreeing=self._disagreeing(),
            pruned=sorted(set(_SANDBOXES) - {each.id for each in objects.list(SANDBOX, limit=1000)}),
            crashed=[f"a worker ended with status {each.returncode}" for each in self._workers if each.returncode],
        )

    # Faults: each is a context manager that yields a description, and whether another node has to lead.

    @contextmanager
    def _kill(self, name: str) -> Iterator[tuple[str, bool]]:
        node = self._cluster.nodes[name]
        node.kill()
        yield "SIGKILL", True
        node.start()

    @contextmanager
    def _stop(self, name: str) -> Iterator[tuple[str, bool]]:
        node = self._cluster.nodes[name]
        node.pause()
        try:
            yield "SIGSTOP", True
        finally:
            node.resume()

    @contextmanager
    def _partition(self, name: str) -> Iterator[tuple[str, bool]]:
        node, cut = self._cluster.nodes[name], self._random.choice(get_args(Cut))
        from_clients = self._random.random() < 0.5
        node.isolate(cut, from_clients=from_clients)
        try:
            yield f"{cut} {'from all' if from_clients else 'from etcd and peers'}", True
        finally:
            node.heal()

    @contextmanager
    def _switchover(self, name: str) -> Iterator[tuple[str, bool]]:
        self._cluster.wait_for(lambda: self._cluster.switch_over(name), what=f"{name} is switched over")
        yield "requested", True

    @contextmanager
    def _clock(self, name: str) -> Iterator[tuple[str, bool]]:
        clock, seconds = self._cluster.clocks[name], self._random.choice(STEPS)
        clock.step(seconds)
        try:
            yield f"{seconds:+g} s", False
        finally:
            clock.heal()

    # Waiting

    def _wait_settled(self, when: str) -> None:
        """Until the cluster is whole, the sandboxes agree with the driver, and all shards are held."""
        self._cluster.wait_whole()
        for what, condition in (
            ("the reconciler has caught up", lambda: not self._disagreeing()),
            ("all shards are held", self._all_shards_are_held),
            ("the elector's lease is held", lambda: self._client.leases.get(ELECTOR) is not None),
        ):
            self._cluster.wait_for(lambda: self._is_answered_true(condition), what=f"{what} {when}")  # noqa: B023
        self._wait_acknowledged(when)

    def _is_answered_true(self, condition: Callable[[], bool]) -> bool:
        """False, too, while the database does not answer. Raises RuntimeError if a worker has ended."""
        self._check_workers()
        with suppress(holdfast.EngineError):
            return condition()
        return False

    def _wait_acknowledged(self, when: str) -> None:
        """Until a write is acknowledged that began later than now. A write in flight may have begun before."""
        for _ in range(2):
            count = len(self._acknowledged)
            self._cluster.wait_for(lambda: len(self._acknowledged) > count, what=f"a write is acknowledged {when}")  # noqa: B023

    def _disagreeing(self) -> list[str]:
        records = {each.id: each.payload.get("status", {}) for each in self._client.objects.list(SANDBOX, limit=1000)}
        return [
            id
            for id, ready in self._ready.items()
            if records.get(id, {}).get("phase") != ("Ready" if ready else "Error")
        ]

    def _all_shards_are_held(self) -> bool:
        names = {lease.name for lease in self._client.leases.list()}
        return all(f"{SHARDS}/shard/{number}" in names for number in range(SHARD_COUNT))

    def _longest_pause(self, began: float, ended: float) -> float:
        times = [at for at in list(self._acknowledged) if at <= ended]
        return max((after - max(before, began) for before, after in pairwise(times) if after > began), default=0.0)

    def _store_logs(self) -> None:
        """Keep the logs of the nodes beside the history: their folders are removed."""
        for node in self._cluster.nodes.values():
            (self._folder / f"{node.name}.log").write_text(node.log())

    # Workers

    def _start_worker(self, name: str) -> None:
        job = Job(
            self._url, str(self._folder), name, _LEASES, _NOTES[1:], self._since, self._ttl, _GRACE, self._seed,
            self._sane_clocks,
        )  # fmt: skip
        command = [sys.executable, "-m", "proof.cluster.worker", json.dumps(job._asdict())]
        with (self._folder / "workers.log").open("ab") as log:
            self._workers.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
            )  # a new session: Ctrl-C must not reach it

    def _check_workers(self) -> None:
        if ended := [each.returncode for each in self._workers if each.poll() is not None]:
            log = (self._folder / "workers.log").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"a worker ended with status {ended[0]}:\n{log}")

    def _close_workers(self) -> None:
        """Let them end, and wait until only their watches are left: the last note has to be the last change."""
        for process in self._workers:
            if process.stdin is not None:
                process.stdin.close()
        names = [f"worker-{number}" for number in range(1, _WORKERS + 1)]
        self._cluster.wait_for(
            lambda: all(quiet_file(str(self._folder), name).exists() for name in names), what="the workers are quiet"
        )

    def _end_workers(self) -> list[int]:
        """Wait for them. Returns the pids of those that have not ended."""
        deadline = time.monotonic() + PATIENCE
        for process in self._workers:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return [process.pid for process in self._workers if process.poll() is None]

    def _kill_workers(self) -> None:
        for process in self._workers:
            process.kill()
            process.wait()
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()

    def _probe(self) -> None:
        """One write after the other: what a client notices of a fault."""
        with Recorder(self._history, PROBE) as record, holdfast.Client(self._url) as client:
            while not self._stopped.wait(_PROBE_EVERY):
                with suppress(holdfast.EngineError):
                    if replace_note(client.objects, PROBE, record):
                        self._acknowledged.append(now())

    # The database

    def _set_state(self, id: str) -> None:
        self._ready[id] = self._random.random() < 0.5
        self._driver.put(id, self._ready[id], terminal=True, publish=self._random.random() < 0.5)

    def _reacquire(self, name: str) -> None:
        with Recorder(self._history, f"nemesis-{name}") as record:
            began, after = now(), None
            with record.invoke("acquire", name) as call:
                try:
                    grant = self._client.lease(name, ttl=self._ttl, timeout=PATIENCE).acquire()
                except holdfast.NotAcquired as refusal:
                    call.fail(holder=refusal.holder)
                else:
                    call.ok(grant.fence)
                    after = now() - began
                    with record.invoke("release", name, grant.fence) as ending:
                        ending.ok() if grant.release() else ending.fail()
            record.info(
                "reacquired", name, after=after, bound=PATIENCE, standstill=self.standstill.seconds(began, now())
            )

    def _read_rows(self) -> DatabaseRows:
        def rows(table: str, *columns: str) -> list[dict[str, Any]]:
            values = self._execute(f"select {', '.join(columns)} from {table}")
            return [dict(zip(columns, row, strict=True)) for row in values]

        return DatabaseRows(
            rows("proof_write", "name", "fence", "key"),
            rows("proof_takeover", "name", "fence", "older", "newest"),
            effects=rows("proof_effect", "name", "value"),
            sane_clocks=self._sane_clocks,
        )

    def _execute(self, statement: str, *, database: str = DATABASE) -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(self._cluster.url(database), autocommit=True, connect_timeout=10) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []
