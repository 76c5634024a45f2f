"""Who holds the kernel's locks beside an SQLite file: /proc shows the locks of each open file, and the tables of the
database have their names and ages, and who waits.

Processes of other users cannot be looked into; their locks are seen all the same, and their pids are not.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from holdfast.database.url import Database
from holdfast.errors import Refused
from holdfast.lock.file_locks import KINDS
from holdfast.lock.records import LockRecord, holder_of
from holdfast.lock.terms import Key, number
from holdfast.timestamps import as_datetime


class Holder(NamedTuple):
    """``pair``: the byte stands for a namespace and a number, else for a name."""

    pid: int | None
    program: str | None
    pair: bool
    byte: int
    shared: bool


def holders(database: Database) -> list[Holder]:
    if not os.path.isdir("/proc/self/fdinfo"):
        raise Refused("who holds a lock on SQLite is told by /proc, which this system does not have")
    files = {}
    for space, kind in enumerate(KINDS):
        with suppress(FileNotFoundError):
            about = os.stat(f"{database.target}.{database.schema}-{kind}")
            files[about.st_dev, about.st_ino] = bool(space)
    visible = {
        Holder(pid, _program(pid), files[file], byte, shared)
        for pid in _processes()
        for file, fdinfo in _open_files(pid)
        if file in files
        for byte, shared in _locked(fdinfo)
    }
    seen = {(each.pair, each.byte) for each in visible}
    hidden = {Holder(None, None, files[file], byte, shared) for file, byte, shared in _everybodys() if file in files}
    return sorted(
        visible | {each for each in hidden if (each.pair, each.byte) not in seen},
        key=lambda each: (each.pair, each.byte, each.pid or 0),
    )


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _program(pid: int) -> str | None:
    with suppress(OSError), open(f"/proc/{pid}/comm") as file:
        return file.read().strip()
    return None


def _open_files(pid: int) -> Iterator[tuple[tuple[int, int], str]]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # it has ended, or belongs to another user
        return
    for name in names:
        with suppress(OSError):
            about = os.stat(f"/proc/{pid}/fd/{name}")
            yield (about.st_dev, about.st_ino), f"/proc/{pid}/fdinfo/{name}"


def _locked(fdinfo: str) -> Iterator[tuple[int, bool]]:
    try:
        with open(fdinfo) as file:
            lines = file.readlines()
    except OSError:
        return
    for line in lines:  # lock: 1: OFDLCK ADVISORY  WRITE -1 fe:00:2148059 4711 4711
        fields = line.split()
        if fields[:1] == ["lock:"] and fields[2] == "OFDLCK":
            yield from ((byte, fields[4] == "READ") for byte in _bytes(*fields[7:9]))


def _everybodys() -> Iterator[tuple[tuple[int, int], int, bool]]:
    try:
        with open("/proc/locks") as table:
            lines = table.readlines()
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) == 8 and fields[1] == "OFDLCK":
            major, minor, inode = fields[5].split(":")
            file = os.makedev(int(major, 16), int(minor, 16)), int(inode)
            yield from ((file, byte, fields[3] == "READ") for byte in _bytes(*fields[6:8]))


def _bytes(first: str, last: str) -> range:
    """All of a range: the kernel shows neighbouring bytes that one descriptor has locked as one lock."""
    return range(int(first), int(first if last == "EOF" else last) + 1)


class FileLockTables:
    """What the tables say about the locks that the kernel holds.

    ``rows``: of ``lock_list``. ``ours``: names that this client knows, which may not be written yet."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], ours: Mapping[Key, str]) -> None:
        self._names: dict[int, str] = {}
        self._namespaces: dict[int, str] = {}
        self._since: dict[tuple[int, bool, int], float] = {}
        self._applications: dict[int, str] = {}
        self._waiting: Counter[tuple[bool, int]] = Counter()
        for row in rows:
            key, pid = row["key"], row["pid"]
            if row["name"] is not None:
                self._names[key] = row["name"]
            elif row["namespace"] is not None:
                self._namespaces[key] = row["namespace"]
            elif os.path.isdir(f"/proc/{pid}"):
                lock = bool(row["pair"]), key
                self._waiting[lock] += row["waiting"]
                self._applications[pid] = row["application"]
                if row["since"] is not None:
                    self._since[pid, *lock] = min(row["since"], self._since.get((pid, *lock), row["since"]))
        self._names |= {number(key): name for key, name in ours.items() if len(key) == 1}

    def holder(self, pair: bool, key: int) -> LockRecord | None:
        """A holder that is noted."""
        pid = next((pid for pid, *lock in self._since if lock == [pair, key]), None)
        return None if pid is None else self.record(Holder(pid, None, pair, key, shared=False))

    def record(self, held: Holder) -> LockRecord:
        namespace, entity_id, name = None, held.byte, self._names.get(held.byte)
        if held.pair:
            first, second = held.byte >> 32, held.byte & 0xFFFFFFFF
            namespace, entity_id, name = self._namespaces.get(first, str(first)), second - (second >> 31 << 32), None
        since = None if held.pid is None else self._since.get((held.pid, held.pair, held.byte))
        application = held.program if held.pid is None else self._applications.get(held.pid, held.program)
        return LockRecord(
            held.pid, holder_of(application), application, None, None, namespace, entity_id, name,
            "shared" if held.shared else "exclusive", granted=True, held_since=as_datetime(since),
            duration=None if since is None else max(0.0, time.time() - since),
            waiting=self._waiting[held.pair, held.byte], blocked_by=(),
        )  # fmt: skip
