"""The folder of a sandbox on disk: created atomically, readable at any time, removed under its lock.

`supervisor/__init__.py` describes the files. A folder whose name begins with a dot is not a sandbox yet, or no longer.

A sandbox runs as the user of the driver and may put anything in the place of any of these files. So each is opened by
``open_file``, which never waits and follows no link, and at most MAX_BYTES of it are read.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, Self

from holdfast.driver.http import BODY_BYTES
from holdfast.driver.spec import GRACE, ID, MAX_GRACE, BadSpec, Facts, parse

_LOCK = "hhqqi4x"
_NEW, _TRASH = ".new-", ".gone-"
MAX_BYTES = BODY_BYTES + 65_536
"""Of a file of a sandbox's folder: a spec, and what is added to it."""
_MAX_TEXT, _MAX_INT, _MAX_FLOAT = 2000, 2**31 - 1, 2.0**53
"""Of values in a file that is not the spec."""


class SandboxStore:
    """Has two folders for each sandbox: its files in ``sandboxes``, and in ``work`` the one that its program starts in.
    The files are not above that folder, where a program might touch them by mistake."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._work = folder / "sandboxes", folder / "work"
        for each in (self._folder, self._work):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self) -> list[str]:
        folders = (each for each in self._folder.iterdir() if each.is_dir() and not each.is_symlink())
        return sorted(each.name for each in folders if ID.fullmatch(each.name))

    def folder(self, name: str) -> Path:
        return self._folder / name

    def create(self, name: str, spec: Mapping[str, Any]) -> None:
        """Create the folder of a sandbox; the last rename makes it visible, and it is on disk on return."""
        run, work = os.urandom(16).hex(), self._work / name
        new = self._folder / f"{_NEW}{run}"
        new.mkdir(mode=0o700)
        try:
            _move_away(work)  # of a sandbox whose files were removed by hand
            work.mkdir(mode=0o700)
            _sync(self._work)
            (new / "lock").touch(mode=0o600)
            for fifo in ("orders", "life"):
                os.mkfifo(new / fifo, 0o600)
            write(new / "spec.json", {**spec, "format": 1, "id": name, "run": run, "created_at": time.time()})
            new.rename(self.folder(name))
        except OSError:
            remove(new)
            raise
        _sync(self._folder)

    def move_to_trash(self, name: str) -> list[Path]:
        """Free the name, and return the folders that are left to be removed."""
        trash = [_move_away(self._folder / name), _move_away(self._work / name)]
        _sync(self._folder)
        return [path for path in trash if path is not None]

    def remove_leftovers(self) -> None:
        names = {*self.names()}
        for path in (*self._folder.glob(".*"), *(each for each in self._work.iterdir() if each.name not in names)):
            remove(path)


def _move_away(path: Path) -> Path | None:
    """Give it a new name, and return that; None if there is nothing."""
    trash = path.with_name(f"{_TRASH}{os.urandom(16).hex()}")
    try:
        return path.rename(trash)
    except FileNotFoundError:
        return None


def remove(path: Path) -> None:
    """Remove as much as possible; the next driver retries. A program may have made folders without permissions."""
    if path.is_symlink() or not path.is_dir():
        with suppress(OSError):
            path.unlink()
        return
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
    if deleting is not None and not 0 <= deleting["grace"] <= MAX_GRACE:
        raise Damaged("deleting has no valid 'grace'")
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
        with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise Damaged(f"{path.name} is larger than {MAX_BYTES} bytes")
        value = json.loads(content.decode())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path.name} cannot be read: {error}") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if not isinstance(value, dict):
        raise Damaged(f"{path.name} is no object")
    for name, kind in needed.items():
        if not _is_valid(value.get(name), kind):
            raise Damaged(f"{path.name} has no valid {name!r}")
    return value


def _is_valid(value: Any, kind: Any) -> bool:
    """Whether ``value`` is of this type and of a usual size: not, e.g., infinite."""
    if not isinstance(value, kind):
        return False
    match value:
        case str():
            return len(value) <= _MAX_TEXT
        case int():
            return abs(value) <= _MAX_INT
        case float():
            return abs(value) <= _MAX_FLOAT
    return True


def open_file(path: Path, flags: int, is_kind: Callable[[int], bool] = stat.S_ISREG) -> int:
    """The descriptor of a file of this kind. Never waits for the other end of a FIFO. Raises OSError, also for a link
    and for a file of another kind."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not is_kind(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is no {'FIFO' if is_kind is stat.S_ISFIFO else 'regular file'}", str(path))
    return descriptor


def unreadable(path: Path, error: OSError) -> Exception:
    """Damaged for an error of this folder, e.g. a bad sector; the error itself when the process lacks resources."""
    is_temporary = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    return error if is_temporary else Damaged(f"{path.name} cannot be read: {error.strerror}")


def mark_deleting(folder: Path, grace: float) -> None:
    """Works on a full disk, too, which this sandbox may have filled: a link to the spec, which has a grace as well,
    needs no space. Anything of that name marks it."""
    try:
        write(folder / "deleting", {"grace": grace})
    except OSError:
        with suppress(FileExistsError):
            os.link(folder / "spec.json", folder / "deleting")
        _sync(folder)


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Write atomically; the file is on disk on return. No program can foresee the name that it has until then."""
    new = path.with_name(f".{path.name}-{os.urandom(16).hex()}")
    try:
        with os.fdopen(open_file(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
            json.dump(value, file, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
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
        lock = open_file(folder / "lock", os.O_RDWR)
    except FileNotFoundError:
        if missing is None:
            raise
        return missing
    except OSError as error:
        problem = unreadable(folder / "lock", error)
        if missing is None or not isinstance(problem, Damaged):
            raise problem from None
        return missing
    try:
        query = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind: int = struct.unpack(_LOCK, fcntl.fcntl(lock, fcntl.F_OFD_GETLK, query))[0]
    finally:
        os.close(lock)
    return kind != fcntl.F_UNLCK


class SupervisorLock:
    """The lock of a supervisor, held by the driver so that none starts. ``is_acquired`` is False when one is alive."""

    def __init__(self, folder: Path) -> None:
        self._lock = open_file(folder / "lock", os.O_RDWR)
        try:
            wanted = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            fcntl.fcntl(self._lock, fcntl.F_OFD_SETLK, wanted)
            self.is_acquired = True
        except (BlockingIOError, PermissionError):
            self.is_acquired = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)
