"""Results as they are kept: exactly what was returned, or refused. Never guesses what a value could have been."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_RESULT = 1 << 20
DEEPEST = 200
LONGEST = 14_000
"""Bits of an int: Python reads no more than 4300 digits, unless it is told to."""
_to_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode  # made once: dumps() would, every time


def encode(value: object, what: str = "the result") -> bytes:
    """A letter for what it is, then the bytes; ValueError when it would come back as something else, or is too big."""
    if type(value) is bytes:
        found = b"b" + value
    else:
        _check(value, what, DEEPEST)
        found = b"jnull" if value is None else b"j" + _to_json(value).encode()  # as most are
    if len(found) - 1 > MAX_RESULT:
        raise ValueError(
            f"{what} must have at most {MAX_RESULT} bytes, not {len(found) - 1}: return a reference to it instead"
        )
    return found


def decode(kept: bytes) -> Any:
    return kept[1:] if kept[:1] == b"b" else json.loads(kept[1:])


def _check(value: object, path: str, room: int) -> None:
    kind = type(value)
    if value is None or kind is str or kind is bool:
        return
    if kind is int:
        if value.bit_length() > LONGEST:  # type: ignore[attr-defined]
            raise ValueError(f"{path} is an int of over {LONGEST} bits, which not every process reads: return bytes")
        return
    if kind is float and math.isfinite(value):  # type: ignore[arg-type]
        return
    if kind is not list and kind is not dict:
        what = repr(value) if kind is float else f"a {kind.__name__}"
        raise ValueError(
            f"{path} is {what}, which cannot be kept as it is: return bytes, or None, str, int, float, bool, and lists "
            "and dicts of these"
        )
    if not room:
        raise ValueError(f"{path[:80]}… is nested deeper than {DEEPEST}")
    if isinstance(value, list):
        for at, each in enumerate(value):
            _check(each, f"{path}[{at}]", room - 1)
    elif isinstance(value, dict):
        for key, each in value.items():
            if type(key) is not str:
                raise ValueError(f"{path} has the key {key!r:.40}, which cannot be kept as it is: use str")
            _check(each, f"{path}[{key!r:.40}]", room - 1)
