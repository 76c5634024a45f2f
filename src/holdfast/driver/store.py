"""A sandbox's folder on the disk: made whole or not at all, read at any time, removed under its lock.

What each file means stands in `supervisor`. A folder whose name begins with a dot is not a sandbox yet, or no longer.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from holdfast.driver.spec import ID, Facts

_LOCK = "hhqqi4x"
_NEW, _GONE = ".new-", ".gone-"


class Store:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "sandboxes"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self) -> list[str]:
        return sorted(each.name for each in self._folder.iterdir() if ID.fullmatch(each.name))

    def folder(self, name: str) -> Path:
        return self._folder / name

    def make(self, name: str, spec: Mapping[str, Any]) -> None:
        """With the rename it is there, and on the disk; before that it never was."""
        run = os.urandom(16).hex()
        new = self._folder / f"{_NEW}{run}"
        new.mkdir(mode=0o700)
        try:
            (new / "work").mkdir(mode=0o700)
            (new / "lock").touch(mode=0o600)
            for fifo in ("orders", "life"):
                os.mkfifo(new / fifo, 0o600)
            write(new / "spec.json", {**spec, "format": 1, "id": name, "run": run, "created_at": time.time()})
            new.rename(self.folder(name))
        except OSError:
            remove(new)
            raise
        _sync(self._folder)

    def take_away(self, name: str) -> Path:
        """Its name is free from here on; what is left is to be removed."""
        gone = self._folder / f"{_GONE}{os.urandom(16).hex()}"
        self.folder(name).rename(gone)
        _sync(self._folder)
        return gone

    def remove_leftovers(self) -> None:
        for each in self._folder.glob(".*"):
            remove(each)


def remove(path: Path) -> None:
    """As much as can be; the next driver tries again. A sandbox may have made folders that refuse even their owner."""
    for parent, folders, _ in os.walk(path):
        for each in (Path(parent, name) for name in folders):
            with suppress(OSError):
                if not each.is_symlink():
                    each.chmod(stat.S_IRWXU)
    shutil.rmtree(path, ignore_errors=True)


def facts(folder: Path, spec: Mapping[str, Any] | None = None) -> Facts:
    """``spec`` if it is known already: it never changes. FileNotFoundError when there is no such sandbox."""
    return Facts(
        spec=spec or json.loads((folder / "spec.json").read_text(encoding="utf-8")),
        deleting=_read(folder / "deleting"),
        started=_read(folder / "started.json"),
        running=(folder / "running").exists(),
        exit=_read(folder / "exit.json"),
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return value


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all, and on the disk when it returns."""
    new = path.with_name(f"{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def supervised(folder: Path) -> bool:
    """Whether a supervisor lives: it has the lock, and the kernel takes it back when it dies."""
    with (folder / "lock").open("rb+") as file:
        asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind: int = struct.unpack(_LOCK, fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


class Owned:
    """While it is open no supervisor starts anything. ``taken`` is False when one is there already."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "lock").open("rb+")
        try:
            wanted = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, wanted)
            self.taken = True
        except (BlockingIOError, PermissionError):
            self.taken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
