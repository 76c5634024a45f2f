"""The folder of a sandbox on disk: created atomically, readable at any time, removed under its lock.

`supervisor/__init__.py` describes the files. A folder whose name begins with a dot is not a sandbox yet, or no longer.
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
_NEW, _TRASH = ".new-", ".gone-"


class SandboxStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "sandboxes"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self) -> list[str]:
        return sorted(each.name for each in self._folder.iterdir() if ID.fullmatch(each.name) and each.is_dir())

    def folder(self, name: str) -> Path:
        return self._folder / name

    def create(self, name: str, spec: Mapping[str, Any]) -> None:
        """Create the folder of a sandbox; the last rename makes it visible, and it is on disk on return."""
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

    def move_to_trash(self, name: str) -> Path:
        """Free the name, and return the folder that is left to be removed."""
        trash = self._folder / f"{_TRASH}{os.urandom(16).hex()}"
        self.folder(name).rename(trash)
        _sync(self._folder)
        return trash

    def remove_leftovers(self) -> None:
        for path in self._folder.glob(".*"):
            remove(path)


def remove(path: Path) -> None:
    """Remove as much as possible; the next driver retries. A program may have made folders without permissions."""
    for parent, names, _ in os.walk(path):
        for folder in (Path(parent, name) for name in names):
            with suppress(OSError):
                if not folder.is_symlink():
                    folder.chmod(stat.S_IRWXU)
    shutil.rmtree(path, ignore_errors=True)


class Damaged(Exception):
    """A file that only the driver writes is missing, unreadable or has invalid content."""


_NUMBER = (int, float)
_FILES: dict[str, dict[str, Any]] = {
    "deleting": {"grace": _NUMBER},
    "started.json": {"pid": int, "supervisor": int, "started_at": _NUMBER},
    "exit.json": {
        "exit_code": (int, NoneType), "signal": (int, NoneType), "problem": (str, NoneType), "ended": bool,
        "finished_at": _NUMBER,
    },
}  # fmt: skip


def read_facts(folder: Path, spec: Mapping[str, Any] | None = None) -> Facts:
    """What the folder says. ``spec``: if it was read before, because it never changes. Raises Damaged."""
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


def damaged(folder: Path, damage: str, spec: Mapping[str, Any] | None = None) -> Facts:
    """What is known of a damaged folder: ``spec`` if it was read before, and whether it is to be deleted."""
    try:
        deleting = _read(folder / "deleting", _FILES["deleting"])
    except Damaged:
        deleting = {"grace": GRACE}
    spec = spec or {
        "id": folder.name, "run": "", "argv": [], "env": {}, "cwd": None, "limits": {}, "grace": GRACE,
        "created_at": folder.stat().st_mtime,
    }  # fmt: skip
    return Facts(spec, deleting, running=(folder / "running").exists(), damage=damage)


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
            raise Damaged(f"{path.name} has no valid {name!r}")
    return value


def _unreadable(path: Path, error: OSError) -> Exception:
    """Damaged for an error of this folder, e.g. a bad sector; the error itself when the process lacks resources."""
    is_temporary = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    return error if is_temporary else Damaged(f"{path.name} cannot be read: {error.strerror}")


def mark_deleting(folder: Path, grace: float) -> None:
    """Works on a full disk, too, which this sandbox may have filled: a link to the spec, which has a grace as well,
    needs no space."""
    try:
        write(folder / "deleting", {"grace": grace})
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with suppress(FileExistsError):
            os.link(folder / "spec.json", folder / "deleting")
        _sync(folder)


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Write atomically; the file is on disk on return."""
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


def has_supervisor(folder: Path, *, missing: bool | None = None) -> bool:
    """Whether a supervisor lives: it holds the lock, which the kernel releases when it dies. ``missing``: the answer
    when the lock file is not there or cannot be opened; an error by default."""
    try:
        file = (folder / "lock").open("rb+")
    except FileNotFoundError:
        if missing is None:
            raise
        return missing
    except OSError as error:
        problem = _unreadable(folder / "lock", error)
        if missing is None or not isinstance(problem, Damaged):
            raise problem from None
        return missing
    with file:
        query = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind: int = struct.unpack(_LOCK, fcntl.fcntl(file, fcntl.F_OFD_GETLK, query))[0]
    return kind != fcntl.F_UNLCK


class SupervisorLock:
    """The lock of a supervisor, held by the driver so that none starts. ``is_acquired`` is False when one is alive."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "lock").open("rb+")
        try:
            wanted = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, wanted)
            self.is_acquired = True
        except (BlockingIOError, PermissionError):
            self.is_acquired = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
