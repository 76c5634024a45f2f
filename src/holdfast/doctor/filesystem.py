"""What the machine says about the place an SQLite file is in, without opening the file."""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path

from holdfast.database.sessions import Row
from holdfast.database.sqlite import boot_id
from holdfast.doctor.sqlite import filesystem


def survey(path: str) -> Row:
    file, folder = Path(path), Path(path).parent
    return {
        "version": sqlite3.sqlite_version,
        "exists": file.exists(),
        "writable": os.access(file, os.R_OK | os.W_OK),
        "folder": str(folder),
        "folder_exists": folder.is_dir(),
        "folder_writable": os.access(folder, os.R_OK | os.W_OK | os.X_OK),
        "filesystem": _filesystem(folder),
        "free": _free(folder),
        "boot": boot_id() is not None,
    }


def _filesystem(folder: Path) -> str | None:
    with suppress(OSError):
        return filesystem(Path("/proc/self/mounts").read_text(errors="surrogateescape"), str(folder.resolve()))
    return None


def _free(folder: Path) -> int | None:
    with suppress(OSError, AttributeError):  # AttributeError: Windows
        about = os.statvfs(folder)
        return about.f_bavail * about.f_frsize
    return None
