"""What makes two requests the same: the operation that they are, and what they must have in common."""

from __future__ import annotations

from hashlib import sha256

from holdfast.integrations.asgi.problem import Receive, Scope, too_large


def header(scope: Scope, name: bytes) -> bytes | None:
    """All lines of that name as one, as HTTP joins them."""
    found = [value for each, value in scope["headers"] if each.lower() == name]
    return b", ".join(found) if found else None


def operation_key(principal: str, method: str, path: str, key: str) -> str:
    """The operation: principal, method, path and key. Whoever looks at the log sees the last three, shortened, and of
    the principal, which may be a secret, only that it is part of the digest."""
    digest = _digest(*(part.encode(errors="surrogatepass") for part in (principal, method, path, key)))
    shown = f"{method[:10]} {path[:50]} {key[:60]}"
    return "".join(each if " " <= each <= "~" else "?" for each in shown) + f" {digest}"


def fingerprint(scope: Scope, body: bytes) -> str:
    """What a retry has to send again: query, content type and body. Method and path are part of the operation."""
    kind = header(scope, b"content-type") or b""
    return _digest(scope.get("query_string") or b"", kind.strip().lower(), body)


async def read_body(scope: Scope, receive: Receive, most: int) -> bytes | None:
    """All of it; None when the client left before it had sent it. Problem when it is too large."""
    declared = header(scope, b"content-length") or b""
    if declared.isdigit() and (len(declared) > 18 or int(declared) > most):
        raise too_large(most)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > most:
            raise too_large(most)
        if not message.get("more_body", False):
            return bytes(body)


def _digest(*parts: bytes) -> str:
    return sha256(b"".join(b"%d:%s" % (len(part), part) for part in parts)).hexdigest()
