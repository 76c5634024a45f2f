"""The order and the depths of locks in `holdfast top`."""

from __future__ import annotations

import pytest

from holdfast import LockRecord
from holdfast.cli.top_sections import lock_tree


def lock(label: str, pid: int, *blocked_by: int) -> LockRecord:
    """Held, or waited for behind these sessions."""
    return LockRecord(
        pid=pid, holder=None, application_name=None, state=None, query_start=None, namespace=None, entity_id=0,
        name=label, mode="exclusive", granted=not blocked_by, held_since=None, duration=None, waiting=0,
        blocked_by=blocked_by,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("records", "tree"),
    [
        ([], ""),
        ([lock("a", 1), lock("b", 1)], "a1:0 b1:0"),
        ([lock("a", 1), lock("a", 3, 1, 2), lock("a", 2, 1), lock("b", 4)], "a1:0 a3:1 a2:1 b4:0"),
        ([lock("a", 1), lock("a", 2, 1), lock("a", 3, 1, 2)], "a1:0 a2:1 a3:2"),
        # session 2 waits for a and holds b, for which session 3 waits
        ([lock("b", 2), lock("b", 3, 2), lock("a", 1), lock("a", 2, 1)], "a1:0 a2:1 b2:2 b3:3"),
        # two sessions wait for each other
        ([lock("a", 1), lock("a", 2, 1), lock("b", 2), lock("b", 1, 2)], "a1:0 a2:1 b2:2 b1:3"),
        ([lock("a", 2, 1)], "a2:0"),  # its holder is not in the list
    ],
    ids=["none", "holders", "queue", "line", "chain", "circle", "alone"],
)
def test_what_waits_is_below_what_it_waits_for(records: list[LockRecord], tree: str) -> None:
    assert " ".join(f"{each.name}{each.pid}:{depth}" for each, depth in lock_tree(records)) == tree
