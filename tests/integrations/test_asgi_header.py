"""The grammar of the field, against the RFC's own algorithm for an item that is a string, step by step."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.integrations.asgi.header import MAX_LENGTH, parse

PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))
BARE = "".join(set(PRINTABLE) - set(' ",;\\'))
LOWER = "abcdefghijklmnopqrstuvwxyz"


def by_the_rfc(text: str) -> str | None:
    """RFC 9651, 4.2: Parsing an Item, 4.2.5: a String, 4.2.3.2: Parameters. None: it fails."""
    text = text.strip(" ")
    if not text.startswith('"'):
        return None
    key, at = "", 1
    while at < len(text):
        char = text[at]
        at += 1
        if char == "\\":
            if at == len(text) or text[at] not in '"\\':
                return None
            key += text[at]
            at += 1
        elif char == '"':
            return key if parameters(text[at:]) else None
        elif char not in PRINTABLE:
            return None
        else:
            key += char
    return None


def parameters(text: str) -> bool:
    while text:
        if not text.startswith(";"):
            return False
        text = text[1:].lstrip(" ")
        if not text or text[0] not in LOWER + "*":
            return False
        text = text.lstrip(LOWER + "0123456789_-.*")
        if text.startswith("="):
            value = text[1:]
            if value.startswith('"'):
                ends = [at for at in range(2, len(value) + 1) if by_the_rfc(value[:at]) is not None]
                if not ends:
                    return False
                text = value[ends[0] :]
            elif value.startswith("?"):
                if value[1:2] not in ("0", "1"):
                    return False
                text = value[2:]
            else:
                token = re.match(r"[A-Za-z*][^\s\"(),;<=>?@\[\\\]{}]*|-?[0-9]+", value)
                if token is None:
                    return False
                text = value[token.end() :]
    return True


def quoted(key: str) -> str:
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


@settings(deadline=None)
@given(
    st.text(PRINTABLE, min_size=1, max_size=MAX_LENGTH), st.sampled_from(["", " ", ";a", '; b="x;\\"y";c=?1;*d=tok/en'])
)
def test_every_string_comes_back(key: str, rest: str) -> None:
    assert parse((quoted(key) + rest).encode()) == key


@settings(deadline=None)
@given(st.text(BARE, min_size=1, max_size=MAX_LENGTH))
def test_every_bare_key_is_what_it_is_in_quotes(key: str) -> None:
    assert parse(key.encode()) == parse(quoted(key).encode()) == key


@settings(max_examples=400, deadline=None)
@example('1"\t ')
@given(st.text('"\\;=a b?1*-,é\t', max_size=12))
def test_what_begins_with_a_quote_is_a_key_if_the_rfc_says_so(text: str) -> None:
    value = '"' + text
    expected = by_the_rfc(value.strip(" \t"))  # HTTP takes white space around a value away
    try:
        parsed = parse(value.encode("latin-1"))
    except ValueError:
        parsed = None
    assert parsed == (expected or None), "and an empty one is none"


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_whatever_is_sent_it_is_a_key_or_malformed(value: bytes) -> None:
    try:
        key = parse(value)
    except ValueError:
        return
    assert 1 <= len(key) <= MAX_LENGTH
    assert set(key) <= set(PRINTABLE)


@pytest.mark.parametrize(
    "evil", ['"' + "\\" * 1_000_000, '"a"' + ";a" * 500_000 + "!", '"a";a="' + '\\"' * 500_000, "a" * 1_000_000]
)
@pytest.mark.timeout(60)
def test_a_long_one_is_refused_at_once(evil: str) -> None:
    """With steps in proportion to the square of its length it would take minutes."""
    with pytest.raises(ValueError, match="it must "):
        parse(evil.encode())
