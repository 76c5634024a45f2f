"""What the shield decides by: pure functions of what was asked, and a bucket of tokens that is told the time."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from math import ceil
from uuid import uuid4

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN = frozenset({"/healthz", "/readyz"})
"""Asked by what keeps replicas running, which has no token."""
SUPERVISOR = re.compile(r"/sandboxes/[^/]+/supervisor")
"""Where supervisors connect, each with the token of its sandbox: it is looked at there."""
BODY_BYTES = 1 << 20
MOST_HEADERS = 100
DEEPEST = 100
"""Objects and arrays of a body inside each other."""
LONGEST_PATH, LONGEST_QUERY = 2048, 8192

_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_OTHERS = bytes({*range(256)} - {*b"[{]}"})

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
"""On every answer, unless the route has set its own. There is no CORS: no other origin may read anything."""


def number_of(asked: str | None) -> str:
    """The client's own, if it can stand in a log and a header as it is; else a new one."""
    return asked if asked and re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", asked) else uuid4().hex


def is_host_ours(host: str, ours: Collection[str]) -> bool:
    """A page elsewhere can have its own name lead here (DNS rebinding), but not ours, and not an address."""
    if not (found := re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]/@\s]+)(:\d{1,5})?", host)):
        return False
    name = found[1].strip("[]").lower().rstrip(".")
    if name == "localhost" or name in ours:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_origin_ours(headers: Mapping[str, str]) -> bool:
    """Whether a write was begun by a page of ours, or by no page at all. Credentials go with whatever a browser sends,
    so it is this that keeps other pages from writing."""
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    scheme, _, place = origin.partition("://")
    return scheme in ("http", "https") and place.lower() == headers.get("host", "").lower()


def unspeakable(body: bytes) -> str | None:
    """What keeps a JSON body from being told again as it came; None when nothing does. Looked at before it is read:
    what is kept and cannot be told would spoil every list that it is in."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return "a body must be UTF-8"
    if b"\\u" in body and _HALF.search(_PAIR.sub(b"", body.replace(rb"\\", b""))):
        return "a body must not have halves of characters (\\ud800 to \\udfff, alone)"
    if body.count(b"[") + body.count(b"{") <= DEEPEST:
        return None
    steps = _STRINGS.sub(b"", body).translate(_STEPS, _OTHERS)
    if max(accumulate(memoryview(steps).cast("b")), default=0) > DEEPEST:
        return f"a body has at most {DEEPEST} objects and arrays inside each other"
    return None


class Rates:
    """A bucket a principal: ``rate`` a second, and as many at once. Principals are the tokens there are, so there is an
    end to them."""

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._rate, self._clock = rate, clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait(self, principal: str) -> int | None:
        """Seconds until another write may be asked for; None when this one is granted."""
        if not self._rate:
            return None
        now, most = self._clock(), max(self._rate, 1.0)
        left, before = self._buckets.get(principal, (most, now))
        left = min(most, left + (now - before) * self._rate)
        granted = left >= 1.0
        self._buckets[principal] = (left - granted, now)
        return None if granted else ceil((1.0 - left) / self._rate)
