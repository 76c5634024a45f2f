"""Folders of servers: temporary ones, and data folders as initdb creates them.

All of them lie in one folder that belongs to the server user, in TMPDIR if that is set, else in /dev/shm if it has
enough space, else in the default temporary folder.

initdb takes longer than starting a server, so it runs once for each PostgreSQL build on the machine; every data folder
is a copy of its result. Several test processes may need it at once: one creates it under another name and renames it,
the others wait for a lock.

The folder of a server is removed with the server. Folders left by killed processes are removed when the next one is
created: their owner held a `flock`, which the kernel has released.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from holdfast.testing.binaries import Binaries
from holdfast.testing.server_user import server_user

_INITDB = ("--no-sync", "--no-instructions", "--locale=C", "--encoding=UTF8", "--auth=trust", "--username=postgres")
_PREFIX = "server-"
_MEMORY = "/dev/shm"
_ENOUGH_BYTES = 8 << 30
"""A database takes 8 MB, and a test suite creates hundreds."""


def create_temporary() -> tuple[Path, int]:
    """A new folder, and a locked descriptor of it. Once the descriptor is closed, other processes may remove it."""
    root = _root()
    with _locked(root):
        for abandoned in root.glob(f"{_PREFIX}*"):
            with contextlib.suppress(BlockingIOError, FileNotFoundError), _locked(abandoned, fcntl.LOCK_NB):
                shutil.rmtree(abandoned, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        server_user().own(folder)
        return folder, _lock(folder)


def create_data(binaries: Binaries, target: Path) -> None:
    """Create `target`, a data folder as initdb leaves it."""
    template = _template(binaries)
    command = [*server_user().prefix, "cp", "-R", "-p", str(template), str(target)]
    completed = subprocess.run(command, cwd="/", capture_output=True, check=False)
    if completed.returncode != 0:
        error = completed.stderr.decode(errors="replace").strip()
        raise RuntimeError(f"could not copy the data folder {template} to {target}: {error}")


def _template(binaries: Binaries) -> Path:
    """Named after version and size of the server, not after its path: many virtual environments have the same wheel."""
    root = _root()
    size = (binaries.folder / "postgres").stat().st_size
    identity = "\0".join([binaries.version, str(size), *_INITDB])
    template = root / f"{binaries.major}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if template.exists():
        return template
    with _locked(root):
        if not template.exists():
            unfinished = template.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            binaries.run("initdb", *_INITDB, "-D", str(unfinished))
            unfinished.rename(template)
    return template


def _root() -> Path:
    """The folder of all folders. Raises PermissionError if another user owns it or may write to it."""
    user = server_user()
    root = Path(temporary_folder(), f"holdfast-postgres-{user.uid}")
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    status = root.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid in (user.uid, os.geteuid())
    if not is_ours or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(f"{root} must be a folder that user {user.uid} owns and no other may enter; remove it")
    user.own(root)
    return root


def temporary_folder() -> str:
    """Where temporary files lie: in memory if it has enough space."""
    if "TMPDIR" not in os.environ:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(_MEMORY).free >= _ENOUGH_BYTES:
                return _MEMORY
    return tempfile.gettempdir()


@contextlib.contextmanager
def _locked(folder: Path, flags: int = 0) -> Iterator[None]:
    descriptor = _lock(folder, flags)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path, flags: int = 0) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
