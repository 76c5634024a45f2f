"""Replace a file whole: whoever reads it sees the old one or the new one, also after a crash."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from glob import escape
from pathlib import Path
from uuid import uuid4

_BESIDE = ".{}.{}.holdfast"
_LONGEST = 200


def replace(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path`` and put it in its place. Mode, owner, ACL and other attributes stay. Called by one
    at a time: what others left beside it is removed."""
    _clear(path)
    before = path.stat() if path.exists() else None
    beside = path.with_name(_BESIDE.format(path.name[:_LONGEST], uuid4().hex[:12]))
    # Nobody reads a secret while it is on its way: a new file gets what the umask leaves, one that is there its own.
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if before else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if before is not None:
                _like(path, before, beside)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            beside.unlink()
        raise
    _settle(path.parent)


def _clear(path: Path) -> None:
    """Of a writer that was killed in the midst. Files with longer names share the names beside them."""
    if len(path.name) <= _LONGEST:
        for left in path.parent.glob(_BESIDE.format(escape(path.name), "[0-9a-f]" * 12)):
            with suppress(OSError):
                left.unlink()


def _like(path: Path, before: os.stat_result, beside: Path) -> None:
    if hasattr(os, "chown"):
        for owner in ((before.st_uid, before.st_gid), (-1, before.st_gid)):
            with suppress(PermissionError):  # it is somebody else's file in a folder of ours
                os.chown(beside, *owner)
                break
    shutil.copystat(path, beside)
    os.utime(beside)


def _settle(folder: Path) -> None:
    """The name is on the disk, too; where folders cannot be opened, the system does as it likes."""
    with suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
