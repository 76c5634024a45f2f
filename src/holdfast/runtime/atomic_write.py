"""Replace a file atomically: a reader sees the old or the new content, also after a crash."""

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
    """Write ``data`` to a temporary file beside ``path`` and rename it. Mode, owner, ACL and other attributes are kept.
    One writer at a time: temporary files of a writer that was killed are removed."""
    _remove_leftovers(path)
    before = path.stat() if path.exists() else None
    beside = path.with_name(_BESIDE.format(path.name[:_LONGEST], uuid4().hex[:12]))
    # 0600 until it has the mode of the file it replaces: the content may be secret.
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if before else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if before is not None:
                _copy_attributes(path, before, beside)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            beside.unlink()
        raise
    _sync_folder(path.parent)


def _remove_leftovers(path: Path) -> None:
    """Not for long names: these are cut, so other files may have the same temporary names."""
    if len(path.name) <= _LONGEST:
        for left in path.parent.glob(_BESIDE.format(escape(path.name), "[0-9a-f]" * 12)):
            with suppress(OSError):
                left.unlink()


def _copy_attributes(path: Path, before: os.stat_result, beside: Path) -> None:
    if hasattr(os, "chown"):
        for owner in ((before.st_uid, before.st_gid), (-1, before.st_gid)):
            with suppress(PermissionError):  # another user's file in a folder of ours
                os.chown(beside, *owner)
                break
    shutil.copystat(path, beside)
    os.utime(beside)


def _sync_folder(folder: Path) -> None:
    """Make the rename durable, where the system allows to open folders."""
    with suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
