"""The lease contract on every engine of this machine, in both flavours; and what only our own engines can show."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing.contract import LONG, LeaseContract
from holdfast.testing.portal import Blocking

TABLES = ("lease", "beat", "history")


def stored(url: str) -> dict[str, list[Any]]:
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            return {table: connection.execute(f"select * from holdfast_{table}").fetchall() for table in TABLES}
    with psycopg.connect(url, autocommit=True) as database:
        return {table: database.execute(f"select * from holdfast.{table}".encode()).fetchall() for table in TABLES}


class TestLease(LeaseContract):
    def rows(self, url: str, client: Any) -> dict[str, list[Any]]:
        return stored(url)


def never_polls(client: Any) -> Any:
    """A client whose waiters ask again only when they are woken."""
    inner = client._inner if isinstance(client, Blocking) else client
    inner._engine.poll = 1e6
    return client
