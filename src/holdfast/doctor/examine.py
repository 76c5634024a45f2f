# Generated from examine_async.py by scripts/unasync.py. Do not edit.
"""Gathers what there is to know about a database, for ``findings`` to judge. Writes nothing, and ends in time.

What the role may not ask is left out; what does not answer is a finding, not an error.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from holdfast.database.engine import Engine, Session
from holdfast.database.sessions import Row
from holdfast.database.statements import statements
from holdfast.doctor import postgres, sqlite
from holdfast.doctor.findings import Examination, Fact
from holdfast.errors import EngineError, Refused, Unanswered
from holdfast.runtime.clock import now

_PROBE = 2.0
"""Seconds to wait for what a healthy database gives at once: a second session's answer, the write lock."""
_ABSENT = frozenset({"3F000", "42P01"})
_ASKED = ("settings", "locks", "connections", "replicas", "snapshots", "functions", "tables")


def examine(engine: Engine, timeout: float) -> Examination:
    if not 0 < timeout <= 3600:
        raise ValueError(f"timeout must be a number of seconds from 0 to 3600, not {timeout!r}")
    engine.check_usable()
    database = engine.database
    on_postgres = database.dialect == "postgres"
    patient = _Patient(engine, now() + timeout, self_migrating=not on_postgres)
    try:
        (patient.ask_postgres() if on_postgres else patient.ask_sqlite())
    except EngineError as error:
        patient.facts["connection"] = [{"error": str(error), "refused": None}]
    findings = (postgres if on_postgres else sqlite).examine(patient.facts)
    return Examination(str(database), database.schema, "postgresql" if on_postgres else "sqlite", findings)


class _Patient:
    def __init__(self, engine: Engine, deadline: float, *, self_migrating: bool) -> None:
        self._engine, self._deadline = engine, deadline
        schema = engine.database.schema
        expected = {"schema": schema, "version": engine.newest, "self_migrating": self_migrating}
        self.facts: dict[str, Fact | None] = {"expected": [expected]}

    def ask_postgres(self) -> None:
        session, refused = self._reach()
        try:
            [about] = session.call("session_open", {}, self._left())
            self.facts["session_open"] = [about]
            self.facts["client_socket"] = [options] if (options := session.socket_options()) else []
            self.facts["clock"] = [clock := self._clock(session)]
            self.facts["connection"] = [{"error": None, "refused": refused, "round_trip": clock["round_trip"]}]
            self.facts["pooler"] = [{"pooled": session.pooled, "moved": self._moves(session)}]
            schema = self._engine.database.schema
            self._ask(session, "examine_role", {"schema": schema})
            for what in _ASKED:
                self._ask(session, f"examine_{what}", {"schema": schema, "names": " ".join(_called(schema))})
            self._ask_version(session, writes=not (about["in_recovery"] or about["read_only"]))
        finally:
            session.close()

    def ask_sqlite(self) -> None:
        from holdfast.doctor.filesystem import survey

        file = survey(self._engine.database.target)
        self.facts.update(file=[file], connection=[{"error": None}])
        if not file["exists"] and file["folder_exists"] and file["folder_writable"]:
            self.facts["schema_applied"] = []
            return
        session = self._engine.connect(self._left(), for_examination=True)
        try:
            self._ask(session, "examine_journal", {})
            try:
                self.facts["examine_integrity"] = session.call("examine_integrity", {}, self._left())
            except Refused as error:  # no tables at all, or so damaged that they cannot be checked
                damaged: Fact = [{"problem": str(error)}]
                self.facts["examine_integrity"] = None if error.sqlstate in _ABSENT else damaged
            self._ask(session, "schema_applied", {}, absent=[])
            asked, patience, problem = now(), min(_PROBE, self._left()), None
            try:
                session.call("examine_write_lock", {}, patience)
            except EngineError as error:
                problem = str(error)
            self.facts["write_lock"] = [{"error": problem, "seconds": now() - asked}]
        finally:
            session.close()

    def _reach(self) -> tuple[Any, str | None]:
        """A session as holdfast uses them; else one to look around in, and why the other was not to be had."""
        try:
            return self._engine.connect(self._left() / 2), None
        except EngineError as error:
            with suppress(EngineError):
                return self._engine.connect(self._left(), for_examination=True), str(error)
            raise

    def _ask(self, session: Session, name: str, parameters: Mapping[str, Any], absent: Fact | None = None) -> None:
        try:
            self.facts[name] = session.call(name, parameters, self._left())
        except Refused as error:
            self.facts[name] = absent if error.sqlstate in _ABSENT else None

    def _ask_version(self, session: Session, *, writes: bool) -> None:
        """From the table, for its owner; else as every client asks, which may write, and so not on a standby."""
        self._ask(session, "schema_applied", {}, absent=[])
        if self.facts["schema_applied"] is None and writes:
            with suppress(Refused):
                self.facts["schema_applied"] = session.call("hello", {}, self._left())

    def _clock(self, session: Session) -> Row:
        """The quickest of three answers tells most."""
        readings: list[Row] = []
        for _ in range(3):
            wall, asked = time.time(), now()
            [server] = session.call("examine_clock", {}, self._left())
            trip = now() - asked
            readings.append({"offset": server["now"] - wall - trip / 2, "round_trip": trip})
        return min(readings, key=lambda reading: float(reading["round_trip"]))

    def _moves(self, session: Any) -> bool | None:
        """With a transaction of ours open, does a second client of ours stay in its session, and is that another one?
        If not, or if it is kept waiting for one, a pooler hands sessions round. None when it cannot be told."""
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

    def _left(self) -> float:
        return max(0.01, self._deadline - now())


def _called(schema: str) -> list[str]:
    """The SQL functions that holdfast's own statements call."""
    texts = (step.sql for each in statements("postgres", schema).values() for step in each.steps)
    return sorted({name for text in texts for name in re.findall(rf"\b{schema}\.(\w+)\(", text)})
