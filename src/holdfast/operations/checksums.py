"""The checksum of a file, for keys of operations that read one."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

_PIECE = 1 << 20


def checksum_file(path: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None) -> str:
    """sha256 of what is in the file, as ``sha256:…``, read a megabyte at a time.

    ``progress(done, total)`` is called with bytes: first at 0, then after each piece, last with all. ``ValueError``
    when the file changed meanwhile: what was read is then in no version of it; and of what has no end of its own, such
    as a pipe.
    """
    hashed, done = sha256(), 0
    found = Path(path)
    if found.exists() and not (found.is_file() or found.is_dir()):  # to open a pipe would be to wait for its writer
        raise ValueError(f"{os.fspath(path)} is no regular file: only what such a one holds has a checksum")
    with found.open("rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        if progress is not None:
            progress(0, before.st_size)
        while piece := file.read(_PIECE):
            hashed.update(piece)
            done += len(piece)
            if progress is not None:
                progress(done, max(done, before.st_size))
        after = os.fstat(file.fileno())
    if done != before.st_size or (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise ValueError(f"{os.fspath(path)} was written to while it was read: take its checksum when nobody writes it")
    return f"sha256:{hashed.hexdigest()}"
