"""What a sandbox's record says, what is to be done about it, and what clients are told. Pure: values to values."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any
from uuid import uuid4

import holdfast

TYPE = "sandbox"
SUPERVISOR = "gateway:supervisor:"
"""What the names of the leases begin with that say who has a supervisor's connection."""
TOKEN = "HOLDFAST_SUPERVISOR_TOKEN"
GATEWAY = "HOLDFAST_GATEWAY"
MOST = 400_000
"""Bytes of what is asked for, as JSON: the record has it, once more what the driver says of it, and an end."""
_SPEC = ("argv", "env", "cwd", "limits", "grace", "log_bytes", "supervised")
_ETAG = re.compile(r'(W/)?"([\x21\x23-\x7e]*)"')


class Step(Enum):
    KEEP = "keep"
    MAKE = "make"
    END = "end"


def made(given: Mapping[str, Any], address: str, token: str | None) -> dict[str, Any]:
    """The payload of a new one. ``incarnation``: so that what the driver runs is not taken for an earlier one's of the
    same id. Of the token only the hash is kept."""
    return {
        "spec": {name: given[name] for name in _SPEC},
        "metadata": given["metadata"],
        "gateway": address,
        "incarnation": uuid4().hex[:12],
        "tokens": [] if token is None else [hashed(token)],
    }


def size(payload: Mapping[str, Any]) -> int:
    """Of what is asked for, in bytes as JSON."""
    return len(json.dumps([payload["spec"], payload["metadata"]]))


def owner(payload: Mapping[str, Any], home: str) -> str:
    """What the driver is told: ``home`` is this installation, whose sandboxes no other one touches."""
    return f"{home}/{payload['incarnation']}"


def due(payload: Mapping[str, Any] | None, backend: holdfast.Backend | None, home: str) -> Step:
    """``payload`` is the record's, None when there is none: then nothing of ours is to run. What had a backend and has
    none any more is not made again: it is gone, and the reconciler tells so."""
    if backend is not None and not is_of(payload, backend, home):
        ours = str(backend.details.get("owner")).startswith(f"{home}/")
        return Step.END if ours and not backend.deleting else Step.KEEP
    wanted = payload is not None and phase(payload) not in ("Deleting", "Deleted")
    if backend is not None:
        return Step.KEEP if wanted or backend.deleting else Step.END
    never = payload is not None and "conditions" not in payload.get("status", {})
    return Step.MAKE if wanted and never else Step.KEEP


def is_of(payload: Mapping[str, Any] | None, backend: holdfast.Backend, home: str) -> bool:
    return payload is not None and backend.details.get("owner") == owner(payload, home)


def phase(payload: Mapping[str, Any]) -> str:
    found: str = payload.get("status", {}).get("phase", "Provisioning")
    return found


def hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def knows(payload: Mapping[str, Any], token: str) -> bool:
    """Whether it is the supervisor's."""
    given = hashed(token)
    return any(hmac.compare_digest(given, each) for each in payload["tokens"])


def told(record: Any) -> dict[str, Any]:
    """With the names of its variables, and never their values."""
    payload = record.payload
    return {
        "id": record.id,
        "name": record.name,
        "labels": dict(record.labels),
        "metadata": payload["metadata"],
        "spec": {**payload["spec"], "env": sorted(payload["spec"]["env"])},
        "phase": phase(payload),
        "status": payload.get("status", {}),
        "version": record.version,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
    }


def etag(version: int) -> str:
    return f'"{version}"'


def matches(condition: str, version: int, *, weak: bool) -> bool:
    """Whether an If-Match (or, ``weak``, an If-None-Match) names this version. ValueError when it makes no sense."""
    if condition.strip() == "*":
        return True
    found = _ETAG.findall(condition)
    if not found or _ETAG.sub("", condition).strip(", \t"):
        raise ValueError(f"must be the ETag of an answer, as it came, in quotes, not {condition[:60]!r}")
    return any(value == str(version) and (weak or not prefix) for prefix, value in found)
