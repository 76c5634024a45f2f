"""What an agent wrote down itself: a file of JSON lines, below the one folder that the gateway may read.

A line that is no JSON, or says nothing, is passed over: the file is somebody else's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

CHUNK, PORTION = 1 << 20, 1 << 16
"""Bytes that are read at once, and after which no further line is taken: what is said in them is one commit of the
agent, in which a short line is several times as long. What is left comes with the next cycle."""
_USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")


class Entry(NamedTuple):
    role: Literal["user", "agent"]
    text: str


def confined(path: str, folder: str | None) -> Path | None:
    """The file, if it is one below ``folder``, wherever links lead."""
    if folder is None:
        return None
    try:
        real = Path(path).resolve(strict=True)
        return real if real.is_relative_to(Path(folder).resolve()) and real.is_file() else None
    except (OSError, ValueError, RuntimeError):
        return None


def read_from(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(CHUNK)


def read_end(path: Path) -> bytes:
    return read_from(path, max(path.stat().st_size - CHUNK // 8, 0))


def whole_lines(data: bytes) -> bytes:
    """Up to the last line that is complete, or beyond the portion. A line longer than a chunk is given up."""
    end = data.find(b"\n", PORTION) + 1 or data.rfind(b"\n") + 1
    return data if end == 0 and len(data) == CHUNK else data[:end]


def entries(data: bytes) -> list[Entry]:
    """What was said, in order."""
    found = [(each, _text(each)) for each in _messages(data)]
    return [Entry("user" if each["type"] == "user" else "agent", text) for each, text in found if text]


def tokens(data: bytes) -> int | None:
    """How much of its context the agent used when it last said something; None when that is not told."""
    for each in reversed(_messages(data)):
        usage = each["message"].get("usage")
        if isinstance(usage, dict):
            return sum(value for name in _USAGE if isinstance(value := usage.get(name), int))
    return None


def _messages(data: bytes) -> list[dict[str, Any]]:
    found = []
    for line in data.splitlines():
        try:
            each = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(each, dict) and isinstance(each.get("message"), dict) and not each.get("isSidechain"):
            found.append(each)
    return [each for each in found if each.get("type") in ("user", "assistant")]


def _text(each: dict[str, Any]) -> str:
    """Of what was said in words; results of tools are not."""
    content = each["message"].get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        content = "\n".join(part for part in parts if isinstance(part, str))
    return content.encode("utf-8", "replace").decode() if isinstance(content, str) else ""
