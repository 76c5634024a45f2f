"""The contenders of a lane: so many processes, each replaced when it dies."""

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

from proof.chaos.contender import Errand

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
"""What may be wrong with a contender from its birth."""


class Crew:
    """``size`` contenders at ``urls``, in turn."""

    def __init__(self, urls: Sequence[str], errand: Errand, size: int) -> None:
        self._urls, self._errand, self._size = urls, errand, size
        self._random = random.Random(errand.seed)
        self._members: list[subprocess.Popen[bytes]] = []
        self._doomed: set[int] = set()
        """The pids of those that were born with a failpoint which kills."""
        self.started = 0
        self.failpoints: Counter[str] = Counter()
        """How many were started with which."""
        self.fell: list[str] = []
        """How those ended that should not have ended; why is in contenders.log."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="crew", daemon=True)

    def pids(self) -> list[int]:
        return [member.pid for member in list(self._members) if member.poll() is None]

    def dismiss(self) -> None:
        """One half is killed, with whatever it holds, and the others are told to go; ``wait`` for them."""
        self._over.set()
        self._thread.join()
        self._killed = self._members[1::2]
        for member in self._killed:
            member.kill()
        for member in self._members[::2]:
            _close(member)

    def wait(self, patience: float = 60.0) -> list[int]:
        """Those that are still there after a while."""
        deadline = time.monotonic() + patience
        for member in self._members:
            with suppress(subprocess.TimeoutExpired):
                member.wait(max(0.0, deadline - time.monotonic()))
        for member in self._members:
            fates = {-signal.SIGKILL} if member in self._killed else {0}
            if member.pid in self._doomed:  # be it at the last release, when it was told to go
                fates.add(-signal.SIGKILL)
            if member.returncode is not None and member.returncode not in fates:
                self.fell.append(f"{member.pid} ended with {member.returncode} when it was told to go")
        return self.pids()

    def __enter__(self) -> Self:
        self._members = [self._start() for _ in range(self._size)]
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        for member in self._members:
            member.kill()
            member.wait()
            _close(member)

    def _keep_up(self) -> None:
        while not self._over.wait(0.1):
            for number, member in enumerate(self._members):
                if member.poll() is not None:
                    if member.returncode != -signal.SIGKILL:
                        self.fell.append(f"{member.pid} ended with {member.returncode}")
                    _close(member)
                    self._members[number] = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.started += 1
        url = self._urls[self.started % len(self._urls)]
        errand = self._errand._replace(url=url, worker=f"contender-{self.started}")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        if self._random.random() < 0.4:
            environment["HOLDFAST_FAILPOINTS"] = self._random.choice(FAILPOINTS)
            self.failpoints[environment["HOLDFAST_FAILPOINTS"]] += 1
        command = [sys.executable, "-m", "proof.chaos.contender", json.dumps(errand._asdict())]
        with (Path(errand.folder) / "contenders.log").open("ab") as log:
            member = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )  # of its own, so that Ctrl-C is for us alone
        if "=kill" in environment.get("HOLDFAST_FAILPOINTS", ""):
            self._doomed.add(member.pid)
        return member


def _close(member: subprocess.Popen[bytes]) -> None:
    if member.stdin is not None:
        with suppress(BrokenPipeError):
            member.stdin.close()
