"""Looks at the locks there are, past holdfast."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from holdfast.lock.executor_async import LoopExecutor
from holdfast.testing.sync_facade import SyncFacade
from tests.children import backends, query

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


def sessions(url: str) -> list[Any]:
    """The sessions of clients; on SQLite, the files of the database that this process has open."""
    if url.startswith("postgres"):
        return backends(url)
    folder = os.path.realpath(Path(urlsplit(url).path).parent)
    return [path for path in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if path.startswith(folder)]


def core(client: Any) -> LoopExecutor:
    """What carries out the locks of a client that has locked something."""
    inner = client._inner if isinstance(client, SyncFacade) else client
    found: LoopExecutor = inner._locks.executor._core
    return found


def queued(client: Any) -> int:
    """How many requests wait in the queues of a client, for any key."""
    return sum(len(entry.queue) for entry in list(core(client).pool.entries.values()))


def is_idle(client: Any) -> bool:
    """Whether there is a session that the next caller can use itself."""
    return any(each.opened and not each.flight and not each.pending for each in core(client).pool.holds)
