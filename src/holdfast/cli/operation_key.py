"""The argument KEY of ``holdfast ops``: the text of a key, its digest, or a unique prefix of the digest."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from holdfast import Client

_PREFIX = re.compile("[0-9a-f]{4,63}")
_SHOWN = 10


def resolve_key(client: Client, text: str) -> str:
    """The digest of the only operation that ``text`` is a prefix of; else ``text`` itself, also when an operation or a
    review has it as its key. Raises UsageError when several operations match."""
    if (
        not _PREFIX.fullmatch(text)
        or client.operations.get(text) is not None
        or client.reviews.list(status=None, key=text, limit=1)
    ):
        return text
    matches = client.operations.match(text, limit=_SHOWN + 1)
    if len(matches) > 1:
        from holdfast.cli import output

        lines = [f"  {record.key}  {record.status}  {output.clean(record.label)}" for record in matches[:_SHOWN]]
        more = ["  and more"] if len(matches) > _SHOWN else []
        raise click.UsageError("\n".join([f"several operations begin with {text}; give more digits:", *lines, *more]))
    return matches[0].key if matches else text
