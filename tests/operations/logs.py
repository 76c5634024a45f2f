"""A log of operations to look at, and somebody who changes it past holdfast."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import holdfast
from tests.children import query

Connect = Callable[..., Any]

LATER = timedelta(hours=1)


def table(url: str, name: str) -> str:
    return f"holdfast_{name}" if url.startswith("sqlite") else f"holdfast.{name}"


def change(url: str, statement: str) -> None:
    """Past holdfast, as somebody with a psql would: ``{wal}`` and ``{log}`` are the tables."""
    query(url, statement.format(wal=table(url, "wal"), log=table(url, "idempotency_log"), outbox=table(url, "outbox")))


def fail() -> None:
    raise ValueError("broken")


def fill(client: Any, url: str) -> Any:
    """One that was done, one that was done at the second try, one that failed, one that was left half done."""
    client.operation("done", payload=1).run(lambda: {"rows": 7})
    with pytest.raises(ValueError, match="broken"):
        client.operation("second try").run(fail)
    client.operation("second try").run(lambda: b"\x00")
    with pytest.raises(ValueError, match="broken"):
        client.operation("failed").run(fail)

    def die(op: Any) -> None:
        op.checkpoint("draft", 42)
        raise KeyboardInterrupt

    with holdfast.Client(url) as dies, pytest.raises(KeyboardInterrupt):
        dies.operation("half done").run(die)
    return client


def problems(client: Any, **options: Any) -> set[str]:
    return {each.what for each in client.operations.verify(**options).problems if each.broken}
