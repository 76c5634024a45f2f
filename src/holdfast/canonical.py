"""One text for every value that means the same, and never the same for two that do not: what is hashed.

Every part says its kind and its length before its bytes, so nothing that is put together can be read in two ways. Which
values are the same:

- dicts and sets whatever their order; a list and a tuple of the same parts;
- aware datetimes that are the same instant; decimals that are equal; ``0.0`` and ``-0.0``.

Everything else differs, also ``1``, ``1.0``, ``True`` and ``"1"``, and a naive datetime from every aware one.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from datetime import UTC, date, datetime
from decimal import Decimal
from hashlib import sha256
from operator import itemgetter
from typing import Any
from uuid import UUID

DEEPEST = 50
"""What is nested deeper is taken for something that contains itself."""

_KINDS = "None, bool, int, float, Decimal, str, bytes, datetime, date, UUID, list, tuple, set and dict"


def digest(value: object, what: str = "value") -> str:
    """sha256 of it, as hex. ``what`` it is called in the error when a part of it has no meaning here."""
    return sha256(encode(value, what)).hexdigest()


def encode(value: object, what: str = "value") -> bytes:
    """Its text, to be hashed; ValueError or TypeError that names the part which cannot be."""
    return _encode(value, what, DEEPEST)


def _encode(value: Any, path: str, room: int) -> bytes:  # one branch a kind of value
    if (simple := _simple(value)) is not None:
        return simple
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, int):
        return _part(b"i", b"%x" % value)
    if isinstance(value, bytes | bytearray | memoryview):
        return _part(b"y", bytes(value))
    if isinstance(value, UUID):
        return _part(b"u", value.bytes)
    if isinstance(value, float | Decimal | date):
        return _ordered(value, path)
    if not isinstance(value, list | tuple | Mapping | AbstractSet):
        raise TypeError(f"{path} is a {type(value).__name__}, which has no canonical form; there is one for {_KINDS}")
    if not room:
        raise ValueError(f"{path[:80]}… is nested deeper than {DEEPEST}, or contains itself")
    if isinstance(value, Mapping):
        pairs = [(_simple(key) or _encode(key, f"the key {key!r:.40} of {path}", room - 1), key) for key in value]
        pairs.sort(key=itemgetter(0))
        told = [name + (_simple(value[key]) or _encode(value[key], f"{path}[{key!r:.40}]", room - 1))
                for name, key in pairs]  # fmt: skip
        return _part(b"m", b"".join(told))
    if isinstance(value, AbstractSet):
        return _part(b"e", b"".join(sorted(_encode(each, f"{each!r:.40} in {path}", room - 1) for each in value)))
    parts = [_simple(each) or _encode(each, f"{path}[{at}]", room - 1) for at, each in enumerate(value)]
    return _part(b"l", b"".join(parts))


def _simple(value: Any) -> bytes | None:
    """Of what most values are made of, without a word about where it is; None when it is something else, or wrong."""
    kind = type(value)
    if kind is str:
        if value.isascii():
            return b"s%d:%b" % (len(value), value.encode())
    elif kind is int:
        return _part(b"i", b"%x" % value)
    elif value is None:
        return b"n0:"
    elif kind is bool:
        return b"b1:1" if value else b"b1:0"
    return None


def _ordered(value: Any, path: str) -> bytes:
    """Numbers with a fraction and points in time: those that are not equal to themselves are refused."""
    if value.is_nan() if isinstance(value, Decimal) else value != value:
        raise ValueError(f"{path} is {value!r}, which does not even equal itself")
    if isinstance(value, float):
        return _part(b"f", repr(float(value) + 0.0).encode())
    if isinstance(value, Decimal):
        return _part(b"d", _plain(value).encode())
    if not isinstance(value, datetime):
        return _part(b"D", value.isoformat().encode())
    if value.utcoffset() is None:
        return _part(b"t", value.replace(tzinfo=None).isoformat().encode())
    try:
        return _part(b"T", value.astimezone(UTC).replace(tzinfo=None).isoformat().encode())
    except OverflowError:
        raise ValueError(f"{path} is {value!r}, which in UTC is in no year from 1 to 9999") from None


def _plain(value: Decimal) -> str:
    """Without the zeros at its end, whatever precision the context has."""
    if not value.is_finite():
        return str(value)
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    while digits and not digits[-1]:
        digits, exponent = digits[:-1], exponent + 1
    return f"{'-' if sign else ''}{''.join(map(str, digits))}e{exponent}" if digits else "0"


def _text(text: str, path: str) -> bytes:
    try:
        return _part(b"s", text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{path} is no text: half of a character in {text!r:.80}") from None


def _part(kind: bytes, body: bytes) -> bytes:
    return b"%s%d:%s" % (kind, len(body), body)
