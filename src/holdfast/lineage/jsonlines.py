"""Events as lines of JSON, in a file or on the console."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast import Event, SinkDown


class JsonLines:
    """Appends to a file, which is on disk when the relay goes on; ``-`` is the console."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def publish(self, events: Sequence[Event]) -> None:
        text = "".join(json.dumps(event.as_dict(), separators=(",", ":"), sort_keys=True) + "\n" for event in events)
        append(self._path, text)


def append(path: Path, text: str) -> None:
    """At the end of a file, and to disk. What a crash left of a line goes first: it is told again."""
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
    except OSError as error:  # a full disk says nothing about what was to be written
        raise SinkDown(f"{path}: {error.strerror}") from error
