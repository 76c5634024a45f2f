"""Transcripts: files of JSON lines that agents write, below the one folder that the gateway may read.

A line that is no JSON, or has no message, is skipped: the format belongs to another program.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

CHUNK, PORTION = 1 << 20, 1 << 16
"""Bytes that are read at once, and after which no further line is taken. All turns of a portion are in one commit of
the agent, where a short line takes several times its length. The next cycle reads on."""
_USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")


class TranscriptEntry(NamedTuple):
    role: Literal["user", "agent"]
    text: str


def find_file(path: str, folder: str | None) -> Path | None:
    """The file, with links resolved, if it is below ``folder``; else None."""
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
    """The complete lines of ``data``, up to the first one that ends beyond PORTION. A line longer than CHUNK is
    skipped: then all of ``data`` is returned."""
    end = data.find(b"\n", PORTION) + 1 or data.rfind(b"\n") + 1
    return data if end == 0 and len(data) == CHUNK else data[:end]


def entries(data: bytes) -> list[TranscriptEntry]:
    """The messages that have a text, in order."""
    texts = [(message["type"], _text(message)) for message in _messages(data)]
    return [TranscriptEntry("user" if kind == "user" else "agent", text) for kind, text in texts if text]


def tokens(data: bytes) -> int | None:
    """How many tokens of context the agent used with its last message; None when no message says so."""
    for message in reversed(_messages(data)):
        usage = message["message"].get("usage")
        if isinstance(usage, dict):
            return sum(value for name in _USAGE if isinstance(value := usage.get(name), int))
    return None


def _messages(data: bytes) -> list[dict[str, Any]]:
    messages = []
    for line in data.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("message"), dict) and not value.get("isSidechain"):
            messages.append(value)
    return [message for message in messages if message.get("type") in ("user", "assistant")]


def _text(message: dict[str, Any]) -> str:
    """The text of a message, without the results of tools. Lone surrogates are replaced."""
    content = message["message"].get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        content = "\n".join(part for part in parts if isinstance(part, str))
    return content.encode("utf-8", "replace").decode() if isinstance(content, str) else ""
