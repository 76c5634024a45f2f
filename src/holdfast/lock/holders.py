"""Who holds the kernel's locks beside an SQLite file: told by /proc, which shows each open file's locks.

Processes of other users cannot be looked into; their locks are seen all the same, and their pids are not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from holdfast.database.url import Database
from holdfast.errors import Refused
from holdfast.lock.file_locks import KINDS


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
    for number, kind in enumerate(KINDS):
        with suppress(FileNotFoundError):
            about = os.stat(f"{database.target}.{database.schema}-{kind}")
            files[about.st_dev, about.st_ino] = bool(number)
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
