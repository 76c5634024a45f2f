"""SQLite files with holdfast's tables: copies of one that was migrated once, because a migration waits for the disk."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.conftest import migrated


@cache
def _contents() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder, "app.db")
        migrated(f"sqlite:///{path}")
        return path.read_bytes()


def migrated_file(path: Path) -> str:
    """The URL of a new file at ``path``."""
    path.write_bytes(_contents())
    return f"sqlite:///{path}"
