"""What an object is, as values: conditions, checked arguments, records, and the refusal in words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from holdfast.errors import AlreadyExists, Conflict, HoldfastError
from holdfast.names import check_name

MAX_PAYLOAD = 1 << 20
MAX_LABELS = 64

Json = str | int | float | bool | dict[str, Any] | list[Any] | None
Payload = bytes | Json
Row = Mapping[str, Any]

_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # made once: dumps() would, every time
to_json = _JSON.encode
_make = getattr(json.encoder, "c_make_encoder", None)  # what encode() makes, every time
_chunks: Callable[[object, Any], Iterable[str]] = (
    _make(None, _JSON.default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, False)
    if _make
    else _JSON.iterencode
)
_from_json = json.JSONDecoder().raw_decode  # without looks for white space, of which we write none
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,98}[A-Za-z0-9])?"


class MustCreate(NamedTuple):
    """Only if there is no such object."""


class MatchVersion(NamedTuple):
    """Only if the object is at this version: nobody has written it since."""

    version: int


class Unconditional(NamedTuple):
    """Whatever is there, or is not."""


Condition = MustCreate | MatchVersion | Unconditional


class ObjectRecord(NamedTuple):
    """An object as it was at ``version``."""

    type: str
    id: str
    name: str | None
    payload: Any
    labels: Mapping[str, str]
    version: int
    created_at: datetime
    updated_at: datetime

    @classmethod
    def of(
        cls, type: str, row: Row, payload: Payload, *, id: str | None = None, name: str | None = None
    ) -> ObjectRecord:
        """From a row, which does not repeat what it was asked for, or told."""
        labels, when = row["labels"], datetime.fromtimestamp
        return tuple.__new__(cls, (  # as cls(...), which is a function in between
            type, id or row["id"], name or row["name"], payload, {} if labels == "{}" else json.loads(labels),
            row["version"], when(row["created_at"], UTC), when(row["updated_at"], UTC),
        ))  # fmt: skip


def payload_of(row: Row) -> Any:
    if (body := row["body"]) is None:
        raw = row["raw"]
        return raw if isinstance(raw, bytes) else bytes.fromhex(raw[2:])  # PostgreSQL says \x…
    try:
        value, end = _from_json(body)
        if end == len(body):
            return value
    except ValueError:
        pass
    return json.loads(body)  # somebody else's: with white space around it, or spoilt


def encode(payload: object) -> tuple[str | None, bytes | None]:
    """The payload as JSON text, or as bytes; refused unless it would come back as it is."""
    if isinstance(payload, bytes | bytearray | memoryview):
        raw = bytes(payload)
        _check_size(len(raw))
        return None, raw
    try:
        text = "".join(_chunks(payload, 0))
        same = _from_json(text)[0] == payload
    except RecursionError as error:
        raise ValueError(
            "payload must be bytes, or a value that JSON has: it contains itself, or is too deep"
        ) from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"payload must be bytes, or a value that JSON has: {error}") from error
    if not same:
        raise ValueError(
            "payload would not come back from JSON as it is: use str keys, lists instead of tuples, or bytes"
        )
    _check_size(len(text))
    return text, None


def _check_size(size: int) -> None:
    if size > MAX_PAYLOAD:
        raise ValueError(f"payload must have at most {MAX_PAYLOAD} bytes, not {size}: store a reference to it instead")


def check_labels(labels: object) -> str:
    """As JSON."""
    if not isinstance(labels, Mapping):
        raise TypeError(f"labels must be a dict of str to str, not {type(labels).__name__}")
    if len(labels) > MAX_LABELS:
        raise ValueError(f"labels must be at most {MAX_LABELS}, not {len(labels)}")
    for key, value in labels.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"labels must be a dict of str to str, not {key!r}: {value!r}")
        if not re.fullmatch(_LABEL, key):
            raise ValueError(
                f"the key of a label must have 1 to 100 letters, digits, or . _ / - in between, not {key[:120]!r}"
            )
        if value:
            check_name(value, f"label {key!r}")
    return to_json(dict(labels))


def check_version(version: object, what: str = "version") -> int:
    if isinstance(version, bool) or not isinstance(version, int):
        raise TypeError(f"{what} must be an int, not {type(version).__name__}")
    if not 1 <= version < 1 << 63:
        raise ValueError(f"{what} must be one that a record has, from 1 on, not {version}")
    return version


def check_condition(condition: object) -> tuple[str, int | None]:
    """As the statements call it, and the version expected."""
    if isinstance(condition, MatchVersion):
        return "match", check_version(condition.version)
    if isinstance(condition, MustCreate):
        return "create", None
    if isinstance(condition, Unconditional):
        return "any", None
    raise TypeError(f"condition must be MustCreate(), MatchVersion(version) or Unconditional(), not {condition!r}")


def refusal(type: str, id: str, row: Row, condition: object) -> HoldfastError:
    """Why nothing was written, in words."""
    what, current = f"object {id!r} of type {type!r}", row["current"]
    match row["status"]:
        case "exists":
            return AlreadyExists(f"{what} exists already, at version {current}", current=current, owner=id)
        case "taken":
            owner = row["owner"]
            message = f"{what} cannot have that name: object {owner!r} has it, at version {current}"
            return AlreadyExists(message, current=current, owner=owner)
    there = "does not exist" if current is None else f"is at version {current}"
    return Conflict(f"{what} {there}, not at version {condition}: read it again", current=current)
