"""One SQLite session: short scripts in BEGIN IMMEDIATE, fair between processes, bounded in time.

Nothing here decides anything: the scripts are in ``database/sqlite.sql``, and the open file is in ``sqlite_file``.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from holdfast.database.sessions import Row, kind_of
from holdfast.database.sqlite_file import SqliteFile, boot_id, cannot_open
from holdfast.database.statements import Statement, split, statements
from holdfast.database.url import Database
from holdfast.errors import Busy, EngineError, Refused, Unanswered, Unreachable
from holdfast.runtime import forks
from holdfast.runtime.clock import now

T = TypeVar("T")

OLDEST = (3, 38, 0)


class _Parameters(dict[str, Any]):
    """What is not given is null."""

    def __missing__(self, key: str) -> None:
        return None


def _bound(given: Mapping[str, Any]) -> _Parameters:
    """What a dictionary holds is bound as ``name_key``."""
    parameters = _Parameters(given)
    if dict in map(type, given.values()):
        for name, value in given.items():
            if isinstance(value, dict):
                parameters.update({f"{name}_{key}": _bindable(each) for key, each in value.items()})
    return parameters


def _bindable(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    import json  # here: it is rarely wanted, and costs every start

    return json.dumps(value)


class SqliteSession(SqliteFile):
    pooled = False

    def __init__(self, database: Database, timeout: float, *, to_look: bool = False) -> None:
        self._statements = statements("sqlite", database.schema)
        self._mutex = threading.RLock()
        self.boot = boot_id()
        super().__init__(database, timeout, to_look=to_look)

    @classmethod
    def open(cls, database: Database, timeout: float, *, to_look: bool = False) -> SqliteSession:
        if database.target in forks.spoilt:
            raise Unreachable(
                f"{database} was written to by another thread when this process was forked off, and SQLite does not "
                "survive that. Start it anew (spawn, exec), or fork while nothing is under way."
            )
        if sqlite3.sqlite_version_info < OLDEST:
            raise Unreachable(
                f"SQLite {sqlite3.sqlite_version} is too old: holdfast needs {'.'.join(map(str, OLDEST))} or newer"
            )
        try:
            return kind_of(cls)(database, timeout, to_look=to_look)
        except (OSError, sqlite3.Error) as error:
            raise cannot_open(database, error) from error

    def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> list[Row]:
        deadline = now() + timeout
        statement = self._statements[name]
        try:
            self._enter(deadline)
            if not statement.reads_only:
                return self._run(statement, parameters, deadline)
            if len(parameters) == statement.binds:
                return self._execute(statement.steps[0].sql, parameters)
            return self._steps(statement, parameters)
        except sqlite3.Error as error:
            self._raise(error)
        finally:
            try:  # noqa: SIM105 - not in a function: a signal could come on the way into that
                self._mutex.release()
            except RuntimeError:
                pass  # it was not our turn yet

    def script(self, text: str, timeout: float) -> None:
        """Several statements in one transaction: a migration, which is done again where it was lost."""
        deadline = now() + timeout

        def run() -> None:
            for sql, _ in split(text):
                self._execute(sql)

        self._alone(lambda: self._write(run, deadline, volatile=True), deadline)

    def rehearse(self, calls: Iterable[tuple[str, Mapping[str, Any]]], timeout: float) -> list[list[Row] | Refused]:
        """Named statements in one transaction that is rolled back; the answers, up to the first that is an error."""
        deadline = now() + timeout
        answers: list[list[Row] | Refused] = []

        def run() -> NoReturn:
            for name, parameters in calls:
                answers.append(self._steps(self._statements[name], parameters))
            raise _Undo

        try:
            with suppress(_Undo):
                self._alone(lambda: self._write(run, deadline), deadline)
        except Refused as error:
            answers.append(error)
        return answers

    def post(self, name: str, parameters: Mapping[str, Any], timeout: float) -> None:
        raise Refused("SQLite has no statement that waits")

    def answered(self) -> bool:
        return True

    def notifications(self) -> list[str]:
        return []

    def abandon(self) -> None:
        self._mutex = threading.RLock()
        super().abandon()

    def _run(self, statement: Statement, parameters: Mapping[str, Any], deadline: float) -> list[Row]:
        given = parameters if len(parameters) == statement.binds else _bound(parameters)
        if statement.alone:
            first = statement.steps[0].sql
            if rows := self._in_turn(deadline, statement.volatile, self._patiently, first, deadline, given):
                return rows
        else:
            for step in statement.looks:
                if rows := self._execute(step.sql, given):
                    return rows
        return self._write(lambda: self._steps(statement, parameters), deadline, statement.volatile)

    def _write(self, action: Callable[[], T], deadline: float, volatile: bool = False) -> T:
        def run() -> T:
            self._patiently("begin immediate", deadline)
            result = action()
            self._patiently("commit", deadline)
            return result

        return self._in_turn(deadline, volatile, run)

    def _in_turn(self, deadline: float, volatile: bool, action: Callable[..., T], *arguments: Any) -> T:
        """With the right to write, which other processes wait for."""
        try:
            try:
                self._turnstile.enter(deadline)
                synchronous = "normal" if volatile and self.boot else "full"
                if self._synchronous != synchronous:
                    self._tune(synchronous, deadline)
                return action(*arguments)
            finally:
                self._leave()
        except BaseException:
            self._leave()  # once more: Ctrl-C may have come when it was just about to
            raise

    def _tune(self, synchronous: str, deadline: float) -> None:
        """full: a commit waits for the disk."""
        self._synchronous = ""  # until we know: Ctrl-C may come in between
        self._patiently(f"pragma synchronous = {synchronous}", deadline)
        self._synchronous = synchronous

    def _leave(self) -> None:
        """Whatever was begun is rolled back, so nothing half done stays."""
        try:
            with self.inside:
                if self._connection.in_transaction:
                    self._execute("rollback")
        finally:
            self._turnstile.leave()

    def _steps(self, statement: Statement, given: Mapping[str, Any]) -> list[Row]:
        parameters = _bound(given)
        for step in statement.steps[:-1]:
            if rows := self._execute(step.sql, parameters):
                if step.stop:
                    return rows
                parameters.update(rows[0])
        return self._execute(statement.steps[-1].sql, parameters)

    def _enter(self, deadline: float) -> None:
        if not self._mutex.acquire(False) and not self._mutex.acquire(timeout=max(0.0, deadline - now())):
            raise Busy(f"{self.database} is busy in another thread of this process")

    def _alone(self, action: Callable[[], None], deadline: float) -> None:
        try:
            self._enter(deadline)
            action()
        except sqlite3.Error as error:
            self._raise(error)
        finally:
            try:  # noqa: SIM105 - not in a function: a signal could come on the way into that
                self._mutex.release()
            except RuntimeError:
                pass  # it was not our turn yet

    def _raise(self, error: sqlite3.Error) -> NoReturn:
        if "user-defined function" in str(error):  # ours, and nothing but a signal's handler raises in it
            raised, self._raised = self._raised, None
            raise raised or KeyboardInterrupt from None
        if self._closed:  # see ``pick_up``: a new session may be luckier
            raise Unanswered(f"cannot open {self.database} again after a fork") from error
        raise self._refusal(error) from error

    def _refusal(self, error: sqlite3.Error) -> EngineError:
        text = str(error)
        if "no such table" in text or "no such column" in text:
            return Refused(f"{self.database}: {text}", "42P01")
        if "readonly" in text:
            return Refused(f"{self.database} is read-only: may this user write to the file and its folder?", "25006")
        return Refused(f"{self.database}: {text}")


class _Undo(Exception):
    """Leaves a transaction that was never meant to stay."""
