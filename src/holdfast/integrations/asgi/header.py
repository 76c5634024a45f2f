"""The header Idempotency-Key: a String of Structured Fields (RFC 9651), or the unquoted text that many clients send.

    Idempotency-Key: "8e03978e-40d5-43dd-bc93-6894a57f9324"

Parameters after the string are ignored, as the RFC requires. An unquoted key is visible ASCII without characters that
have a meaning in Structured Fields. Quoted and unquoted, it is the same key.
"""

from __future__ import annotations

import re

MAX_LENGTH = 255

_STRING = r'"((?:[ !#-\[\]-~]|\\["\\])*)"'
_VALUE = (
    r'"(?:[ !#-\[\]-~]|\\["\\])*"'
    r"|\?[01]"
    r"|:[A-Za-z0-9+/=]*:"
    r"|-?\d{1,15}"
    r"|-?\d{1,12}\.\d{1,3}"
    r"|[A-Za-z*][!#$%&'*+\-.^_`|~:/0-9A-Za-z]*"
)
_PARAMETER = rf"; *[a-z*][a-z0-9_\-.*]*(?:=(?:{_VALUE}))?"
_QUOTED = re.compile(rf"{_STRING}(?:{_PARAMETER})*", re.ASCII)
_BARE = re.compile(r"[!#-+\--:<-\[\]-~]+")


def parse(value: bytes) -> str:
    """The key. Raises ValueError if the header is malformed."""
    text = value.decode("latin-1").strip(" \t")
    if match := _QUOTED.fullmatch(text):
        key = re.sub(r"\\(.)", r"\1", match[1])
    elif _BARE.fullmatch(text):
        key = text
    else:
        raise ValueError('it must be one string in double quotes, such as "8e03978e-40d5-43dd-bc93-6894a57f9324"')
    if not 1 <= len(key) <= MAX_LENGTH:
        raise ValueError(f"it must have 1 to {MAX_LENGTH} characters, not {len(key)}")
    return key
