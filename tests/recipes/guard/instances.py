"""Guarded processes to start, stop and rob of their lease. They print what they do, and write to a file meanwhile."""

from __future__ import annotations

import fcntl
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from holdfast.lease.trust import margin
from holdfast.testing.server import until
from holdfast.testing.standstill import Standstill
from tests.children import Child, eventually, query

TTL, HEARTBEAT = 3.0, 0.5
"""Seconds. A process that stands still for so long loses its guard, as it must: for tests in which it is lost."""
LONG: dict[str, Any] = {"ttl": 600.0, "renew_every": 100.0}
"""For tests in which it must not be lost. In the test process itself a lost guard would end all tests."""

SYNC = """
import atexit, os, sys, threading, time, logging, holdfast
url, key, file, ttl, renew_every, *flags = sys.argv[1:]
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.CRITICAL)
work = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def hang():
    while True:
        time.sleep(1)

def toil():
    while True:
        os.write(work, b"x")
        time.sleep(0.002)

def begin():
    os.write(work, b"began")
    for _ in range(3):
        threading.Thread(target=toil, daemon=True).start()
    print("works", flush=True)

if "hang" in flags:
    atexit.register(hang)
if "tidy" in flags:
    atexit.register(print, "tidy", flush=True)
client = holdfast.Client(url)
"""
GUARDED = (
    SYNC
    + """
with client.guard(key, ttl=float(ttl), renew_every=float(renew_every), strict="strict" in flags) as grant:
    begin()
    line = sys.stdin.readline()
    if "raise" in line:
        raise RuntimeError("as it was told")
print("done", flush=True)
"""
)
ASYNC = (
    SYNC
    + """
import asyncio

async def main():
    async with holdfast.AsyncClient(url) as client:
        async with client.guard(key, ttl=float(ttl), renew_every=float(renew_every), strict="strict" in flags) as grant:
            begin()
            line = await asyncio.to_thread(sys.stdin.readline) if not flags else await asyncio.sleep(1000)

asyncio.run(main())
print("done", flush=True)
"""
)


PAIRS = [("sqlite", GUARDED), ("postgres", ASYNC)]
"""Each engine and each flavour once: one flavour is generated from the other."""


class Instance(Child):
    """A guarded process, and the file it works on."""

    def __init__(
        self, url: str, key: str, folder: Path, *flags: str, program: str = GUARDED, ttl: float = TTL,
        renew_every: float = HEARTBEAT,
    ) -> None:  # fmt: skip
        self.url, self.key, self.file = url, key, folder / f"work of {key}"
        super().__init__(program, url, key, self.file, ttl, renew_every, *flags)

    def work(self) -> bytes:
        return self.file.read_bytes() if self.file.exists() else b""

    def worked_until(self) -> float:
        """Wait for its end. Returns when it last wrote to its file, which it does all the time, also while a hook
        hangs. On a busy machine, the test would notice the end much later."""
        self.wait()
        return self.file.stat().st_mtime

    def said(self) -> str:
        lines = []
        while (line := self.line()) != "<end>":
            lines.append(line)
        return "\n".join(lines)


def seconds_late(instance: Instance, end: float, standstill: Standstill) -> float:
    """Wait for the end of the process. Returns the seconds that it worked beyond ``end``, the end of its TTL, without
    the time that the machine stood still since the end of its trust. Negative: it was killed in time."""
    last, to_monotonic = instance.worked_until(), time.monotonic() - time.time()
    end_of_trust = end - margin(TTL)
    return last - end - standstill.seconds(end_of_trust + to_monotonic, last + to_monotonic)


def begun(stack: ExitStack, begin: Callable[[], Instance]) -> Instance:
    """An instance that works. One that starts while the machine stands still exits, as it must: then start another."""
    for _ in range(5):
        instance = stack.enter_context(begin())
        if instance.line() == "works":
            return instance
        instance.kill()
    raise AssertionError("none of five instances has begun to work")


def halted(stack: ExitStack, begin: Callable[[], Instance], which: Callable[[Instance], int]) -> Instance:
    """An instance that was stopped while it worked and held its guard; ``which`` returns the pid to stop."""
    for _ in range(5):
        instance = begun(stack, begin)
        eventually(lambda of=instance: len(of.work()) > len(b"began"), "all its threads have begun")  # type: ignore[misc]
        halt(instance.url, pid := which(instance))
        if state(pid) in "Tt" and ends_at(instance.url, instance.key) > time.time() + TTL / 3:
            return instance
        instance.kill()
    raise AssertionError("none of five instances was stopped while its guard was held")


def halt(url: str, pid: int) -> None:
    """Stop a process, but not while it has locked an SQLite file: all others would wait for it."""
    stand_still(pid)
    while url.startswith("sqlite") and state(pid) in "Tt" and not _is_free(url.removeprefix("sqlite:///")):
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)
        stand_still(pid)


def _is_free(path: str) -> bool:
    try:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=1.0)) as file:
            file.execute("begin immediate")
            file.execute("rollback")
        with Path(f"{path}.holdfast-turn").open("rb") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (sqlite3.OperationalError, BlockingIOError):
        return False
    return True


def ends_at(url: str, key: str) -> float:
    """When the TTL of a lease ends, by the database's clock."""
    join = "{0}lease l join {0}beat b on b.id = l.beat where l.name = %s"
    if url.startswith("sqlite"):
        [(moment,)] = query(url, f"select b.expires_at from {join.format('holdfast_')}", key)
    else:
        [(moment,)] = query(
            url, f"select extract(epoch from b.expires_at)::float8 from {join.format('holdfast.')}", key
        )
    return float(moment)


def stand_still(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) in "TtZX", what="it stands still")


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]
    except OSError:
        return "X"
