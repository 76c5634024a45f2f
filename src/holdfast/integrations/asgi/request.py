"""The identity of a request: its operation key, and the fingerprint that a retry must repeat."""

from __future__ import annotations

from hashlib import sha256

from holdfast.integrations.asgi.problem import Receive, Scope, too_large


def header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a header; several lines are joined with commas. None if it is absent."""
    values = [value for field, value in scope["headers"] if field.lower() == name]
    return b", ".join(values) if values else None


def operation_key(principal: str, method: str, path: str, key: str) -> str:
    """A digest of principal, method, path and key, after the last three in readable form.

    The principal may be a secret, and is only in the digest.
    """
    digest = _digest(*(part.encode(errors="surrogatepass") for part in (principal, method, path, key)))
    label = f"{method[:10]} {path[:50]} {key[:60]}"
    return "".join(char if " " <= char <= "~" else "?" for char in label) + f" {digest}"


def fingerprint(scope: Scope, body: bytes) -> str:
    """A digest of query, content type and body. Method and path are in the operation key."""
    content_type = header(scope, b"content-type") or b""
    return _digest(scope.get("query_string") or b"", content_type.strip().lower(), body)


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """The whole body; None if the client disconnected before it was sent. Raises Problem if too large."""
    declared = header(scope, b"content-length") or b""
    if declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
        raise too_large(limit)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


def _digest(*parts: bytes) -> str:
    return sha256(b"".join(b"%d:%s" % (len(part), part) for part in parts)).hexdigest()
