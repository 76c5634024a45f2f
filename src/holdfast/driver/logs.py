"""Reads the output of a sandbox by byte offset since its start. The oldest bytes may be deleted already."""

from __future__ import annotations

from pathlib import Path

BLOCK = 65536


def bounds(folder: Path) -> tuple[int, int]:
    """The offset of the first byte that is kept, and the offset after the last one."""
    pieces = _pieces(folder)
    if not pieces:
        return 0, 0
    try:
        return pieces[0], pieces[-1] + (folder / f"log.{pieces[-1]}").stat().st_size
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
            with (folder / f"log.{piece}").open("rb") as file:
                file.seek(offset - piece)
                data = file.read(limit)
        except FileNotFoundError:
            continue
        if data or piece == pieces[-1]:
            return offset, data
        offset = min(each for each in pieces if each > offset)  # the rest of this piece was lost on a full disk


def tail(folder: Path, lines: int) -> int:
    """The offset at which the last ``lines`` begin."""
    first, end = bounds(folder)
    at, seen = end, 0
    while at > first and lines:
        block = max(first, at - BLOCK)
        start, data = read(folder, block, at - block)
        if start != block or len(data) != at - block:  # pieces were deleted, or this block spans two of them
            data = data[: at - start]
            block = start if data else at - 1
            if not data or start + len(data) != at:
                block, data = _just_before(folder, at)
        for back in range(len(data) - 1, -1, -1):
            if data[back] == 10 and block + back != end - 1:
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
    names = (each.name.partition("log.") for each in folder.iterdir())
    return sorted(int(number) for before, dot, number in names if dot and not before and number.isdecimal())
