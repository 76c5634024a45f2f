"""Read, change and replace a file, one writer at a time, between processes: over the ``filelock`` package.

The lock is on a file beside it, ``name.lock``, which stays: the file itself is replaced whole, and a lock on it would
go with it. The kernel frees the lock when its process dies.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary, ref

from holdfast.database.file_turns import open_side_file
from holdfast.errors import AcquireTimeout, LockLost, LockReentered, NotAcquired
from holdfast.names import Unset, check_timeout
from holdfast.runtime.atomic_write import replace

if TYPE_CHECKING:
    from filelock import BaseFileLock

_POLL = 0.01
_grants: WeakValueDictionary[str, FileGrant] = WeakValueDictionary()
"""The grants of this process, by lock file: a thread or task that asks twice would wait for itself."""


def file_lock(path: str | os.PathLike[str], *, timeout: float | None = 15.0) -> FileLock:
    """A lock on a file, to read it, change it and replace it without losing what another process wrote meanwhile::

        with holdfast.file_lock("settings.json") as file:
            settings = json.loads(file.read_text(default="{}"))    # what the last writer wrote
            settings["port"] = 8080
            file.write_text(json.dumps(settings))                  # whole or not at all

    ``timeout``: seconds to wait for it (0: refused at once, None: for ever). Needs the ``files`` extra. In asyncio
    write ``async with``; ``try_acquire`` and ``or_skip`` never wait, and are the same there. The file need not exist
    yet, its folder must. Readers need no lock: they see the old file or the new one.
    """
    try:
        import filelock  # noqa: F401
    except ImportError as error:
        raise ImportError("holdfast.file_lock needs the files extra: pip install 'holdfast[files]'") from error
    return FileLock(Path(os.path.realpath(path)), check_timeout(timeout))


class FileLock:
    """A lock to be had: ``with lock as file``, ``async with``, ``acquire``, ``try_acquire`` or ``or_skip``."""

    def __init__(self, path: Path, timeout: float) -> None:
        self.path = path
        self._lock_path = f"{path}.lock"
        self._timeout = timeout
        self._entered: list[FileGrant] = []

    def __repr__(self) -> str:
        return f"<FileLock {self.path}>"

    def acquire(self, *, timeout: float | Unset | None = Unset.UNSET) -> FileGrant:
        """The grant; AcquireTimeout after ``timeout`` seconds, NotAcquired at once if that is 0, LockReentered at once
        if this thread or task holds it already."""
        limit = self._timeout if timeout is Unset.UNSET else check_timeout(timeout)
        until = time.monotonic() + limit
        while (grant := self._try()) is None:
            time.sleep(self._pause(limit, until))
        return grant

    def try_acquire(self) -> FileGrant | None:
        """The grant, or None when it is held, also by this thread or task."""
        return None if self._is_mine() else self._try()

    @contextmanager
    def or_skip(self) -> Iterator[FileGrant | None]:
        """A block that runs with the grant, or with None when the file is locked."""
        grant = self.try_acquire()
        try:
            yield grant
        finally:
            if grant is not None:
                grant.release()

    def __enter__(self) -> FileGrant:
        return self._begin(self.acquire())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            grant = self._innermost()
            grant.release()
        except BaseException:
            self._forget(self._innermost())
            raise
        self._entered.remove(grant)

    async def __aenter__(self) -> FileGrant:
        until = time.monotonic() + self._timeout
        while (grant := self._try()) is None:  # noqa: ASYNC110 - no event tells of another process
            await asyncio.sleep(self._pause(self._timeout, until))
        return self._begin(grant)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def _begin(self, grant: FileGrant) -> FileGrant:
        """A block begins. If this is interrupted, its ``__exit__`` is never called."""
        try:
            grant._block = True
            self._entered.append(grant)
            return grant
        except BaseException:
            self._forget(grant)
            raise

    def _innermost(self) -> FileGrant:
        """The grant of the block that ends: of several threads or tasks in blocks of one handle, that of the caller."""
        me = _me()
        return next((each for each in reversed(self._entered) if each._owner == me), self._entered[-1])

    def _forget(self, grant: FileGrant) -> None:
        grant.release()
        with suppress(ValueError):
            self._entered.remove(grant)

    def _try(self) -> FileGrant | None:
        import filelock

        if self._is_mine():
            raise LockReentered(
                f"{self.path} is already locked by this thread or task: it cannot be locked twice",
                name=str(self.path),
            )
        if not self.path.parent.is_dir():  # filelock would make it, for a slip in the path, too
            raise FileNotFoundError(f"{self.path} cannot be locked: there is no folder {self.path.parent}")
        if self.path.is_dir():  # an empty path is the working folder
            raise IsADirectoryError(f"{self.path} cannot be locked: it is a folder, and could not be replaced")
        if self.path.exists() and not self.path.is_file():
            raise OSError(f"{self.path} cannot be locked: a device, pipe or socket would be replaced by a plain file")
        if not Path(self._lock_path).exists():
            os.close(open_side_file(self._lock_path))
        lock = filelock.FileLock(self._lock_path, thread_local=False)
        try:
            lock.acquire(timeout=0)
            return FileGrant(self.path, lock)
        except filelock.Timeout:
            return None
        except BaseException:
            lock.release(force=True)
            raise

    def _is_mine(self) -> bool:
        grant, me = _grants.get(self._lock_path), _me()
        if grant is None or not grant._held or grant._pid != os.getpid():
            return False
        return grant._owner == me

    def _pause(self, limit: float, until: float) -> float:
        left = until - time.monotonic()
        if left > 0:
            return min(_POLL, left)
        message = f"{self.path} is locked by another holder"
        if limit == 0:
            raise NotAcquired(message, name=str(self.path))
        raise AcquireTimeout(f"{message}; waited {limit:.1f} s", name=str(self.path))


class FileGrant:
    """A file we have for ourselves, as far as everybody asks for the lock. Any thread or task may release it."""

    def __init__(self, path: Path, lock: BaseFileLock) -> None:
        self.path, self._lock, self._pid = path, lock, os.getpid()
        self._owner = _me()
        self._block = False
        self._held = True
        self._claims: dict[str, object] = {}
        """Which call of ``release`` does it. ``setdefault`` is atomic: of several calls, one enters its claim."""
        self._writing = threading.RLock()
        """Of two threads that have the grant, one writes after the other."""
        _grants[str(lock.lock_file)] = self

    def __repr__(self) -> str:
        return f"<FileGrant {self.path}>"

    def read_text(self, *, default: str | None = None) -> str:
        """The file as UTF-8; FileNotFoundError when there is none and no ``default``."""
        return self.read_bytes(default=None if default is None else default.encode()).decode()

    def read_bytes(self, *, default: bytes | None = None) -> bytes:
        self.check()
        if default is not None:
            with suppress(FileNotFoundError):
                return self.path.read_bytes()
            return default
        return self.path.read_bytes()

    def write_text(self, text: str) -> None:
        """Replace the file, on the disk when this returns. Permissions and owner stay as they are."""
        self.write_bytes(text.encode())

    def write_bytes(self, data: bytes) -> None:
        self.check()
        with self._writing:
            self.check()  # it may have been released meanwhile
            replace(self.path, data)

    def check(self) -> None:
        """Raise LockLost when it was released, or is another process's."""
        if not self._held or self._claims:
            raise LockLost(f"the lock on {self.path} was released")
        if self._pid != os.getpid():
            raise LockLost(f"the lock on {self.path} belongs to the parent process, not to this fork of it")

    def release(self) -> bool:
        """Give it back; True if it was still ours. A second release is harmless, and so is one in a forked child.

        Of several threads that release it at the same time one returns True. The others return False at once: the first
        may not have unlocked it yet.
        """
        if not self._held or self._pid != os.getpid():
            return False
        claim = object()
        try:
            if not self._enter(claim):
                return False
            self._unlock()
        except BaseException:  # an interrupt, before or after the claim was entered; or the system refused to unlock
            try:
                if self._enter(claim):
                    self._unlock()
            finally:
                if self._claims.get("release") is claim and self._held:
                    self._claims.clear()  # the next release tries again
            raise
        return True

    def _enter(self, claim: object) -> bool:
        """Whether this claim is the one that releases: it is entered unless another one is."""
        return self._claims.setdefault("release", claim) is claim

    def _unlock(self) -> None:
        """Safe to repeat after an interrupt, but not in two threads at once: both would close the descriptor, and the
        second close may hit a file that was opened in between."""
        self._lock.release(force=True)
        self._held = False


class _Thread(threading.local):
    """The numbers of threads are used again."""

    def __init__(self) -> None:
        self.owner = object()


_thread = _Thread()


def _me() -> object:
    """A thread or a task."""
    with suppress(RuntimeError):
        if (task := asyncio.current_task()) is not None:
            return ref(task)
    return _thread.owner
