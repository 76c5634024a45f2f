"""What the tables of an SQLite database say about the locks that the kernel holds: names, ages, and who waits."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.lock.holders import Holder
from holdfast.lock.records import LockRecord, holder_of
from holdfast.lock.terms import Key, number
from holdfast.timestamps import as_datetime


class FileLockTables:
    """``rows``: of ``lock_list``. ``ours``: names that this client knows, which may not be written yet."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], ours: Mapping[Key, str]) -> None:
        self._names: dict[int, str] = {}
        self._namespaces: dict[int, str] = {}
        self._since: dict[tuple[int, bool, int], float] = {}
        self._applications: dict[int, str] = {}
        self._waiting: Counter[tuple[bool, int]] = Counter()
        for row in rows:
            key, pid = row["key"], row["pid"]
            if row["name"] is not None:
                self._names[key] = row["name"]
            elif row["namespace"] is not None:
                self._namespaces[key] = row["namespace"]
            elif os.path.isdir(f"/proc/{pid}"):
                lock = bool(row["pair"]), key
                self._waiting[lock] += row["waiting"]
                self._applications[pid] = row["application"]
                if row["since"] is not None:
                    self._since[pid, *lock] = min(row["since"], self._since.get((pid, *lock), row["since"]))
        self._names |= {number(key): name for key, name in ours.items() if len(key) == 1}

    def holder(self, pair: bool, key: int) -> LockRecord | None:
        """A holder that is noted."""
        pid = next((pid for pid, *lock in self._since if lock == [pair, key]), None)
        return None if pid is None else self.record(Holder(pid, None, pair, key, shared=False))

    def record(self, held: Holder) -> LockRecord:
        namespace, entity_id, name = None, held.byte, self._names.get(held.byte)
        if held.pair:
            first, second = held.byte >> 32, held.byte & 0xFFFFFFFF
            namespace, entity_id, name = self._namespaces.get(first, str(first)), second - (second >> 31 << 32), None
        since = None if held.pid is None else self._since.get((held.pid, held.pair, held.byte))
        application = held.program if held.pid is None else self._applications.get(held.pid, held.program)
        return LockRecord(
            held.pid, holder_of(application), application, None, None, namespace, entity_id, name,
            "shared" if held.shared else "exclusive", granted=True, held_since=as_datetime(since),
            duration=None if since is None else max(0.0, time.time() - since),
            waiting=self._waiting[held.pair, held.byte], blocked_by=(),
        )  # fmt: skip
