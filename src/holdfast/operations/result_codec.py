"""Encodes results so that a replay returns exactly what the function returned. A value that would come back as
something else is refused."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_BYTES = 1 << 20
MAX_DEPTH = 200
MAX_INT_BITS = 14_000
"""Python parses ints of up to 4300 digits unless it is configured otherwise."""
_to_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode  # json.dumps would build one at every call


def encode(value: object, what: str = "the result") -> bytes:
    """``b`` and the bytes, or ``j`` and JSON. ValueError when the value cannot be restored exactly, or is too big."""
    if type(value) is bytes:
        encoded = b"b" + value
    else:
        _check(value, what, MAX_DEPTH)
        encoded = b"jnull" if value is None else b"j" + _to_json(value).encode()  # hot: None is the most frequent
    if len(encoded) - 1 > MAX_BYTES:
        raise ValueError(
            f"{what} must have at most {MAX_BYTES} bytes, not {len(encoded) - 1}: return a reference to it instead"
        )
    return encoded


def decode(encoded: bytes) -> Any:
    return encoded[1:] if encoded[:1] == b"b" else json.loads(encoded[1:])


def _check(value: object, path: str, depth_left: int) -> None:
    kind = type(value)
    if value is None or kind is str or kind is bool:
        return
    if kind is int:
        if value.bit_length() > MAX_INT_BITS:  # type: ignore[attr-defined]
            raise ValueError(
                f"{path} is an int of over {MAX_INT_BITS} bits, which not every process can parse: return bytes"
            )
        return
    if kind is float and math.isfinite(value):  # type: ignore[arg-type]
        return
    if kind is not list and kind is not dict:
        what = repr(value) if kind is float else f"a {kind.__name__}"
        raise ValueError(
            f"{path} is {what}, which cannot be kept as it is: return bytes, or None, str, int, float, bool, and lists "
            "and dicts of these"
        )
    if not depth_left:
        raise ValueError(f"{path[:80]}… is nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]", depth_left - 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise ValueError(f"{path} has the key {key!r:.40}, which cannot be kept as it is: use str")
            _check(item, f"{path}[{key!r:.40}]", depth_left - 1)
