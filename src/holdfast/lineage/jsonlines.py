"""A sink that writes events as lines of JSON, to a file or to the console."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast import SinkDown
from holdfast.lineage import Event


class JsonLines:
    """Appends to a file and syncs it to disk before the relay goes on; ``-`` is the console."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def publish(self, events: Sequence[Event]) -> None:
        text = "".join(json.dumps(event.as_dict(), separators=(",", ":"), sort_keys=True) + "\n" for event in events)
        append(self._path, text)


def append(path: Path, text: str) -> None:
    """Append complete lines to a file, and sync it. An incomplete last line, left by a crash, is removed first: the
    relay sends its event again. SinkDown when the file cannot be written."""
    if str(path) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.seek(0)
                    file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a full disk, for example: the events are not to blame
        raise SinkDown(f"{path}: {error.strerror}") from error
