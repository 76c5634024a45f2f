"""Looks at the locks there are, past holdfast."""

from __future__ import annotations

from typing import Any

from tests.children import query

_ADVISORY = """
select l.classid::bigint, l.objid::bigint, l.objsubid, l.granted, l.pid from pg_locks l
 where l.locktype = 'advisory' and l.database = (select oid from pg_database where datname = current_database())
"""


def advisory(url: str) -> list[tuple[Any, ...]]:
    """Every advisory lock in this database, held or waited for."""
    return query(url, _ADVISORY)


def waiters(url: str) -> list[int]:
    """The sessions that stand in line."""
    return [pid for *_, granted, pid in advisory(url) if not granted]
