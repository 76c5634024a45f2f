"""Tokens: a name, a scope and a secret each, compared in constant time."""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256

MIN_SECRET = 16
SCOPES = ("report", "read", "operate")


@dataclass(frozen=True, slots=True)
class Token:
    name: str
    """The principal: stands in logs, and owns idempotency keys and a rate."""
    scope: str
    secret: str = field(repr=False)


LOCAL = Token("local", "operate", "")
"""The principal of every request to a replica without tokens, which listens on loopback only."""


def parse(text: str) -> tuple[Token, ...]:
    """Parse lines of ``NAME SCOPE SECRET``; a word that begins with # begins a comment.

    Raises ValueError with every wrong line. No secret is in its message.
    """
    tokens: list[Token] = []
    errors: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].split()
        if not words:
            continue
        if error := _line_error(words, tokens):
            errors.append(f"line {number}: {error}")
        else:
            tokens.append(Token(*words))
    if errors:
        raise ValueError("; ".join(errors))
    if not tokens:
        raise ValueError("there is no token in it: NAME SCOPE SECRET a line, SCOPE is report, read or operate")
    return tuple(tokens)


def _line_error(words: list[str], before: Iterable[Token]) -> str | None:
    if len(words) != 3:
        return f"must be NAME SCOPE SECRET, and has {len(words)} word{'s' if len(words) > 1 else ''}"
    name, scope, secret = words
    if scope not in SCOPES:
        return "the scope must be report, read or operate"
    if len(name) > 64 or not name.isprintable():
        return "the name must be printable, of at most 64 characters"
    if len(secret) < MIN_SECRET or not (secret.isascii() and secret.isprintable()):
        return f"the secret must be at least {MIN_SECRET} printable ASCII characters"
    if any(token.name == name or token.secret == secret for token in before):
        return "the name or the secret is in a line before it already"
    return None


def secret_in_header(authorization: str) -> str | None:
    """The secret in an Authorization header: of a bearer, or the password that a browser asked its user for."""
    scheme, _, credentials = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(credentials.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return None
    return None


def find(secret: str, tokens: Iterable[Token]) -> Token | None:
    """The token with this secret, or None. Compares with all tokens, by digests of one length: timing reveals none."""
    match = None
    digest = sha256(secret.encode("utf-8", "surrogateescape")).digest()
    for token in tokens:
        if hmac.compare_digest(digest, sha256(token.secret.encode()).digest()):
            match = token
    return match
