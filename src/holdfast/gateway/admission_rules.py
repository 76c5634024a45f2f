"""The rules of admission: pure functions of a request, and a rate limit that is given its clock."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import accumulate
from math import ceil
from uuid import uuid4

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Need no token: load balancers and orchestrators ask for them."""
SUPERVISOR_PATH = re.compile(r"/sandboxes/[^/]+/supervisor")
"""Supervisors connect here with the token of their sandbox, which the route checks."""
_HOOK_PATH = re.compile(r"/hook/[^/]+")
BODY_BYTES = 1 << 20
MAX_HEADERS = 100
HEAD_BYTES = 32_768
"""Of a request line and its headers, in all."""
MAX_DEPTH = 100
"""Objects and arrays of a body inside each other."""
MAX_PATH, MAX_QUERY = 2048, 8192
MAX_BUCKETS = 10_000
"""Of a rate limit."""
FAILURES = 10.0
"""Requests a second and address without a known token that are answered with 401; further ones with 429."""
HANDSHAKES = 5.0
"""Connections a second that a supervisor may make."""

_SINGLE = frozenset({b"authorization", b"host", b"origin", b"sec-fetch-site", b"x-holdfast-principal"})
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_SURROGATE_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_BRACKETS_TO_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes({*range(256)} - {*b"[{]}"})

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


def request_id(header: str | None) -> str:
    """The client's own id if it is safe in a log and a header; else a new one."""
    return header if header and re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", header) else uuid4().hex


def permits(scope: str, method: str, path: str) -> bool:
    """Whether a token of this scope is good for the request. ``report``: hooks of agents and nothing else."""
    if scope == "report":
        return _HOOK_PATH.fullmatch(path) is not None
    return scope == "operate" or method in SAFE_METHODS


def repeated_header(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """A header that decides something and is given more than once: readers would disagree about which one counts."""
    names = [name for name, _ in headers if name in _SINGLE]
    return next((name.decode() for name in names if names.count(name) > 1), None)


def is_allowed_host(host: str, allowed: Collection[str]) -> bool:
    """Whether a Host header is localhost, an IP address or an allowed name.

    This prevents DNS rebinding: a foreign page can let its own name resolve to this machine, but not an allowed name.
    """
    if not (match := re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]/@\s]+)(:\d{1,5})?", host)):
        return False
    name = match[1].strip("[]").lower().rstrip(".")
    if name == "localhost" or name in allowed:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_same_origin(headers: Mapping[str, str]) -> bool:
    """Whether a write comes from a page of this origin, or from no page at all.

    A browser adds credentials to the requests of foreign pages, too, so this check is what keeps them from writing.
    """
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    scheme, _, host = origin.partition("://")
    return scheme in ("http", "https") and host.lower() == headers.get("host", "").lower()


def json_body_error(body: bytes) -> str | None:
    """Why this JSON body could not be returned as it was sent, or None.

    Checked before the body is parsed: a stored value that cannot be encoded would break every list that contains it.
    """
    try:
        body.decode()
    except UnicodeDecodeError:
        return "a body must be UTF-8"
    if b"\\u" in body and _SURROGATE.search(_SURROGATE_PAIR.sub(b"", body.replace(rb"\\", b""))):
        return "a body must not contain lone surrogates (\\ud800 to \\udfff)"
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return None
    steps = _STRINGS.sub(b"", body).translate(_BRACKETS_TO_STEPS, _NO_BRACKETS)
    if max(accumulate(memoryview(steps).cast("b")), default=0) > MAX_DEPTH:
        return f"a body has at most {MAX_DEPTH} objects and arrays inside each other"
    return None


def address_group(address: str) -> str:
    """The address that limits apply to: of IPv6 the network of 64 bits, which a single machine has."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if parsed.version == 4 else str(ipaddress.ip_network((parsed.packed[:8] + bytes(8), 64)))


class RateLimit:
    """A token bucket per key, e.g. a principal: ``rate`` requests a second, and as many at once. 0 is no limit.

    Of more than MAX_BUCKETS the one that was used longest ago is forgotten.
    """

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._rate, self._clock = rate, clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, key: str) -> int | None:
        """None when the request is granted; else the seconds after which to retry."""
        if (seconds := self.wait(key)) is None and self._rate:
            self._buckets[key] = (self._left(key) - 1.0, self._clock())
            if len(self._buckets) > MAX_BUCKETS:
                del self._buckets[next(iter(self._buckets))]
        return seconds

    def wait(self, key: str) -> int | None:
        """What ``take`` would return."""
        left = self._left(key) if self._rate else 1.0
        return None if left >= 1.0 else ceil((1.0 - left) / self._rate)

    def _left(self, key: str) -> float:
        now, capacity = self._clock(), max(self._rate, 1.0)
        left, before = self._buckets.pop(key, (capacity, now))
        left = min(capacity, left + (now - before) * self._rate)
        if left < capacity:
            self._buckets[key] = left, now
        return left
