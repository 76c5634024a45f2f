"""The contenders of a lane: so many processes, each replaced when it dies."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.testing.chaos.contender import FELL_OVER, Errand

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
    """``size`` contenders at ``urls``, in turn. ``born`` is told with which failpoint each begins."""

    def __init__(self, urls: Sequence[str], errand: Errand, size: int, *, born: Callable[[str], Any]) -> None:
        self._urls, self._errand, self._size, self._born = urls, errand, size, born
        self._random = random.Random(errand.seed)
        self._members: list[subprocess.Popen[bytes]] = []
        self._count = 0
        self.fell_over = 0
        """How many met something they did not expect; see contenders.log."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="crew", daemon=True)

    @property
    def count(self) -> int:
        """How many have been started."""
        return self._count

    def pids(self) -> list[int]:
        return [member.pid for member in list(self._members) if member.poll() is None]

    def dismiss(self, patience: float = 30.0) -> None:
        """One half is told to go, and the others are killed, so that both ends of a holder are among the last."""
        self._over.set()
        self._thread.join()
        for number, member in enumerate(self._members):
            if number % 2:
                member.kill()
            elif member.stdin is not None:
                with suppress(BrokenPipeError):
                    member.stdin.close()
        deadline = time.monotonic() + patience
        for member in self._members:
            try:
                member.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.kill()
                member.wait()
                raise RuntimeError(f"contender {member.pid} did not end when it was told to") from None

    def __enter__(self) -> Self:
        for _ in range(self._size):
            self._members.append(self._start())
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
            if member.stdin is not None:
                with suppress(BrokenPipeError):
                    member.stdin.close()

    def _keep_up(self) -> None:
        while not self._over.wait(0.1):
            for number, member in enumerate(self._members):
                if member.poll() is not None:
                    self.fell_over += member.returncode == FELL_OVER
                    if member.stdin is not None:
                        member.stdin.close()
                    self._members[number] = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._count += 1
        errand = self._errand._replace(
            url=self._urls[self._count % len(self._urls)], worker=f"contender-{self._count}", seed=self._errand.seed
        )
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        if self._random.random() < 0.4:
            environment["HOLDFAST_FAILPOINTS"] = failpoint = self._random.choice(FAILPOINTS)
            self._born(failpoint)
        command = [sys.executable, "-m", "holdfast.testing.chaos.contender", json.dumps(errand._asdict())]
        with (Path(errand.folder) / "contenders.log").open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
