"""Users' own connections, of every driver, and what an operation does with them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import holdfast
from tests.children import query
from tests.migrated_file import migrated_file
from tests.user_connections import (
    ALCHEMY,
    ALCHEMY_SQLITE,
    AUTOCOMMIT,
    POSTGRES,
    SQLITE,
    Subject,
    settled,
    shared_postgres,
    subject,
)

KINDS = [*POSTGRES, *SQLITE, *ALCHEMY, *ALCHEMY_SQLITE]
JOINED = [kind for kind in KINDS if kind not in AUTOCOMMIT]
"""With every statement a transaction is open, and its commit is the caller's."""
FEW = ["psycopg-autocommit", "psycopg", "sqlite3-manual", "sqlite3", "session-psycopg", "connection-asyncpg-async"]


@asynccontextmanager
async def opened(kind: str, tmp_path: Path) -> AsyncIterator[Subject]:
    url = migrated_file(tmp_path / "app.db") if kind in SQLITE or kind in ALCHEMY_SQLITE else shared_postgres()
    async with subject(kind, url) as each:
        yield each


def key() -> str:
    return f"op-{secrets.token_hex(6)}"


def work(each: Subject, what: str, result: Any = None, error: Exception | None = None) -> Callable[[], Any]:
    """Writes one row, then returns or raises."""
    statement = each.sql(f"insert into {each.table} values ('{what}')")

    def plain() -> Any:
        each.connection.execute(statement)
        if error is not None:
            raise error
        return result

    async def awaited() -> Any:
        await settled(each.connection.execute(statement))
        if error is not None:
            raise error
        return result

    return awaited if isinstance(each.client, holdfast.AsyncClient) else plain


def logged(url: str, label: str) -> list[tuple[Any, ...]]:
    table = "holdfast_idempotency_log" if url.startswith("sqlite") else "holdfast.idempotency_log"
    return query(url, f"select status, attempt from {table} where label = %s", label)
