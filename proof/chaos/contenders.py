"""The contenders of a scenario: a fixed number of processes, each replaced when it ends."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from proof.chaos.contender import Job

FAILPOINTS = (
    "after:lease_acquire=kill%1",
    "before:lease_release=kill%1",
    "after:lease_acquire=error%2",
    "after:lease_release=error%2",
    "after:lease_renew=error%5",
    "after:beat_renew=error%10",
    "before:beat_renew=delay:0.5%20",
    "before:lease_acquire=pause:0.5%2",
)
"""Some contenders are started with one of these."""


class Contenders:
    """``size`` processes that use the ``urls`` in turn."""

    def __init__(self, urls: Sequence[str], job: Job, size: int) -> None:
        self._urls, self._job, self._size = urls, job, size
        self._random = random.Random(job.seed)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._doomed: set[int] = set()
        """The pids of processes with a failpoint that kills."""
        self.started = 0
        self.failpoints: Counter[str] = Counter()
        """How many were started with each failpoint."""
        self.crashed: list[str] = []
        """Those that ended unexpectedly, with their status; contenders.log says why."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._replace_ended, name="contenders", daemon=True)

    def pids(self) -> list[int]:
        return [process.pid for process in list(self._processes) if process.poll() is None]

    def dismiss(self) -> None:
        """Kill one half, with all leases they hold, and let the others end in order; then call ``wait``."""
        self._stopped.set()
        self._thread.join()
        self._killed = self._processes[1::2]
        for process in self._killed:
            process.kill()
        for process in self._processes[::2]:
            _close(process)

    def wait(self, patience: float = 60.0) -> list[int]:
        """Wait for all to end. Returns the pids of those that have not."""
        deadline = time.monotonic() + patience
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            expected = {-signal.SIGKILL} if process in self._killed else {0}
            if process.pid in self._doomed:  # perhaps at its last release, after dismiss()
                expected.add(-signal.SIGKILL)
            if process.returncode is not None and process.returncode not in expected:
                self.crashed.append(f"{process.pid} ended with {process.returncode} after dismiss()")
        return self.pids()

    def __enter__(self) -> Self:
        self._processes = [self._start() for _ in range(self._size)]
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        for process in self._processes:
            process.kill()
            process.wait()
            _close(process)

    def _replace_ended(self) -> None:
        while not self._stopped.wait(0.1):
            for number, process in enumerate(self._processes):
                if process.poll() is not None:
                    if process.returncode != -signal.SIGKILL:
                        self.crashed.append(f"{process.pid} ended with {process.returncode}")
                    _close(process)
                    self._processes[number] = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.started += 1
        url = self._urls[self.started % len(self._urls)]
        job = self._job._replace(url=url, worker=f"contender-{self.started}")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        if self._random.random() < 0.4:
            environment["HOLDFAST_FAILPOINTS"] = self._random.choice(FAILPOINTS)
            self.failpoints[environment["HOLDFAST_FAILPOINTS"]] += 1
        command = [sys.executable, "-m", "proof.chaos.contender", json.dumps(job._asdict())]
        with (Path(job.folder) / "contenders.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )  # a new session: Ctrl-C must not reach it
        if "=kill" in environment.get("HOLDFAST_FAILPOINTS", ""):
            self._doomed.add(process.pid)
        return process


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
