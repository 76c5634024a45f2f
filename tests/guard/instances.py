"""Guarded processes to be started, stopped and robbed: each says what it does, and writes to a file as it works."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from holdfast.testing.server import until
from tests.children import Child, query

TTL, HEARTBEAT = 3.0, 1.0

SYNC = """
import atexit, os, sys, threading, time, logging, holdfast
url, key, file, ttl, heartbeat, *flags = sys.argv[1:]
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.CRITICAL)
work = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def hang():
    while True:
        time.sleep(1)

def toil():
    while True:
        os.write(work, b"x")
        time.sleep(0.0005)

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
with client.guard(key, ttl=float(ttl), heartbeat=float(heartbeat), strict="strict" in flags) as grant:
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
        async with client.guard(key, ttl=float(ttl), heartbeat=float(heartbeat), strict="strict" in flags) as grant:
            begin()
            line = await asyncio.to_thread(sys.stdin.readline) if not flags else await asyncio.sleep(1000)

asyncio.run(main())
print("done", flush=True)
"""
)


class Instance(Child):
    """A guarded process, and the file it works on."""

    def __init__(
        self, url: str, key: str, folder: Path, *flags: str, program: str = GUARDED, ttl: float = TTL,
        heartbeat: float = HEARTBEAT,
    ) -> None:  # fmt: skip
        self.url, self.key, self.file = url, key, folder / f"work of {key}"
        super().__init__(program, url, key, self.file, ttl, heartbeat, *flags)

    def work(self) -> bytes:
        return self.file.read_bytes() if self.file.exists() else b""

    def worked_until(self) -> float:
        """Wait until it has ended; when it wrote for the last time, by the kernel's clock. It writes all the time, also
        while a hook hangs: when we notice that it is gone says little on a busy machine."""
        self.wait()
        return self.file.stat().st_mtime

    def said(self) -> str:
        lines = []
        while (line := self.line()) != "<end>":
            lines.append(line)
        return "\n".join(lines)


def ends_at(url: str, key: str) -> float:
    """When the TTL of that lease ends, by the database's clock, as it was last renewed."""
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
    until(lambda: _state(pid) in "TtZX", what="it stands still")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]
    except OSError:
        return "X"
