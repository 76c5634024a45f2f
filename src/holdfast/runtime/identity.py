"""The identity of this process, and tokens.

hot: written by hand, because importing ``uuid``, ``secrets`` and ``socket`` takes milliseconds of every start."""

from __future__ import annotations

import os
import re
import time
from typing import Any

_unnamed = ""
"""Stands for the name of a node that has none; the same as long as this process lives."""
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"


def new_token() -> str:
    """A random UUID (version 4): the secret proof of holding a lease."""
    raw = bytearray(os.urandom(16))
    raw[6] = raw[6] & 0x0F | 0x40
    raw[8] = raw[8] & 0x3F | 0x80
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def check_token(token: object) -> str:
    text = str(token).lower()
    if not re.fullmatch(_UUID, text):  # compiled when it is first needed
        raise ValueError("token must be the UUID that acquire gave out")
    return text


def this_process() -> dict[str, Any]:
    """For listings: label, host, pid, started."""
    host, pid = _host(), os.getpid()
    return {"label": f"{host}:{pid}:{os.urandom(3).hex()}", "host": host, "pid": pid, "started": time.time()}


def application_name(client: str = "") -> str:
    """``holdfast:host:pid[:client]``, as the server shows a session. The host is cut to what fits into 63 bytes."""
    end = f":{os.getpid()}:{client}" if client else f":{os.getpid()}"
    return f"holdfast:{_host()[: max(8, 54 - len(end))]}{end}"[:63]


def _host() -> str:
    """The name of this node, or a UUID if it has none: two nodes never share a name."""
    global _unnamed
    try:
        name = os.uname().nodename
    except AttributeError:  # pragma: no cover - Windows
        name = os.environ.get("COMPUTERNAME", "")
    if name and name != "(none)":  # the kernel's word
        return name
    _unnamed = _unnamed or new_token()
    return _unnamed
