"""Operations for tests of lineage: their keys, and functions that emit messages or fail."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import holdfast

FAR = datetime.now(UTC) + timedelta(days=1)


def key(dataset: str, number: object = 0, **more: Any) -> holdfast.OperationKey:
    parts = {"pipeline": "etl", "task": "load", "dataset": dataset, "operation": "upsert", "params": {"n": number}}
    return holdfast.OperationKey(**{**parts, **more})


def broken() -> None:
    raise ValueError("broken")


def emitting(*topics: str, error: Exception | None = None) -> Any:
    def work(op: Any) -> int:
        for topic in topics:
            op.emit(topic, {"topic": topic})
        op.checkpoint("far", 1)
        if error is not None:
            raise error
        return 42

    return work


def emitted(item: int, op: Any) -> None:
    op.emit("item", item)


async def async_emitting(op: Any) -> int:
    op.emit("a", {"topic": "a"})
    op.emit("b", {"topic": "b"})
    await op.checkpoint("far", 1)
    return 42
