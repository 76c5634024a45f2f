"""The checksum of a file, for keys of operations that read one."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

_CHUNK = 1 << 20


def checksum_file(path: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None) -> str:
    """The sha256 of a file's content, as ``sha256:…``, read a megabyte at a time.

    ``progress(done, total)`` is called with bytes: first with 0, then after each chunk. ValueError when the file
    changed while it was read, because no version of it has what was read, and for anything without an end, such as a
    pipe.
    """
    hashed, done = sha256(), 0
    file_path = Path(path)
    if file_path.exists() and not (file_path.is_file() or file_path.is_dir()):  # opening a pipe waits for its writer
        raise ValueError(f"{os.fspath(path)} is not a regular file: only those have a checksum")
    with file_path.open("rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        if progress is not None:
            progress(0, before.st_size)
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, max(done, before.st_size))
        after = os.fstat(file.fileno())
    if done != before.st_size or (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise ValueError(f"{os.fspath(path)} was written to while it was read: compute its checksum at another time")
    return f"sha256:{hashed.hexdigest()}"
