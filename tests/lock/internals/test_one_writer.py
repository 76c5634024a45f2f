"""Only the methods of ``Pool`` change a pool, its entries, its sessions and the states of its requests.

Judged by the source: a write outside of ``lock/pool.py`` would race the pool's own, or go unnoticed by ``Pool.writer``.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import holdfast.lock
from holdfast.lock.pool import Entry, LockRequest, LockSession, Pool

FOLDER = Path(holdfast.lock.__file__).parent
EXECUTORS = {"owner", "waker", "on_loss", "caller", "since", "deadline", "wire", "noted"}
"""Attributes that the executor sets."""
OUTBOX = {"actions", "wakes"}
"""The executor takes from these what it has done."""
OWNED = {*LockRequest.__slots__, *Entry.__slots__, *LockSession.__slots__, *vars(Pool())} - EXECUTORS - {"__weakref__"}
CHANGES = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft", "remove", "update"}


def writes(source: str) -> list[str]:
    """Assignments to attributes of the pool's own objects, and calls that change what is in them. ``self.x`` is another
    class's own attribute: outside of ``pool.py`` no class of the pool has methods."""
    found = []
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [each for target in node.targets for each in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            owner = node.func.value
            if isinstance(owner, ast.Attribute) and owner.attr in OWNED - OUTBOX:
                targets = [owner]
        found += [f"line {target.lineno}: {ast.unparse(target)}" for target in targets if is_owned(target)]
    return found


def is_owned(target: ast.expr) -> bool:
    while isinstance(target, ast.Subscript | ast.Starred):
        target = target.value
    if not isinstance(target, ast.Attribute) or target.attr not in OWNED:
        return False
    return not (isinstance(target.value, ast.Name) and target.value.id == "self")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_only_the_pool_writes_what_is_its_own(path: Path) -> None:
    if path.name != "pool.py":
        assert writes(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    ["request.state = 'held'", "request.state, request.error = 'lost', error", "core.pool.writer = None",
     "session.held[key] = entry", "del session.held[key]", "entry.queue.remove(request)", "entry.handed += 1",
     "pool.closing.add(session)", "self.pool.entries.clear()"],
)  # fmt: skip
def test_a_write_is_found(line: str) -> None:
    assert len(writes(line)) >= 1


@pytest.mark.parametrize(
    "line", ["request.waker = None", "pool.actions.popleft()", "self.closing = True", "held = session.held"]
)
def test_what_is_the_executors_own_is_not_a_write(line: str) -> None:
    assert writes(line) == []
