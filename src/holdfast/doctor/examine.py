# Generated from examine_async.py by scripts/unasync.py. Do not edit.
"""Collects facts about a database, and lets the checks judge them. Writes nothing, and ends within the timeout.

A fact that the role may not read is None. A database that does not answer is a finding, not an error.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from holdfast.database.call_dispatcher import CallSession
from holdfast.database.engine import Engine
from holdfast.database.sessions import Row
from holdfast.database.statements import statements
from holdfast.doctor import postgres, sqlite
from holdfast.doctor.findings import Examination, Fact
from holdfast.errors import EngineError, Refused, Unanswered
from holdfast.runtime.clock import now

_PROBE = 2.0
"""Seconds to wait for what a healthy database does at once: answer a second session, give the write lock."""
_ABSENT = frozenset({"3F000", "42P01"})
"""SQLSTATEs: there is no such schema, or no such table."""
_COUNTED = 10_000
"""Rows of the log that are counted at most."""
_STATEMENTS = (
    "provider", "settings", "locks", "connections", "replicas", "snapshots", "transactions", "functions", "gateways",
    "holders", "tables", "fences",
)  # fmt: skip


def examine(engine: Engine, timeout: float) -> Examination:
    """Every finding about the database of ``engine``. ValueError for a timeout that is not from 0 to 3600 seconds."""
    if not 0 < timeout <= 3600:
        raise ValueError(f"timeout must be a number of seconds from 0 to 3600, not {timeout!r}")
    engine.check_usable()
    database = engine.database
    on_postgres = database.dialect == "postgres"
    collector = _FactCollector(engine, now() + timeout, self_migrating=not on_postgres)
    try:
        (collector.collect_postgres() if on_postgres else collector.collect_sqlite())
    except EngineError as error:
        collector.facts["connection"] = [{"error": str(error), "refused": None}]
    findings = (postgres if on_postgres else sqlite).examine(collector.facts)
    return Examination(str(database), database.schema, "postgresql" if on_postgres else "sqlite", findings)


class _FactCollector:
    def __init__(self, engine: Engine, deadline: float, *, self_migrating: bool) -> None:
        self._engine, self._deadline = engine, deadline
        schema = engine.database.schema
        expected = {"schema": schema, "version": engine.newest, "self_migrating": self_migrating}
        self.facts: dict[str, Fact | None] = {"expected": [expected]}

    def collect_postgres(self) -> None:
        session, refused = self._connect()
        try:
            [about] = session.call("session_open", {}, self._left())
            self.facts["session_open"] = [about]
            self.facts["client_socket"] = [options] if (options := session.socket_options()) else []
            self.facts["clock"] = [clock := self._clock(session)]
            self.facts["connection"] = [{"error": None, "refused": refused, "round_trip": clock["round_trip"]}]
            self.facts["pooler"] = [{"pooled": session.pooled, "moved": self._is_moved(session)}]
            self.facts["session_locks"] = self._session_locks(session)
            schema = self._engine.database.schema
            self._collect(session, "examine_role", {"schema": schema})
            for what in _STATEMENTS:
                self._collect(
                    session, f"examine_{what}", {"schema": schema, "names": " ".join(_functions_used(schema))}
                )
            self._collect_version(session, writes=not (about["in_recovery"] or about["read_only"]))
            self._collect_lineage(session)
        finally:
            session.close()

    def collect_sqlite(self) -> None:
        from holdfast.doctor.filesystem import file_facts

        file = file_facts(self._engine.database.target)
        self.facts.update(file=[file], connection=[{"error": None}])
        if not file["exists"] and file["folder_exists"] and file["folder_writable"]:
            self.facts["schema_applied"] = []
            return
        session = self._engine.connect(self._left(), for_examination=True)
        try:
            self._collect(session, "examine_journal", {})
            try:
                self.facts["examine_integrity"] = session.call("examine_integrity", {}, self._left())
            except Refused as error:  # no tables at all, or too damaged to be checked
                damaged: Fact = [{"problem": str(error)}]
                self.facts["examine_integrity"] = None if error.sqlstate in _ABSENT else damaged
            self._collect(session, "schema_applied", {}, absent=[])
            self._collect(session, "examine_fences", {})
            self._collect_lineage(session)
            started, problem = now(), None
            try:
                session.call("examine_write_lock", {}, min(_PROBE, self._left()))
            except EngineError as error:
                problem = str(error)
            self.facts["write_lock"] = [{"error": problem, "seconds": now() - started}]
        finally:
            session.close()

    def _connect(self) -> tuple[Any, str | None]:
        """A session with holdfast's own settings; else a plain one, and why the first was refused."""
        try:
            return self._engine.connect(self._left() / 2), None
        except EngineError as error:
            with suppress(EngineError):
                return self._engine.connect(self._left(), for_examination=True), str(error)
            raise

    def _collect(
        self, session: CallSession, name: str, parameters: Mapping[str, Any], absent: Fact | None = None
    ) -> None:
        """Store the rows of a statement as a fact: ``absent`` if the tables do not exist, None if it is refused."""
        try:
            self.facts[name] = session.call(name, parameters, self._left())
        except Refused as error:
            self.facts[name] = absent if error.sqlstate in _ABSENT else None

    def _collect_lineage(self, session: CallSession) -> None:
        self._collect(session, "operation_health", {"stale": 0.0, "enough": _COUNTED})
        self._collect(session, "relay_list", {})
        self.facts["relays"] = self.facts.pop("relay_list")

    def _collect_version(self, session: CallSession, *, writes: bool) -> None:
        """Read the table of migrations, as its owner may; else call ``hello``, as every client does.

        ``hello`` may write, so it is not called on a standby.
        """
        self._collect(session, "schema_applied", {}, absent=[])
        if self.facts["schema_applied"] is None and writes:
            with suppress(Refused):
                self.facts["schema_applied"] = session.call("hello", {}, self._left())

    def _clock(self, session: CallSession) -> Row:
        """The offset of the server's clock, from the fastest of three round trips: its error is the smallest."""
        readings: list[Row] = []
        for _ in range(3):
            wall_clock, started = time.time(), now()
            [server] = session.call("examine_clock", {}, self._left())
            round_trip = now() - started
            readings.append({"offset": server["now"] - wall_clock - round_trip / 2, "round_trip": round_trip})
        return min(readings, key=lambda reading: float(reading["round_trip"]))

    def _is_moved(self, session: Any) -> bool | None:
        """Whether a pooler moves connections between server sessions. None when this cannot be determined.

        A second connection notes its server pid, then ``session`` opens a transaction. If the second one now has
        another pid, or the pid of ``session``, or waits for a free server session, there is a pooler.
        """
        try:
            other = self._engine.connect(min(_PROBE, self._left()), for_examination=True)
        except EngineError:
            return None
        try:
            [before] = other.call("session_open", {}, self._left())
            session.call("begin", {}, self._left())
            [ours] = session.call("session_open", {}, self._left())
            try:
                [after] = other.call("session_open", {}, min(_PROBE, self._left()))
            except Unanswered:
                return True if session.pooled else None
            finally:
                session.call("rollback", {}, self._left())
        finally:
            other.close()
        return bool(after["pid"] != before["pid"] or after["pid"] == ours["pid"])

    def _session_locks(self, session: Any) -> Fact | None:
        """Whether a lock of one session is refused to another, or why the server lets this role take none. None behind
        a pooler that moves connections, on a server that takes no writes, and when there is no second connection."""
        [about], [connection] = self.facts["pooler"] or [], self.facts["connection"] or []
        if about["moved"] is not False or connection["refused"] is not None:
            return None
        try:  # not for examination: of several hosts that could be another one
            other = self._engine.connect(min(_PROBE, self._left()))
        except EngineError:
            return None
        try:
            key = {"session_key": secrets.randbits(63)}
            [held] = other.call("session_hold", key, self._left())
            [both] = session.call("session_hold", key, self._left())
        except Refused as error:
            return [{"refused": str(error), "exclude": False}]
        finally:
            other.close()
        return [{"refused": None, "exclude": held["done"] and not both["done"]}]

    def _left(self) -> float:
        return max(0.01, self._deadline - now())


def _functions_used(schema: str) -> list[str]:
    """The SQL functions that holdfast's own statements call."""
    texts = (statement.sql for statement in statements("postgres", schema).values())
    return sorted({name for text in texts for name in re.findall(rf"\b{schema}\.(\w+)\(", text)})
