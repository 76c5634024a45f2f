"""A sandbox's folder on the disk: made whole or not at all, read at any time, removed under its lock.

What each file means stands in `supervisor`. A folder whose name begins with a dot is not a sandbox yet, or no longer.
"""

from __future__ import annotations

import errno
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
from types import NoneType
from typing import Any, Self

from holdfast.driver.spec import GRACE, ID, BadSpec, Facts, parse

_LOCK = "hhqqi4x"
_NEW, _GONE = ".new-", ".gone-"


class Store:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "sandboxes"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self) -> list[str]:
        return sorted(each.name for each in self._folder.iterdir() if ID.fullmatch(each.name) and each.is_dir())

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


class Damaged(Exception):
    """Somebody or something has changed what only we write, and why it makes no sense."""


_NUMBER = (int, float)
_FILES: dict[str, dict[str, Any]] = {
    "deleting": {"grace": _NUMBER},
    "started.json": {"pid": int, "supervisor": int, "started_at": _NUMBER},
    "exit.json": {
        "exit_code": (int, NoneType), "signal": (int, NoneType), "problem": (str, NoneType), "ended": bool,
        "finished_at": _NUMBER,
    },
}  # fmt: skip


def facts(folder: Path, spec: Mapping[str, Any] | None = None) -> Facts:
    """``spec`` if it is known already: it never changes. Damaged when the files make no sense."""
    if spec is None:
        spec = _read(folder / "spec.json", {"id": str, "run": str, "created_at": _NUMBER})
        if spec is None:
            raise Damaged("spec.json is missing")
        try:
            parse({name: value for name, value in spec.items() if name not in ("format", "id", "run", "created_at")})
        except BadSpec as bad:
            raise Damaged(f"spec.json: {bad}") from None
        if spec["id"] != folder.name:
            raise Damaged(f"spec.json is that of {spec['id']!r}")
    deleting, started, exit = (_read(folder / name, needed) for name, needed in _FILES.items())
    return Facts(spec, deleting, started, (folder / "running").exists(), exit)


def damaged(folder: Path, why: str, spec: Mapping[str, Any] | None = None) -> Facts:
    """What is known all the same: ``spec`` if it was read before, and whether it is to be deleted."""
    try:
        deleting = _read(folder / "deleting", _FILES["deleting"])
    except Damaged:
        deleting = {"grace": GRACE}
    nothing: dict[str, Any] = {
        "id": folder.name,
        "run": "",
        "argv": [],
        "env": {},
        "cwd": None,
        "limits": {},
        "grace": GRACE,
    }
    known = spec or {**nothing, "created_at": folder.stat().st_mtime}
    return Facts(known, deleting, running=(folder / "running").exists(), damage=why)


def _read(path: Path, needed: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path.name} cannot be read: {error}") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if not isinstance(value, dict):
        raise Damaged(f"{path.name} is no object")
    for name, kind in needed.items():
        if not isinstance(value.get(name), kind):
            raise Damaged(f"{path.name} says nothing sensible of {name!r}")
    return value


def _unreadable(path: Path, error: OSError) -> Exception:
    """A link that leads nowhere, a bad sector: one sandbox's trouble. What we are short of is not, and passes."""
    passes = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    return error if passes else Damaged(f"{path.name} cannot be read: {error.strerror}")


def mark_deleting(folder: Path, grace: float) -> None:
    """On a full disk, too: what fills it may be what is to go. The spec says a grace as well, and needs no room."""
    try:
        write(folder / "deleting", {"grace": grace})
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with suppress(FileExistsError):
            os.link(folder / "spec.json", folder / "deleting")
        _sync(folder)


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


def supervised(folder: Path, *, missing: bool | None = None) -> bool:
    """Whether a supervisor lives: it has the lock, and the kernel takes it back when it dies. ``missing``: what to say
    when there is no lock, which is an error otherwise."""
    try:
        file = (folder / "lock").open("rb+")
    except OSError as error:
        if missing is None:
            raise error if isinstance(error, FileNotFoundError) else _unreadable(folder / "lock", error) from None
        return missing
    with file:
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
