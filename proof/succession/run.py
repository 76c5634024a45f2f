"""A succession run: three replicas behind proxies, a driver whose backends change, and a leader that is replaced."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import holdfast
from holdfast.testing.checker.checks import CheckVerdict
from holdfast.testing.fake_driver import FakeDriver
from holdfast.testing.history import Recorder
from holdfast.testing.postgres import Postgres
from holdfast.testing.proxy import Proxy
from holdfast.testing.server import until
from holdfast.testing.standstill import Standstill
from proof.succession.replica import ELECTOR, TYPE, Job
from proof.succession.verdicts import ExpectedState, judge

FAULTS = ("kill", "pause", "cut")
_PATIENCE = 60.0
_READY: tuple[bool | None, ...] = (True, False, None)


class SuccessionRun:
    """``records`` sandboxes and three replicas.

    ``replace_leader()`` takes the leader away once, and waits until all records agree with the driver again.
    """

    def __init__(self, folder: Path, seed: int, *, ttl: float, grace: float, records: int) -> None:
        self._folder, self._random, self._ttl = folder, random.Random(seed), ttl
        self._resources = ExitStack()
        self.faults: Counter[str] = Counter()
        self.gaps: list[float] = []
        """Seconds from each fault until all records agreed with the driver again."""
        self._driver = FakeDriver(folder)
        self._expected = ExpectedState({}, {}, {}, grace)
        self._stopped = threading.Event()
        self._ids = [f"sb-{number:03}" for number in range(records)]
        self._job = Job("", str(folder), "", self._ids, ttl, grace, seed)
        self._replicas: dict[str, tuple[Proxy, subprocess.Popen[bytes]]] = {}

    def __enter__(self) -> Self:
        self.standstill = self._resources.enter_context(Standstill())
        server = self._resources.enter_context(Postgres.create())
        url = server.database()
        self._client = self._resources.enter_context(holdfast.Client(url))
        self._client.migrate()
        self._since = self._client.objects.cursor()
        for id in self._ids:
            self._client.objects.put_if(TYPE, id, {"note": None}, holdfast.MustCreate())
            self._set_random_state(id)
        for number in range(3):
            proxy = self._resources.enter_context(Proxy(url))
            self._start(f"replica-{number}", proxy)
        self._resources.callback(self._stop_replicas)
        observer = threading.Thread(target=self._observe_removals, args=(url,), daemon=True)
        observer.start()
        self._resources.callback(observer.join, _PATIENCE)
        self._resources.callback(self._stopped.set)
        until(self._records_agree, what="the first records agree", timeout=_PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def replace_leader(self, kind: str | None = None) -> None:
        """Cause a fault of the leader at a random moment, change backends, and wait for its successor."""
        time.sleep(self._random.uniform(0, self._ttl / 2))
        kind = kind or self._random.choice(FAULTS)
        until(lambda: self._leader() is not None, what="a replica leads", timeout=_PATIENCE)
        name = self._leader() or ""
        self.faults[kind] += 1
        fault: Callable[[str], Any] = {"kill": self._kill, "pause": self._pause, "cut": self._cut}[kind]
        self._change_backends()
        with fault(name):
            started = time.monotonic()
            self._change_backends()
            until(lambda: self._leader() not in (None, name), what=f"{name} is succeeded", timeout=_PATIENCE)
            until(self._records_agree, what=f"the records agree after {kind} of {name}", timeout=_PATIENCE)
            self.gaps.append(time.monotonic() - started)

    def verdicts(self) -> list[CheckVerdict]:
        """Wait until orphans are pruned, stop the replicas, and check."""
        until(self._is_pruned, what="orphans are removed", timeout=_PATIENCE + self._expected.grace)
        until(
            lambda: self._expected.lost.keys() <= self._expected.removed.keys(),
            what="their removal is seen",
            timeout=_PATIENCE,
        )
        self._stop_replicas()
        with Recorder(self._folder / "history", "reader") as record:
            for sandbox in self._records():
                record.invoke("read", sandbox.id, value=sandbox.payload["note"]).ok()
        with self._client.objects.watch(TYPE, since=self._since) as watch:
            changes = list(iter(lambda: watch.next(timeout=0), None))
        return judge(self._folder / "history", self._expected, {each.id for each in self._records()}, changes)

    def _observe_removals(self, url: str) -> None:
        """Note when records are removed, as a client that only watches sees it."""
        with holdfast.Client(url) as client, client.objects.watch(TYPE, since=self._since) as changes:
            while not self._stopped.is_set():
                change = changes.next(timeout=0.5)
                if change is not None and change.kind == "deleted":
                    self._expected.removed[change.id] = time.time()

    def _change_backends(self) -> None:
        for id in self._random.sample(sorted(self._expected.ready), 3):
            self._set_random_state(id)
        if self._random.random() < 0.4:
            self._remove_briefly(self._random.choice(sorted(self._expected.ready)))
        if self._random.random() < 0.2 and len(self._expected.ready) > len(self._ids) / 2:
            self._remove_backend(self._random.choice(sorted(self._expected.ready)))

    def _set_random_state(self, id: str) -> None:
        self._expected.ready[id] = self._random.choice(_READY)
        self._driver.put(id, self._expected.ready[id], terminal=True, publish=self._random.random() < 0.5)

    def _remove_briefly(self, id: str) -> None:
        """Remove a backend for a moment, far shorter than the grace, and publish both events."""
        gone = time.time()
        self._driver.remove(id)
        self._driver.put(id, self._expected.ready[id], terminal=True)
        if time.time() - gone >= self._expected.grace:  # the machine stood still: it may have been removed
            self._remove_backend(id, gone)

    def _remove_backend(self, id: str, gone: float | None = None) -> None:
        del self._expected.ready[id]
        self._expected.lost[id] = time.time() if gone is None else gone
        self._driver.remove(id, publish=self._random.random() < 0.5)

    def _records(self) -> list[Any]:
        return self._client.objects.list(TYPE, limit=10_000)

    def _records_agree(self) -> bool:
        phases = {each.id: each.payload.get("status", {}) for each in self._records()}
        return all(
            phases[id].get("phase") == {True: "Ready", False: "Error", None: "Provisioning"}[ready]
            and "missing_since" not in phases[id]
            for id, ready in self._expected.ready.items()
        )

    def _is_pruned(self) -> bool:
        return not self._expected.lost.keys() & {each.id for each in self._records()}

    def _leader(self) -> str | None:
        lease = self._client.leases.get(ELECTOR)
        return None if lease is None else lease.holder.rpartition(":")[0]

    def _start(self, name: str, proxy: Proxy) -> None:
        job = self._job._replace(url=proxy.url, worker=name)
        command = [sys.executable, "-m", "proof.succession.replica", json.dumps(job._asdict())]
        with (self._folder / "replicas.log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        self._replicas[name] = (proxy, process)

    @contextmanager
    def _kill(self, name: str) -> Iterator[None]:
        proxy, process = self._replicas[name]
        process.kill()
        process.communicate()
        yield
        self._start(name, proxy)

    @contextmanager
    def _pause(self, name: str) -> Iterator[None]:
        _, process = self._replicas[name]
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    @contextmanager
    def _cut(self, name: str) -> Iterator[None]:
        proxy, _ = self._replicas[name]
        self._random.choice([proxy.stall, proxy.reset, proxy.half_open])()
        try:
            yield
        finally:
            proxy.heal()

    def _stop_replicas(self) -> None:
        for _, process in self._replicas.values():
            if process.stdin is not None:
                process.stdin.close()
        for _, process in self._replicas.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
            process.kill()
            process.wait()
