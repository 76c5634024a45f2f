"""Who may ask for what: a name, a scope and a secret a line, compared in constant time."""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256

SHORTEST = 16
SCOPES = ("read", "operate")


@dataclass(frozen=True, slots=True)
class Token:
    name: str
    """The principal: who is meant in logs, and whose idempotency keys and rate these are."""
    scope: str
    secret: str = field(repr=False)


LOCAL = Token("local", "operate", "")
"""Whoever can reach a replica that asks for no token, which is on loopback."""


def parse(text: str) -> tuple[Token, ...]:
    """Lines of ``NAME SCOPE SECRET``; a word that begins with # begins a comment. ValueError with every line that is
    wrong, but no secret."""
    found: list[Token] = []
    wrong: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].split()
        if not words:
            continue
        if problem := _problem(words, found):
            wrong.append(f"line {number}: {problem}")
        else:
            found.append(Token(*words))
    if wrong:
        raise ValueError("; ".join(wrong))
    if not found:
        raise ValueError("there is no token in it: NAME SCOPE SECRET a line, SCOPE is read or operate")
    return tuple(found)


def _problem(words: list[str], before: Iterable[Token]) -> str | None:
    if len(words) != 3:
        return f"must be NAME SCOPE SECRET, and has {len(words)} word{'s' if len(words) > 1 else ''}"
    name, scope, secret = words
    if scope not in SCOPES:
        return "the scope must be read or operate"
    if len(name) > 64 or not name.isprintable():
        return "the name must be printable, of at most 64 characters"
    if len(secret) < SHORTEST or not (secret.isascii() and secret.isprintable()):
        return f"the secret must be at least {SHORTEST} printable ASCII characters"
    if any(each.name == name or each.secret == secret for each in before):
        return "the name or the secret is in a line before it already"
    return None


def presented(authorization: str) -> str | None:
    """The secret in an Authorization header: a bearer's, or, as browsers ask their users for one, a password."""
    scheme, _, rest = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return None
    return None


def known(secret: str, tokens: Iterable[Token]) -> Token | None:
    """All are compared, and by digests of one length: how long it takes says nothing about any of them."""
    found = None
    given = sha256(secret.encode("utf-8", "surrogateescape")).digest()
    for token in tokens:
        if hmac.compare_digest(given, sha256(token.secret.encode()).digest()):
            found = token
    return found
