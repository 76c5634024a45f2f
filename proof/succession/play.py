"""The play: replicas, their ways to the database, what the driver says, and a leader that is taken away in each act."""

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
from proof.succession.judge import Truth, judge
from proof.succession.replica import ELECTOR, TYPE, Errand

FAULTS = ("kill", "pause", "cut")
_PATIENCE = 60.0
_READY: tuple[bool | None, ...] = (True, False, None)


class Play:
    """``records`` sandboxes, three replicas. ``act()`` takes the leader away once and waits until all is true again."""

    def __init__(self, folder: Path, seed: int, *, ttl: float, grace: float, records: int) -> None:
        self._folder, self._random, self._ttl = folder, random.Random(seed), ttl
        self._stage = ExitStack()
        self.faults: Counter[str] = Counter()
        self.gaps: list[float] = []
        """Seconds from each fault until all records were true again."""
        self._yard = FakeDriver(folder)
        self._truth = Truth({}, {}, {}, grace)
        self._over = threading.Event()
        self._ids = [f"sb-{number:03}" for number in range(records)]
        self._errand = Errand("", str(folder), "", self._ids, ttl, grace, seed)
        self._replicas: dict[str, tuple[Proxy, subprocess.Popen[bytes]]] = {}

    def __enter__(self) -> Self:
        self.standstill = self._stage.enter_context(Standstill())
        server = self._stage.enter_context(Postgres.create())
        url = server.database()
        self._client = self._stage.enter_context(holdfast.Client(url))
        self._client.migrate()
        self._since = self._client.objects.cursor()
        for id in self._ids:
            self._client.objects.put_if(TYPE, id, {"note": None}, holdfast.MustCreate())
            self._say(id)
        for number in range(3):
            proxy = self._stage.enter_context(Proxy(url))
            self._start(f"replica-{number}", proxy)
        self._stage.callback(self._end)
        witness = threading.Thread(target=self._witness, args=(url,), daemon=True)
        witness.start()
        self._stage.callback(witness.join, _PATIENCE)
        self._stage.callback(self._over.set)
        until(self._is_true, what="the first records are true", timeout=_PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._stage.close()

    def act(self, kind: str | None = None) -> None:
        """Something happens to whoever leads, at a moment of no consequence, and to what it should know."""
        time.sleep(self._random.uniform(0, self._ttl / 2))
        kind = kind or self._random.choice(FAULTS)
        until(lambda: self._leader() is not None, what="somebody leads", timeout=_PATIENCE)
        name = self._leader() or ""
        self.faults[kind] += 1
        fault: Callable[[str], Any] = {"kill": self._kill, "pause": self._pause, "cut": self._cut}[kind]
        self._change_something()
        with fault(name):
            began = time.monotonic()
            self._change_something()
            until(lambda: self._leader() not in (None, name), what=f"{name} is succeeded", timeout=_PATIENCE)
            until(self._is_true, what=f"the records are true after {kind} of {name}", timeout=_PATIENCE)
            self.gaps.append(time.monotonic() - began)

    def verdicts(self) -> list[CheckVerdict]:
        """When the orphans had their grace: everyone goes home, and is judged."""
        until(self._is_pruned, what="what is gone is removed", timeout=_PATIENCE + self._truth.grace)
        until(lambda: self._truth.lost.keys() <= self._truth.removed.keys(), what="that is seen", timeout=_PATIENCE)
        self._end()
        with Recorder(self._folder / "history", "reader") as record:
            for each in self._records():
                record.invoke("read", each.id, value=each.payload["note"]).ok()
        with self._client.objects.watch(TYPE, since=self._since) as changes:
            told = list(iter(lambda: changes.next(timeout=0), None))
        return judge(self._folder / "history", self._truth, {each.id for each in self._records()}, told)

    def _witness(self, url: str) -> None:
        """When records are removed, as somebody sees it who only watches."""
        with holdfast.Client(url) as client, client.objects.watch(TYPE, since=self._since) as changes:
            while not self._over.is_set():
                change = changes.next(timeout=0.5)
                if change is not None and change.kind == "deleted":
                    self._truth.removed[change.id] = time.time()

    def _change_something(self) -> None:
        for id in self._random.sample(sorted(self._truth.ready), 3):
            self._say(id)
        if self._random.random() < 0.4:
            self._blink(self._random.choice(sorted(self._truth.ready)))
        if self._random.random() < 0.2 and len(self._truth.ready) > len(self._ids) / 2:
            self._lose(self._random.choice(sorted(self._truth.ready)))

    def _say(self, id: str) -> None:
        self._truth.ready[id] = self._random.choice(_READY)
        self._yard.put(id, self._truth.ready[id], terminal=True, publish=self._random.random() < 0.5)

    def _blink(self, id: str) -> None:
        """It is gone for a moment, far shorter than the grace, and this is told."""
        gone = time.time()
        self._yard.remove(id)
        self._yard.put(id, self._truth.ready[id], terminal=True)
        if time.time() - gone >= self._truth.grace:  # we stood still meanwhile: it may rightly have been removed
            self._lose(id, gone)

    def _lose(self, id: str, gone: float | None = None) -> None:
        del self._truth.ready[id]
        self._truth.lost[id] = time.time() if gone is None else gone
        self._yard.remove(id, publish=self._random.random() < 0.5)

    def _records(self) -> list[Any]:
        return self._client.objects.list(TYPE, most=10_000)

    def _is_true(self) -> bool:
        phases = {each.id: each.payload.get("status", {}) for each in self._records()}
        return all(
            phases[id].get("phase") == {True: "Ready", False: "Error", None: "Provisioning"}[ready]
            and "missing_since" not in phases[id]
            for id, ready in self._truth.ready.items()
        )

    def _is_pruned(self) -> bool:
        return not self._truth.lost.keys() & {each.id for each in self._records()}

    def _leader(self) -> str | None:
        lease = self._client.leases.get(ELECTOR)
        return None if lease is None else lease.holder.rpartition("/")[0]

    def _start(self, name: str, proxy: Proxy) -> None:
        errand = self._errand._replace(url=proxy.url, worker=name)
        command = [sys.executable, "-m", "proof.succession.replica", json.dumps(errand._asdict())]
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

    def _end(self) -> None:
        for _, process in self._replicas.values():
            if process.stdin is not None:
                process.stdin.close()
        for _, process in self._replicas.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
            process.kill()
            process.wait()
