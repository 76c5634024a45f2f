"""One sandbox as last read from its folder, and its supervisor: start it, be woken by it, order it to end."""

from __future__ import annotations

import asyncio
import os
import stat
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
RETRY_AFTER = 1.0
"""Seconds between two starts of a supervisor."""


@dataclass(eq=False)
class Sandbox:
    folder: Path
    facts: Facts
    description: dict[str, Any] = field(default_factory=dict)
    """What clients see."""
    life: int | None = None
    """The FIFO ``life``, while the driver reads it."""
    child: subprocess.Popen[bytes] | None = None
    """Its supervisor, if this driver started it."""
    retry_at: float = 0.0
    ordered_grace: float | None = None
    """The grace that the supervisor was last ordered to end with."""
    end_by: float | None = None
    """When it should have ended: the supervisor is killed a while later, also if it cannot be ordered to."""
    removed: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """From a folder on disk, which may be damaged."""
        try:
            return cls(folder, store.read_facts(folder))
        except store.Damaged as damage:
            return cls(folder, store.damaged(folder, str(damage)))

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def run(self) -> str:
        return str(self.facts.spec["run"])

    def start(self, open_files: int | None) -> None:
        """Start a supervisor. It acquires the lock of the folder first and runs the program only if none has before, so
        a second supervisor does no harm. Its sandbox can read its variables: it gets none of ours, e.g. the token."""
        if time.monotonic() < self.retry_at:
            return
        self.retry_at = time.monotonic() + RETRY_AFTER
        command = [sys.executable, "-I", "-S", SUPERVISOR, str(self.folder), self.run]
        if open_files is not None:
            command.append(str(open_files))
        variables = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        errors_file = self.folder / "supervisor.err"
        try:
            with os.fdopen(store.open_file(errors_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as errors:
                self.child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True,
                    env=variables,
                )  # fmt: skip
        except OSError as error:
            self.facts.trouble = f"its supervisor cannot be started: {error.strerror}"

    def reap_supervisor(self) -> bool:
        """True when a supervisor that this driver started has ended; it is forgotten, and an error of it recorded."""
        if self.child is None or self.child.poll() is None:
            return False
        if self.child.returncode:
            self.facts.trouble = f"its supervisor ended with {self.child.returncode}"
        self.child = None
        return True

    def subscribe(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when the supervisor reports a change, and when it dies. The supervisor opens `life` before it
        locks: while its lock is held, its death is always noticed. Raises Damaged."""
        if self.life is None:
            try:
                self.life = store.open_file(self.folder / "life", os.O_RDONLY, stat.S_ISFIFO)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise store.unreadable(self.folder / "life", error) from None
            asyncio.get_running_loop().add_reader(self.life, self._read_life, wake)

    def _read_life(self, wake: Callable[[], None]) -> None:
        assert self.life is not None
        try:
            is_closed = not os.read(self.life, 4096)
        except BlockingIOError:
            return
        if is_closed:
            self.unsubscribe()
        wake()

    def unsubscribe(self) -> None:
        if self.life is not None:
            asyncio.get_running_loop().remove_reader(self.life)
            os.close(self.life)
            self.life = None

    def order_end(self, grace: float) -> bool:
        """Order the supervisor to end the sandbox. False when it has not started yet, or has just ended."""
        end_by = time.monotonic() + grace
        self.end_by = end_by if self.end_by is None else min(self.end_by, end_by)
        try:
            descriptor = store.open_file(self.folder / "orders", os.O_WRONLY, stat.S_ISFIFO)
        except OSError:
            return False
        try:
            os.write(descriptor, b"end %f\n" % grace)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        self.ordered_grace = grace
        return True
