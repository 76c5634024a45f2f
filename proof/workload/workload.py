"""The worker processes of a run, what they work on, and a probe that writes without a pause."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import holdfast
from holdfast.testing.fake_driver import FakeDriver
from holdfast.testing.history import DatabaseRows, Recorder, now, write_database
from holdfast.testing.resource import Resource
from holdfast.testing.standstill import Standstill
from proof import protected_tables
from proof.workload.verdicts import FinalState
from proof.workload.worker import (
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

PROBE = "probe"
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


class WaitFor(Protocol):
    def __call__(self, condition: Callable[[], bool], *, what: str) -> None:
        """Raises TimeoutError that names ``what``."""


class Workload(Resource):
    """Starts the workers on an empty database. ``folder``: for their logs; the history is in a folder below."""

    def __init__(
        self,
        url: str,
        folder: Path,
        record: Recorder,
        standstill: Standstill,
        wait_for: WaitFor,
        *,
        seed: int,
        ttl: float,
        sane_clocks: bool,
        patience: float,
    ) -> None:
        self._url, self._folder, self._record, self._standstill, self._wait_for = (
            url, folder, record, standstill, wait_for,
        )  # fmt: skip
        self._seed, self._ttl, self._sane_clocks, self._patience = seed, ttl, sane_clocks, patience
        self._random = random.Random(seed)
        self._history = folder / "history"
        self._resources = ExitStack()
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        """By name."""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._acknowledged: list[float] = []
        """When writes of the probe were acknowledged."""
        self._ready: dict[str, bool] = {}
        """What the driver reports of each sandbox."""
        self._driver = FakeDriver(folder)
        self._killed: set[str] = set()
        self.started = 0
        """How many workers were started."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
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
        self._resources.callback(self._kill_all)
        for _ in range(_WORKERS):
            self._start_worker()
        probe = threading.Thread(target=self._probe, name=PROBE)
        probe.start()
        self._resources.callback(probe.join)
        self._resources.callback(self._stopped.set)

    def close(self) -> None:
        self._resources.close()

    def change_states(self) -> None:
        """Let the driver report something else of two sandboxes."""
        for id in self._random.sample(_SANDBOXES, 2):
            self._set_state(id)

    def pids(self) -> list[int]:
        with self._lock:
            return [process.pid for process in self._workers.values() if process.poll() is None]

    def kill_worker(self) -> None:
        """SIGKILL to one of them, and start another in its place."""
        with self._lock:
            name = self._random.choice(list(self._workers))
            process = self._workers.pop(name)
            self._killed.add(name)
            _kill(process)
            self._start_worker()

    def wait_settled(self, when: str) -> None:
        """Until the sandboxes agree with the driver, and all shards and the elector's lease are held."""
        for what, condition in (
            ("the reconciler has caught up", lambda: not self._disagreeing()),
            ("all shards are held", self._all_shards_are_held),
            ("the elector's lease is held", lambda: self._client.leases.get(ELECTOR) is not None),
        ):
            self._wait_for(lambda: self._is_answered_true(condition), what=f"{what} {when}")  # noqa: B023
        self.wait_acknowledged(when)

    def wait_acknowledged(self, when: str) -> None:
        """Until a write is acknowledged that began later than now. A write in flight may have begun before."""
        for _ in range(2):
            count = len(self._acknowledged)
            self._wait_for(lambda: len(self._acknowledged) > count, what=f"a write is acknowledged {when}")  # noqa: B023

    def longest_pause(self, began: float, ended: float) -> float:
        """Seconds without an acknowledged write."""
        times = [at for at in list(self._acknowledged) if at <= ended]
        return max((after - max(before, began) for before, after in pairwise(times) if after > began), default=0.0)

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
        self._client.relay(RELAY, RecordedSink(self._record), ttl=self._patience).step()
        self._record.info("standstill", **self._standstill.figures())
        write_database(self._history, self._read_rows())
        return FinalState(
            changes=[(id, version) for id, version in self._execute("select id, version from proof_change")],
            events=[event.id for event in self._client.relays.events()],
            parked=len(self._client.relays.parked(RELAY)),
            disagreeing=self._disagreeing(),
            pruned=sorted(set(_SANDBOXES) - {each.id for each in objects.list(SANDBOX, limit=1000)}),
            crashed=[f"{name} ended with status {each.returncode}" for name, each in self._workers.items()
                     if each.returncode],
            killed=frozenset(self._killed),
        )  # fmt: skip

    # Conditions

    def _is_answered_true(self, condition: Callable[[], bool]) -> bool:
        """False, too, while the database does not answer. Raises RuntimeError if a worker has ended."""
        self._check_workers()
        with suppress(holdfast.EngineError):
            return condition()
        return False

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

    # Workers

    def _start_worker(self) -> None:
        self.started += 1
        name = f"worker-{self.started}"
        job = Job(
            self._url, str(self._folder), name, _LEASES, _NOTES[1:], self._since, self._ttl, _GRACE, self._seed,
            self._sane_clocks,
        )  # fmt: skip
        command = [sys.executable, "-m", "proof.workload.worker", json.dumps(job._asdict())]
        with (self._folder / "workers.log").open("ab") as log:
            self._workers[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )  # a new session: Ctrl-C must not reach it

    def _check_workers(self) -> None:
        with self._lock:
            ended = [each.returncode for each in self._workers.values() if each.poll() is not None]
        if ended:
            log = (self._folder / "workers.log").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"a worker ended with status {ended[0]}:\n{log}")

    def _close_workers(self) -> None:
        """Let them end, and wait until only their watches are left: the last note has to be the last change."""
        for process in self._workers.values():
            if process.stdin is not None:
                process.stdin.close()

        def are_quiet() -> bool:
            self._check_workers()
            return all(quiet_file(str(self._folder), name).exists() for name in self._workers)

        self._wait_for(are_quiet, what="the workers are quiet")

    def _end_workers(self) -> list[int]:
        """Wait for them. Returns the pids of those that have not ended."""
        deadline = time.monotonic() + self._patience
        for process in self._workers.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return self.pids()

    def _kill_all(self) -> None:
        for process in self._workers.values():
            _kill(process)

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
                    grant = self._client.lease(name, ttl=self._ttl, timeout=self._patience).acquire()
                except holdfast.NotAcquired as refusal:
                    call.fail(holder=refusal.holder)
                else:
                    call.ok(grant.fence)
                    after = now() - began
                    with record.invoke("release", name, grant.fence) as ending:
                        ending.ok() if grant.release() else ending.fail()
            record.info(
                "reacquired", name, after=after, bound=self._patience,
                standstill=self._standstill.seconds(began, now()),
            )  # fmt: skip

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

    def _execute(self, statement: str) -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(self._url, autocommit=True, connect_timeout=10) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
