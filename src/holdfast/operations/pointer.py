"""A pointer into the log of operations, ``number:hash``, as values: which entry it means, and what there is to undo."""

from __future__ import annotations

import re
from collections.abc import Sequence

from holdfast.operations.decide import Prior
from holdfast.operations.replay import State, fold
from holdfast.operations.wal import Entry

_POINTER = re.compile(r"[0-9]+:([0-9a-f]{64})")


def hash_in(text: object) -> str | None:
    """Of a text that is a pointer; None of one that is a key."""
    found = _POINTER.fullmatch(text) if isinstance(text, str) else None
    return None if found is None else found[1]


def unknown(pointer: str) -> LookupError:
    return LookupError(
        f"no entry of the log has the pointer {pointer}: it is of another database, or was archived; say its "
        "operation's key instead"
    )


def check_standing(label: str, entries: Sequence[Entry], pointer: str) -> None:
    """LookupError unless the attempt that the pointer is of may have had an effect, which nobody has undone since."""
    what = f"pointer {pointer} is of operation {label!r}"
    place = next((place for place, entry in enumerate(entries) if entry.pointer == pointer), None)
    if place is None:
        raise LookupError(f"{what}, and that entry was archived: say the key of the operation instead")
    [then], [now] = fold(entries[: place + 1]).values(), fold(entries).values()
    entry = entries[place]
    if not effective(then):
        raise LookupError(
            f"{what}, whose entry {entry.number}, {entry.kind}, leaves nothing to undo: it is {then.status}"
        )
    if not effective(now) or now.attempt != then.attempt:
        raise LookupError(
            f"{what} in attempt {then.attempt}, which does not stand any more: since then it is {now.status} in "
            f"attempt {now.attempt}; say the pointer that it has now, or its key"
        )


def effective(state: State | Prior) -> bool:
    """Whether there may be something to undo."""
    return state.status == "success" or state.effect_started
