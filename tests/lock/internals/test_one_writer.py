"""Only the methods of ``Pool`` change a pool, its entries, its sessions and the states of its requests, one at a time.

A write outside of ``lock/pool.py`` would race the pool's own, or go unnoticed by ``Pool.writer``. It is looked for in
the source, and while threads and tasks compete for locks.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import lock
from holdfast.lock import pool
from holdfast.lock.pool import Entry, LockRequest, LockSession, Pool
from tests.children import PATIENCE
from tests.lock.looks import core

FOLDER = Path(lock.__file__).parent
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


class Mutex:
    """Reentrant, and knows its owner."""

    def __init__(self) -> None:
        self._lock, self._depth, self.owner = threading.RLock(), 0, 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.owner, self._depth = threading.get_ident(), self._depth + 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self.owner = self.owner if self._depth else 0
        self._lock.release()


def test_the_pool_writes_what_is_its_own_under_the_mutex(
    connect: Callable[..., Any], either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, mutexes = [connect(either), connect(either)], [Mutex(), Mutex()]
    for client, mutex in zip(clients, mutexes, strict=True):
        client.lock("warm").acquire().release()
        monkeypatch.setattr(core(client), "mutex", mutex)
    writes: Counter[str] = Counter()
    wrong: set[str] = set()

    def write(changed: object, name: str, value: object) -> None:
        method = sys._getframe(1).f_code
        if name in OWNED and method.co_name != "__init__":
            writes[name] += 1
            if method.co_filename != pool.__file__ or threading.get_ident() not in [each.owner for each in mutexes]:
                wrong.add(f"{Path(method.co_filename).name}, {method.co_name}: {name}")
        object.__setattr__(changed, name, value)

    def work(number: int) -> None:
        for turn in range(10):
            handle = clients[number % 2].lock(f"{turn % 3}", shared=turn % 4 == number % 4)
            with suppress(holdfast.AcquireTimeout):
                handle.acquire(timeout=0.005 if turn == number else PATIENCE).release()

    for kind in (Pool, Entry, LockSession, LockRequest):
        monkeypatch.setattr(kind, "__setattr__", write, raising=False)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert wrong == set()
    assert writes.keys() >= {"writer", "state", "stage", "sender", "entry"}
