"""What a call is on SQLite, and which calls there are; the ``sqlite_calls`` of each noun define its own.

A call that takes several statements is a function. It gets ``run``, which executes one named statement of a
``sqlite.sql`` inside the transaction and returns its rows, and the call's parameters by name; it returns the rows of
the answer. A name with a dot is a step: only functions run it. A call of one statement needs no function.

    def _is_taken(run: Run, name: str, **_: Any) -> Rows: ...

    @call(volatile=True, answer=_is_taken)
    def lease_acquire(run: Run, name: str, holder: str, ...) -> Rows: ...

Invariants: a call gets hashes in the place of secrets: see ``with_hashes``. An ``answer`` only reads; it and an
``attempt`` are repeated inside the transaction. A commit waits for the disk unless the call is volatile.

No noun is imported here. The functions of one are imported with its first call, because every command starts with
this; and there is no ``from __future__ import annotations``, because named tuples would compile each annotation.
"""

from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeVar

from holdfast.database.sessions import Row
from holdfast.database.statements import Statements, parameters_of

Rows = list[Row]
Function = Callable[..., Rows]
F = TypeVar("F", bound=Function)


class Run(Protocol):
    """Executes one named statement."""

    def __call__(self, statement: str, /, **parameters: Any) -> Rows: ...


class Call(NamedTuple):
    function: Function
    """Runs inside a transaction."""
    volatile: bool = False
    """Whether what it writes may be lost in a system crash, because it is void after that anyway."""
    answer: Function | None = None
    """Only reads, and runs before anything is locked: if it returns rows, these are the answer."""
    attempt: str | None = None
    """The name of a statement that writes, and runs without BEGIN: if it returns rows, these are the answer."""
    reads: Mapping[str, None] | None = None
    """Of a call that is one statement and only reads: its parameters, which are null unless they are given."""

    def perform(self, run: Run, parameters: Mapping[str, Any]) -> Rows:
        """The rows of the answer, inside a transaction that is open."""
        if self.answer is not None and (rows := self.answer(run, **parameters)):
            return rows
        if self.attempt is not None and (rows := run(self.attempt, **parameters)):
            return rows
        return self.function(run, **parameters)


NOUNS = {
    "audit": "governance",
    "beat": "lease",
    "elector": "recipes",
    "fence": "lease",
    "gate": "recipes",
    "guard": "recipes",
    "hello": "database",
    "lease": "lease",
    "lock": "lock",
    "object": "objects",
    "operation": "operations",
    "policy": "governance",
    "purge": "lease",
    "relay": "lineage",
    "review": "operations",
    "schedule": "schedules",
    "slot": "recipes",
    "wal": "operations",
}
"""The folder with the functions of a call, by the first word of its name."""
_calls: dict[str, Call] = {}


def call(
    *names: str, volatile: bool = False, answer: Function | None = None, attempt: str | None = None
) -> Callable[[F], F]:
    """Declares a function as the call of its name, or as those of ``names``. The function itself stays as it is."""

    def declare(function: F) -> F:
        for name in names or (function.__name__,):
            _calls[name] = Call(function, volatile, answer, attempt)
        return function

    return declare


_SECRETS = frozenset({"token", "lease_token", "beat", "reenter"})


def with_hashes(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of a call, with hashes in the place of secrets, which no table may contain. Called once for each
    call, by sessions and by the adapters of the user's connections."""
    if _SECRETS.isdisjoint(parameters):
        return parameters
    hashed = dict(parameters)
    for name in _SECRETS:
        if (secret := hashed.get(name)) is not None:
            hashed[name] = sha256(str(secret).encode()).hexdigest()
    return hashed


def find(name: str, statements: Statements) -> Call:
    """The call of that name: a function's, or that of one statement. KeyError when there is neither."""
    if name not in _calls and (noun := NOUNS.get(name.partition("_")[0])) is not None:
        import_module(f"holdfast.{noun}.sqlite_calls")
    return _calls.get(name) or _of_one_statement(name, statements)


def _of_one_statement(name: str, statements: Statements) -> Call:
    statement = statements[name]
    nulls = dict.fromkeys(parameters_of(statement.sql))

    def function(run: Run, **given: Any) -> Rows:
        """A parameter that is not given is null."""
        return run(name, **{**nulls, **given})

    return Call(function, reads=nulls if statement.reads_only else None)


def changes(run: Run) -> int:
    """The number of rows that the last statement changed."""
    [row] = run("database.changes")
    count: int = row["count"]
    return count


def _known_boot(run: Run, boot: str | None = None) -> Rows:
    return run("hello.known_boot", boot=boot)


@call(answer=_known_boot)
def hello(run: Run, boot: str | None = None) -> Rows:
    """The version of the tables. A new boot raises the numbers that may have been lost with the machine."""
    run("hello.raise_versions")
    run("hello.raise_fence", boot=boot)
    return run("hello.version")
