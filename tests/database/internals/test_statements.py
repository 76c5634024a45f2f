"""Named statements: plain SQL in files, the same calls on both engines, and a reason for each that only one has."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from holdfast.database import sqlite_calls
from holdfast.database.sqlite_calls import NOUNS, Call
from holdfast.database.statements import parameters_of, statements
from holdfast.errors import Refused
from holdfast.lease.sqlite_calls import lease_take
from holdfast.operations import batch

PACKAGE = Path(sqlite_calls.__file__).parents[1]
FILES = sorted(path for path in PACKAGE.glob("*/*.sql") if path.stem in ("postgres", "sqlite"))
CONTROL = re.compile(
    r"--\s*(stop|volatile|as\s*:.*|once|if\b.*:|else\b.*:|loop|goto\b.*|return)\s*$", re.IGNORECASE | re.MULTILINE
)

_KERNEL = "On SQLite the kernel keeps locks, in files beside the database."
_NOTIFY = "SQLite sends no notifications: a waiter polls, and a lease is taken over when the kernel frees its session."
_TEXT = "On SQLite no other session can read a statement, and no driver writes parameters into its text."
_SERVER = "It reads what only a server has: roles, settings, sessions, vacuum."
ONLY_POSTGRES = {
    "begin": "A transaction on SQLite is begun by its session, for each call.",
    "examine_clock": "A file has no clock of its own.",
    "examine_connections": _SERVER,
    "examine_functions": "SQLite has no stored functions.",
    "examine_gateways": _SERVER,
    "examine_holders": "Every user of a file is the same to it.",
    "examine_locks": _SERVER,
    "examine_provider": _SERVER,
    "examine_replicas": "A file has no replicas.",
    "examine_role": _SERVER,
    "examine_settings": _SERVER,
    "examine_snapshots": _SERVER,
    "examine_tables": _SERVER,
    "examine_transactions": _SERVER,
    "listen": _NOTIFY,
    "lock_batch": _KERNEL,
    "lock_end_session": "A process that holds a lock on SQLite is ended by its own system.",
    "lock_rivals": _KERNEL,
    "lock_room": _KERNEL,
    "lock_try": _KERNEL,
    "lock_try_pair": _KERNEL,
    "lock_try_shared": _KERNEL,
    "lock_try_shared_pair": _KERNEL,
    "lock_tune": _KERNEL,
    "lock_unlock": _KERNEL,
    "lock_unlock_pair": _KERNEL,
    "lock_unlock_shared": _KERNEL,
    "lock_unlock_shared_pair": _KERNEL,
    "lock_wait": _KERNEL,
    "lock_wait_pair": _KERNEL,
    "lock_wait_shared": _KERNEL,
    "lock_wait_shared_pair": _KERNEL,
    "migrate_busy": "Migrations of a file take the same turn as every other writer.",
    "migrate_lock": "Migrations of a file take the same turn as every other writer.",
    "peer_announce": "A file has one gateway, which sends nothing to others.",
    "peer_find": "A file has one gateway, which sends nothing to others.",
    "protect_at_commit_proven": _TEXT,
    "protect_proven": _TEXT,
    "protect_transaction": _TEXT,
    "protect_at_commit": "SQLite has no deferred triggers, and one writer: protecting at the start costs nothing.",
    "rollback": "A transaction on SQLite is ended by its session, for each call.",
    "session_end": "On SQLite nothing is executed after its session has answered or failed.",
    "session_free": _NOTIFY,
    "session_hold": "On SQLite a session holds a byte of a side file.",
    "session_hold_shared": "On SQLite a process holds a byte of a side file.",
    "session_open": _SERVER,
    "session_release": _NOTIFY,
    "session_tune": _SERVER,
    "share": "On SQLite no statement waits for a row.",
    "vigil": _NOTIFY,
    "wait_begin": _NOTIFY,
    "wait_end": _NOTIFY,
    "wait_long": _NOTIFY,
}
ONLY_SQLITE = {
    "examine_integrity": "A server checks its pages itself.",
    "examine_journal": "A server has no journal mode.",
    "examine_write_lock": "A server has no lock that keeps all other writers out.",
    "lease_held": "A poll that only reads takes no turn; on PostgreSQL waiters are notified.",
    "session_look": "On PostgreSQL each statement of a reader runs in a read-only transaction.",
}
_LOST_ANSWERS = {"token", "again", "late"}
"""An answer gets lost on a network, and not in a process."""
ONLY_POSTGRES_PARAMETERS = {
    "object_put": _LOST_ANSWERS,
    "object_swap": _LOST_ANSWERS,
    "object_delete": _LOST_ANSWERS,
    "lock_list": {"keys"},
    "object_changes": {"space", "newest", "until", "after", "after_change", "listening"},
    "operation_begin": {"lock"},
    "operation_claim": {"told"},
    "operation_finish": {"again"},
    "operation_write": {"lock"},
    "operation_end": {"told"},
    "operation_claim_many": {"lock", *batch.CLAIM_COLUMNS},
    "operation_finish_many": {*batch.FINISH_COLUMNS},
    "wal_read": {"space", "after_horizon"},
    "relay_read": {"after_horizon"},
    "relay_move": {"horizon"},
}


OWN_NAMES = {
    "gate_acquire": {"name": "@gate:x"},
    "operation_acquire": {"name": "@op:x"},
    "operation_claim": {"name": "@op:x"},
    "relay_acquire": {"name": "@relay:x"},
}
"""A call that takes a lease with one of our own names."""


def declared_calls() -> dict[str, Call]:
    """Those that are functions."""
    for noun in set(NOUNS.values()):
        import_module(f"holdfast.{noun}.sqlite_calls")
    return sqlite_calls._calls


def calls_of_sqlite() -> set[str]:
    return {name for name in statements("sqlite") if "." not in name} | declared_calls().keys()


def steps_in(text: str) -> set[str]:
    return set(re.findall(r'"(\w+\.\w+)"', text))


class Recorder:
    """Runs nothing, and records which statements it was to run. Each answers with no row, or with one."""

    def __init__(self, *, answers: bool) -> None:
        self.names: list[str] = []
        self._answers = answers

    def __call__(self, name: str, /, **parameters: Any) -> list[Any]:
        self.names.append(name)
        return [defaultdict(int)] if self._answers else []


def test_a_call_that_only_one_engine_has_is_explained() -> None:
    postgres, sqlite = set(statements("postgres")), calls_of_sqlite()
    assert postgres - sqlite == ONLY_POSTGRES.keys()
    assert sqlite - postgres == ONLY_SQLITE.keys()
    for reason in [*ONLY_POSTGRES.values(), *ONLY_SQLITE.values()]:
        assert re.fullmatch(r"[A-Z].{10,}\.", reason)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_file_holds_one_plain_statement_under_each_name(path: Path) -> None:
    """A formatter that drops the comments changes nothing."""
    text = path.read_text(encoding="utf-8")
    assert not CONTROL.findall(text)
    dialect: Any = path.stem
    names = re.findall(r"^-- name: (.*)$", text, re.MULTILINE)
    assert len(names) == len(set(names))
    for name in names:
        statement = statements(dialect)[name]  # ValueError unless it is one
        assert re.fullmatch(r"[a-z_]+(\.[a-z_]+)?" if dialect == "sqlite" else "[a-z_]+", name)
        assert "--" not in statement.sql
        assert dialect == "postgres" or ";" not in statement.sql


def test_every_name_is_in_one_file_of_an_engine() -> None:
    for dialect in ("postgres", "sqlite"):
        texts = [path.read_text(encoding="utf-8") for path in FILES if path.stem == dialect]
        names = re.findall(r"^-- name: (.*)$", "\n".join(texts), re.MULTILINE)
        assert sorted(names) == sorted(statements(dialect))


def test_steps_are_run_by_functions_and_functions_run_steps() -> None:
    paths = [*PACKAGE.glob("*/sqlite_calls.py"), PACKAGE / "operations" / "sqlite_policy.py"]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    assert set.union(*map(steps_in, texts)) == {name for name in statements("sqlite") if "." in name}


def test_a_function_is_in_the_folder_in_which_its_call_is_looked_up() -> None:
    """And has no statement of its own name, which a read-only session would take for the call."""
    folders = {path.parent.name for path in PACKAGE.glob("*/sqlite_calls.py")}
    assert folders == set(NOUNS.values())
    for name, call in declared_calls().items():
        assert call.function.__module__ == f"holdfast.{NOUNS[name.partition('_')[0]]}.sqlite_calls"
        assert name not in statements("sqlite")


def test_what_runs_before_a_lock_only_reads_and_what_runs_without_begin_writes() -> None:
    known = statements("sqlite")
    for name, call in declared_calls().items():
        assert call.attempt is None or not known[call.attempt].reads_only
        for answers in (False, True):
            if call.answer is not None:
                run = Recorder(answers=answers)
                with suppress(Refused):  # whatever it reads says that the key is that of another operation
                    call.answer(run, **given(call) | OWN_NAMES.get(name, {}))
                assert run.names, name
                assert all(known[step].reads_only for step in run.names), name


def test_calls_have_the_same_parameters_on_both_engines() -> None:
    postgres, sqlite, functions = statements("postgres"), statements("sqlite"), declared_calls()
    for name in postgres.keys() & calls_of_sqlite():
        call = functions.get(name)
        bound = set(parameters_of(sqlite[name].sql) if call is None else given(call))
        assert set(postgres[name].parameters) - ONLY_POSTGRES_PARAMETERS.get(name, set()) <= bound, name


def given(call: Call) -> dict[str, str]:
    """A value for each parameter of the call."""
    names: set[str] = set()
    if call.attempt is not None:
        names |= {*parameters_of(statements("sqlite")[call.attempt].sql)}
    for function in filter(None, (call.function, call.answer)):
        for parameter in [*inspect.signature(function).parameters.values()][1:]:
            if parameter.kind is not parameter.VAR_KEYWORD:
                names.add(parameter.name)
            elif parameter.name in ("row", "cursor"):
                step = {"row": "operation_write.log", "cursor": "relay_move.cursor"}[parameter.name]
                names |= {*parameters_of(statements("sqlite")[step].sql)}
            elif parameter.name == "terms":
                names |= {*inspect.signature(lease_take).parameters} - {"run", "kind"}
    return dict.fromkeys(names, "")
