"""Chains that are put away, as lines of text: one a chain, and nothing is needed to prove it but the line itself and
the entry that stays behind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from holdfast.operations import events, wal
from holdfast.operations.replay import fold, snapshot
from holdfast.operations.wal import Entry


def line(label: str, entries: Sequence[Entry]) -> str:
    """A chain, as a line of JSON."""
    return json.dumps({"operation": entries[0].operation, "label": label, "log": json.loads(wal.dump(entries))})


def read(lines: Iterable[str]) -> dict[str, list[Entry]]:
    """The chains in an archive, or several in the order they were written: of one operation, one after the other."""
    chains: dict[str, list[Entry]] = {}
    for number, text in enumerate(lines, 1):
        try:
            told = json.loads(text)
            operation = str(told["operation"])
            chains[operation] = joined(chains.get(operation, []), wal.load(operation, json.dumps(told["log"])))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"line {number} of the archive is no chain: {error}") from None
    return chains


def joined(before: Sequence[Entry], after: Sequence[Entry]) -> list[Entry]:
    """Both, one after the other. What is the very same in both is there once: a chain may have been written down and
    then not been put away."""
    known = {entry.number: entry for entry in before}
    return [*before, *(entry for entry in after if known.get(entry.number) != entry)]


def note(entries: Sequence[Entry], at: int) -> Entry:
    """The entry that stays in the place of these: what came of them, and by its hash, what they were."""
    last = entries[-1]
    [state] = fold(entries).values()
    told = {"state": snapshot(state), "through": last.number, **events.kept(entries, state.attempt)}
    detail = json.dumps(told, separators=(",", ":"))
    return wal.append(last, last.operation, "archived", attempt=state.attempt, fence=last.fence, at=at, detail=detail)
