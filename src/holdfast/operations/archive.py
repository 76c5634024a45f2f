"""Archived entries of the log: one line of JSON for the chain of hashes of one operation.

One entry stays in the log in their place. It has the hash of the last archived entry, so a line can be verified against
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from holdfast.operations import events
from holdfast.operations.log import (
    LogEntry,
    archived_fields,
    dump_entries,
    fold,
    join_chains,
    next_entry,
    parse_entries,
)


def archive_line(label: str, entries: Sequence[LogEntry]) -> str:
    """A chain as a line of JSON."""
    return json.dumps({"operation": entries[0].operation, "label": label, "log": json.loads(dump_entries(entries))})


def parse_archive(lines: Iterable[str]) -> dict[str, list[LogEntry]]:
    """The chains by operation, of one archive or of several in the order in which they were written. ValueError names
    the line that is not a chain."""
    chains: dict[str, list[LogEntry]] = {}
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            operation = str(line["operation"])
            entries = parse_entries(operation, json.dumps(line["log"]))
            chains[operation] = join_chains(chains.get(operation, []), entries)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"line {number} of the archive is no chain: {error}") from None
    return chains


def archived_entry(entries: Sequence[LogEntry], at: int) -> LogEntry:
    """The entry that replaces ``entries``, all of one operation, in the log: it records the state after them, and
    continues their chain of hashes."""
    last = entries[-1]
    [state] = fold(entries).values()
    fields = {
        "state": archived_fields(state), "through": last.number, **events.archived_fields(entries, state.attempt)
    }  # fmt: skip
    detail = json.dumps(fields, separators=(",", ":"))
    return next_entry(last, last.operation, "archived", attempt=state.attempt, fence=last.fence, at=at, detail=detail)
