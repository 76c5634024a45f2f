"""Where servers keep their files: in a folder that belongs to the servers' account, below the temporary folder, or in
memory where there is plenty of it: what a server here writes is gone with it in any case. TMPDIR decides if it is set.

Initialising a data folder takes longer than starting a server on it, so it is done once for each PostgreSQL of the
machine and copied from then on. Many test processes may want the same one at the same time: one makes it, under
another name, the others wait and find it complete.

The folder of a server is removed with the server. What a process killed at the wrong moment left is removed by the
next one that needs a folder: a lock that the kernel frees tells which ones have no owner any more.
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

from holdfast.testing.account import account
from holdfast.testing.binaries import Binaries

_INITDB = ("--no-sync", "--no-instructions", "--locale=C", "--encoding=UTF8", "--auth=trust", "--username=postgres")
_SERVER = "server-"
_MEMORY = "/dev/shm"
_PLENTY = 8 << 30
"""Bytes: a database takes 8 MB, and a whole test suite makes hundreds."""


def temporary() -> tuple[Path, int]:
    """A new folder for a server, and the descriptor that says it has an owner; closing it gives the folder up."""
    home = _home()
    with _locked(home):
        for folder in home.glob(f"{_SERVER}*"):
            with contextlib.suppress(BlockingIOError, FileNotFoundError), _locked(folder, fcntl.LOCK_NB):
                shutil.rmtree(folder, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=_SERVER, dir=home))
        account().own(folder)
        return folder, _lock(folder)


def initialise(binaries: Binaries, target: Path) -> None:
    """Make `target` a data folder as initdb leaves it."""
    template = _template(binaries)
    command = [*account().prefix, "cp", "-R", "-p", str(template), str(target)]
    done = subprocess.run(command, cwd="/", capture_output=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"could not copy {template} to {target}: {done.stderr.decode(errors='replace').strip()}")


def _template(binaries: Binaries) -> Path:
    """Known by the build it was made with, not by where that lies: the same wheel is in many virtual environments."""
    home = _home()
    size = (binaries.folder / "postgres").stat().st_size
    identity = "\0".join([binaries.version, str(size), *_INITDB])
    template = home / f"{binaries.major}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if template.exists():
        return template
    with _locked(home):
        if not template.exists():
            unfinished = template.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            binaries.run("initdb", *_INITDB, "-D", str(unfinished))
            unfinished.rename(template)
    return template


def _place() -> str:
    if "TMPDIR" not in os.environ:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(_MEMORY).free >= _PLENTY:
                return _MEMORY
    return tempfile.gettempdir()


def _home() -> Path:
    """The folder of all this. One that somebody else made, or could write to, is never used."""
    own = account()
    home = Path(_place(), f"holdfast-postgres-{own.uid}")
    with contextlib.suppress(FileExistsError):
        home.mkdir(mode=0o700)
    found = home.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid in (own.uid, os.geteuid())
    if not ours or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{home} must be a folder that user {own.uid} owns and nobody else may enter; remove it")
    own.own(home)
    return home


@contextlib.contextmanager
def _locked(folder: Path, how: int = 0) -> Iterator[None]:
    descriptor = _lock(folder, how)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path, how: int = 0) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
