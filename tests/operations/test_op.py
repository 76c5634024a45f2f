"""``op``, as functions and blocks get it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import holdfast

PUBLIC = {
    "attempt", "check", "checkpoint", "checkpoints", "done", "effect_started", "emit", "fence", "key", "lost",
    "replayed", "result", "status",
}  # fmt: skip


def test_an_op_has_a_public_class_and_no_public_internals(connect: Callable[..., Any], sqlite_url: str) -> None:
    ops: list[Any] = []
    client = connect(sqlite_url)
    client.operation("a").run(lambda op: ops.append(op))
    [op] = ops
    assert type(op) in (holdfast.Op, holdfast.AsyncOp)
    assert {name for name in dir(op) if not name.startswith("_")} == PUBLIC
    handle = client.operation("a")
    assert [name for name in dir(getattr(handle, "_inner", handle)) if not name.startswith("_")] == ["run"]
