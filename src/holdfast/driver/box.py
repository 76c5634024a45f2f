"""One sandbox as the driver last saw it, and its ways to the supervisor: start it, hear it, order it to end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from holdfast.driver import store
from holdfast.driver.spec import Facts

SUPERVISOR = str(Path(__file__).parent / "supervisor" / "start.py")
RETRY = 1.0
"""Seconds until a supervisor that could not be started is tried again."""


@dataclass(eq=False)
class Box:
    folder: Path
    facts: Facts
    told: dict[str, Any] = field(default_factory=dict)
    life: int | None = None
    child: subprocess.Popen[bytes] | None = None
    """Its supervisor, if this driver started it."""
    retry_at: float = 0.0
    ordered: float | None = None
    end_by: float | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def found(cls, folder: Path) -> Self:
        """One that is on the disk, be it damaged."""
        try:
            return cls(folder, store.facts(folder))
        except store.Damaged as damage:
            return cls(folder, store.damaged(folder, str(damage)))

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def run(self) -> str:
        return str(self.facts.spec["run"])

    def start(self, open_files: int | None) -> None:
        """It decides under the lock whether it is the one to run the program, so that one too many does no harm."""
        if time.monotonic() < self.retry_at:
            return
        self.retry_at = time.monotonic() + RETRY
        command = [sys.executable, "-I", "-S", SUPERVISOR, str(self.folder), self.run]
        if open_files is not None:
            command.append(str(open_files))
        try:
            with (self.folder / "supervisor.err").open("wb") as errors:
                self.child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True
                )
        except OSError as error:
            self.facts.trouble = f"its supervisor cannot be started: {error.strerror}"

    def bury(self) -> bool:
        """Whether a supervisor that this driver started has ended."""
        if self.child is None or self.child.poll() is None:
            return False
        if self.child.returncode:
            self.facts.trouble = f"its supervisor ended with {self.child.returncode}"
        self.child = None
        return True

    def listen(self, rung: Callable[[], None]) -> None:
        """Hear it when the supervisor rings or dies. It opens `life` before it takes the lock: whoever sees the lock
        taken can be sure to be told of its end."""
        if self.life is None:
            self.life = os.open(self.folder / "life", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            asyncio.get_running_loop().add_reader(self.life, self._hear, rung)

    def _hear(self, rung: Callable[[], None]) -> None:
        assert self.life is not None
        try:
            ended = not os.read(self.life, 4096)
        except BlockingIOError:
            return
        if ended:
            self.deafen()
        rung()

    def deafen(self) -> None:
        if self.life is not None:
            asyncio.get_running_loop().remove_reader(self.life)
            os.close(self.life)
            self.life = None

    def order(self, grace: float) -> bool:
        """Tell the supervisor to end it; False when it is not yet there, or just gone: the next look knows."""
        try:
            descriptor = os.open(self.folder / "orders", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            os.write(descriptor, b"end %f\n" % grace)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        self.ordered, end_by = grace, time.monotonic() + grace
        self.end_by = end_by if self.end_by is None else min(self.end_by, end_by)
        return True
