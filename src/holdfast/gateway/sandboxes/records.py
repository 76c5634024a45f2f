"""The record of a sandbox as pure functions: its payload, what is due for it, and what clients see."""

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
from holdfast.gateway.seal import Seal

TYPE = "@sandbox"
SUPERVISOR_LEASE = "gateway:supervisor:"
"""Prefix of the lease of a supervisor's connection; the sandbox's id follows. Its holder is the replica."""
TOKEN_VARIABLE = "HOLDFAST_SUPERVISOR_TOKEN"
ADDRESS_VARIABLE = "HOLDFAST_GATEWAY"
MAX_BYTES = 400_000
"""Of spec and metadata as JSON. The record also contains a status of the driver, which may repeat them."""
TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
"""What a token of a supervisor looks like: 32 random bytes."""
_SPEC_FIELDS = ("argv", "env", "cwd", "limits", "grace", "log_bytes", "supervised")
_ETAG = re.compile(r'(W/)?"([\x21\x23-\x7e]*)"')


class SandboxAction(Enum):
    KEEP = "keep"
    CREATE = "create"
    END = "end"


def new_payload(fields: Mapping[str, Any], address: str, token: str | None, seal: Seal) -> dict[str, Any]:
    """The payload of a new sandbox. ``incarnation`` tells it apart from an earlier one of the same id, whose processes
    the driver may still run. The values of variables are sealed, and of the token only the hash is stored."""
    incarnation = uuid4().hex[:12]
    spec = {name: fields[name] for name in _SPEC_FIELDS}
    env = {name: seal.close(value.encode(), f"{incarnation} {name}").decode() for name, value in spec["env"].items()}
    return {
        "spec": {**spec, "env": env},
        "metadata": fields["metadata"],
        "gateway": address,
        "incarnation": incarnation,
        "tokens": [] if token is None else [hash_token(token)],
    }


def env(payload: Mapping[str, Any], seal: Seal) -> dict[str, str]:
    """The variables of the sandbox. Raises Problem when this replica cannot open them."""
    incarnation = payload["incarnation"]
    values = payload["spec"]["env"]
    return {name: seal.open(value.encode(), f"{incarnation} {name}").decode() for name, value in values.items()}


def size(payload: Mapping[str, Any]) -> int:
    """Bytes of spec and metadata as JSON."""
    return len(json.dumps([payload["spec"], payload["metadata"]]))


def owner(payload: Mapping[str, Any], installation: str) -> str:
    """The owner to give to the driver: installations that share a driver do not touch each other's sandboxes."""
    return f"{installation}/{payload['incarnation']}"


def due_action(
    payload: Mapping[str, Any] | None, backend: holdfast.reconciler.Backend | None, installation: str
) -> SandboxAction:
    """What the driver has to do. ``payload``: of the record; None when there is none, and nothing of ours may run.

    A sandbox whose backend has disappeared is not created again: the reconciler reports it as gone.
    """
    if backend is not None and not is_backend_of(payload, backend, installation):
        is_ours = str(backend.details.get("owner")).startswith(f"{installation}/")
        return SandboxAction.END if is_ours and not backend.deleting else SandboxAction.KEEP
    is_wanted = payload is not None and phase(payload) not in ("Deleting", "Deleted")
    if backend is not None:
        return SandboxAction.KEEP if is_wanted or backend.deleting else SandboxAction.END
    is_new = payload is not None and "conditions" not in payload.get("status", {})
    return SandboxAction.CREATE if is_wanted and is_new else SandboxAction.KEEP


def is_backend_of(payload: Mapping[str, Any] | None, backend: holdfast.reconciler.Backend, installation: str) -> bool:
    return payload is not None and backend.details.get("owner") == owner(payload, installation)


def phase(payload: Mapping[str, Any]) -> str:
    current: str = payload.get("status", {}).get("phase", "Provisioning")
    return current


def hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def accepts_token(payload: Mapping[str, Any], token: str) -> bool:
    """Whether ``token`` is a token of the sandbox's supervisor."""
    digest = hash_token(token)
    return any(hmac.compare_digest(digest, accepted) for accepted in payload["tokens"])


def answer(record: holdfast.ObjectRecord) -> dict[str, Any]:
    """What clients see: the names of environment variables, and never their values."""
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
    """Whether an If-Match header (or, ``weak``, If-None-Match) names this version. ValueError when it is malformed."""
    if condition.strip() == "*":
        return True
    tags = _ETAG.findall(condition)
    if not tags or _ETAG.sub("", condition).strip(", \t"):
        raise ValueError(f"must be the ETag of an answer, as it came, in quotes, not {condition[:60]!r}")
    return any(value == str(version) and (weak or not prefix) for prefix, value in tags)
