"""An object as values: conditions of a write, the record, the encoding of its payload, the error of a refused write.

A payload is bytes, or a value that survives JSON unchanged: any other value is refused before it is written.
Pure: nothing here talks to a database.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

from holdfast.errors import AlreadyExists, Conflict, HoldfastError
from holdfast.names import check_name

MAX_PAYLOAD = 1 << 20
MAX_LABELS = 64

Json = str | int | float | bool | dict[str, Any] | list[Any] | None
Payload = bytes | Json
Row = Mapping[str, Any]

# hot: every put encodes and every get decodes. json.dumps() builds an encoder for each call, JSONEncoder.encode() a
# c_make_encoder for each call; both are built once here. See bench/objects.py.
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
to_json = _ENCODER.encode
# private: json.encoder.c_make_encoder, tested in tests/test_private_names.py
_c_make_encoder = getattr(json.encoder, "c_make_encoder", None)
_encode_chunks: Callable[[object, Any], Iterable[str]] = (
    _c_make_encoder(None, _ENCODER.default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, False)
    if _c_make_encoder
    else _ENCODER.iterencode
)
_raw_decode = json.JSONDecoder().raw_decode  # does not skip white space: we write none
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,98}[A-Za-z0-9])?"


class MustCreate(NamedTuple):
    """Write only if there is no such object."""


class MatchVersion(NamedTuple):
    """Write only if the object is at this version: it has not been written since."""

    version: int


class Unconditional(NamedTuple):
    """Write in any case, whether the object exists or not."""


Condition = MustCreate | MatchVersion | Unconditional


class ProofOfLease(Protocol):
    """A grant of a lease, as far as a write under it needs it."""

    @property
    def name(self) -> str: ...
    @property
    def token(self) -> str: ...
    def check(self) -> None:
        """Raises when the grant is lost, or may be."""


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
    def _of(
        cls, type: str, row: Row, payload: Payload, *, id: str | None = None, name: str | None = None
    ) -> ObjectRecord:
        """From a row. Values that the caller already has (``id``, ``name``) are not columns of it."""
        labels, to_datetime = row["labels"], datetime.fromtimestamp
        return tuple.__new__(cls, (  # hot: cls(...) would add a Python call to every get, see bench/objects.py
            type, id or row["id"], name or row["name"], payload, {} if labels == "{}" else json.loads(labels),
            row["version"], to_datetime(row["created_at"], UTC), to_datetime(row["updated_at"], UTC),
        ))  # fmt: skip


def decode_payload(row: Row) -> Any:
    """The payload. JSON that Python cannot parse, as another program may have written it, is returned as its bytes: an
    int of more than 4,300 digits, or hundreds of arrays inside each other. One such object must not break a listing."""
    if (body := row["body"]) is None:
        raw = row["raw"]
        return raw if isinstance(raw, bytes) else bytes.fromhex(raw[2:])  # PostgreSQL writes \x…
    try:
        value, end = _raw_decode(body)
        if end == len(body):
            return value
        return json.loads(body)  # written by another program: surrounded by white space
    except (ValueError, RecursionError):
        return body.encode()


def encode_payload(payload: object) -> tuple[str | None, bytes | None]:
    """The payload as JSON text, or as bytes; one of the two is None. ValueError unless it would be read back equal."""
    if isinstance(payload, bytes | bytearray | memoryview):
        raw = bytes(payload)
        _check_size(len(raw))
        return None, raw
    try:
        text = "".join(_encode_chunks(payload, 0))
        is_unchanged = _raw_decode(text)[0] == payload
    except RecursionError as error:
        raise ValueError(
            "payload must be bytes or a JSON value: it contains itself, or is nested too deeply"
        ) from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"payload must be bytes or a JSON value: {error}") from error
    if not is_unchanged:
        raise ValueError("payload would be read back changed: use str keys, lists instead of tuples, or bytes")
    _check_size(len(text))
    return text, None


def _check_size(size: int) -> None:
    if size > MAX_PAYLOAD:
        raise ValueError(f"payload must have at most {MAX_PAYLOAD} bytes, not {size}: store a reference to it instead")


def check_labels(labels: object) -> str:
    """The labels as JSON text. TypeError or ValueError for keys or values that a label cannot have."""
    if not isinstance(labels, Mapping):
        raise TypeError(f"labels must be a dict of str to str, not {type(labels).__name__}")
    if len(labels) > MAX_LABELS:
        raise ValueError(f"an object has at most {MAX_LABELS} labels, not {len(labels)}")
    for key, value in labels.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"labels must be a dict of str to str, not {key!r}: {value!r}")
        if not re.fullmatch(_LABEL, key):
            raise ValueError(
                f"the key of a label must be 1 to 100 letters, digits, or . _ / - between them, not {key[:120]!r}"
            )
        if value:
            check_name(value, f"label {key!r}")
    return to_json(dict(labels))


def check_version(version: object, what: str = "version") -> int:
    if isinstance(version, bool) or not isinstance(version, int):
        raise TypeError(f"{what} must be an int, not {type(version).__name__}")
    if not 1 <= version < 1 << 63:
        raise ValueError(f"{what} must be the version of a record, 1 or more, not {version}")
    return version


ABSENT, ANY = 0, -1
"""Instead of the version that a write expects: the object must not exist; any version, or none."""


def check_condition(condition: object) -> int:
    """The version that the condition expects, ABSENT or ANY."""
    if isinstance(condition, MatchVersion):
        return check_version(condition.version)
    if isinstance(condition, MustCreate):
        return ABSENT
    if isinstance(condition, Unconditional):
        return ANY
    raise TypeError(f"condition must be MustCreate(), MatchVersion(version) or Unconditional(), not {condition!r}")


def refusal(type: str, id: str, row: Row, expected: int) -> HoldfastError:
    """The error for a write that the database refused with ``row``: AlreadyExists or Conflict."""
    what, current = f"object {id!r} of type {type!r}", row["current"]
    match row["status"]:
        case "exists":
            return AlreadyExists(f"{what} already exists, at version {current}", current=current, owner=id)
        case "taken":
            owner = row["owner"]
            message = f"{what} cannot have that name: object {owner!r} has it, at version {current}"
            return AlreadyExists(message, current=current, owner=owner)
    state = "does not exist" if current is None else f"is at version {current}"
    return Conflict(f"{what} {state}, and version {expected} was expected: read it again", current=current)
