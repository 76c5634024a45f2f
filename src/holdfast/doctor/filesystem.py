"""Facts about the place of an SQLite file, without opening the file."""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path

from holdfast.database.sessions import Row
from holdfast.database.sqlite import boot_id
from holdfast.doctor.sqlite import filesystem_type


def file_facts(path: str) -> Row:
    file, folder = Path(path), Path(path).parent
    return {
        "version": sqlite3.sqlite_version,
        "exists": file.exists(),
        "writable": os.access(file, os.R_OK | os.W_OK),
        "folder": str(folder),
        "folder_exists": folder.is_dir(),
        "folder_writable": os.access(folder, os.R_OK | os.W_OK | os.X_OK),
        "filesystem": _filesystem(folder),
        "free": _free_bytes(folder),
        "boot": boot_id() is not None,
    }


def _filesystem(folder: Path) -> str | None:
    with suppress(OSError):
        return filesystem_type(Path("/proc/self/mounts").read_text(errors="surrogateescape"), str(folder.resolve()))
    return None


def _free_bytes(folder: Path) -> int | None:
    with suppress(OSError, AttributeError):  # AttributeError: Windows
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize
    return None
