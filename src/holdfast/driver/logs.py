"""Reads the output of a sandbox by byte offset since its start. The oldest bytes may be deleted already."""

from __future__ import annotations

import os
import re
from pathlib import Path

from holdfast.driver.spec import MAX_LOG
from holdfast.driver.store import open_file

BLOCK = 65536
_PIECE = re.compile(r"log\.(0|[1-9][0-9]{0,17})")


def bounds(folder: Path) -> tuple[int, int]:
    """The offset of the first byte that is kept, and the offset after the last one."""
    pieces = _pieces(folder)
    if not pieces:
        return 0, 0
    try:
        return pieces[0], pieces[-1] + (folder / f"log.{pieces[-1]}").lstat().st_size
    except FileNotFoundError:  # deleted meanwhile, because newer pieces were written
        return bounds(folder)


def read(folder: Path, offset: int, limit: int = BLOCK) -> tuple[int, bytes]:
    """Where the bytes begin, and the bytes: at ``offset``, or at the next offset that is kept; empty at the end."""
    while True:
        pieces = _pieces(folder)
        if not pieces:
            return offset, b""
        offset = max(offset, pieces[0])
        piece = max(each for each in pieces if each <= offset)
        try:
            with os.fdopen(open_file(folder / f"log.{piece}", os.O_RDONLY), "rb") as file:
                file.seek(offset - piece)
                data = file.read(limit)
        except FileNotFoundError:
            continue
        if data or piece == pieces[-1]:
            return offset, data
        offset = min(each for each in pieces if each > offset)  # the rest of this piece was lost on a full disk


def tail(folder: Path, lines: int) -> int:
    """The offset at which the last ``lines`` begin. More than the longest log is not searched."""
    first, end = bounds(folder)
    first = max(first, end - MAX_LOG)
    at, seen = end, 0
    while at > first and lines:
        block = max(first, at - BLOCK)
        start, data = read(folder, block, at - block)
        if start != block or len(data) != at - block:  # pieces were deleted, or this block spans two of them
            data = data[: at - start]
            block = start if data else at - 1
            if not data or start + len(data) != at:
                block, data = _just_before(folder, at)
        back = len(data)
        while (back := data.rfind(b"\n", 0, back)) >= 0:
            if block + back != end - 1:
                seen += 1
                if seen == lines:
                    return block + back + 1
        at = block
    return first if lines else end


def _just_before(folder: Path, at: int) -> tuple[int, bytes]:
    piece = max((each for each in _pieces(folder) if each < at), default=at)
    block = max(piece, at - BLOCK)
    return block, read(folder, block, at - block)[1] if block < at else b""


def _pieces(folder: Path) -> list[int]:
    return sorted(int(match[1]) for each in folder.iterdir() if (match := _PIECE.fullmatch(each.name)))
