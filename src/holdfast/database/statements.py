"""Named statements and numbered migrations, read from the .sql files of each noun. It decides nothing.

Under each ``-- name:`` is one statement of plain SQL; comments have no meaning. The text is never changed, except for
the schema's name, which is validated. hot: every command starts with this. So a statement is parsed on first use, those
of SQLite without regular expressions (compiling one takes longer than reading the files), and there is no ``from
__future__ import annotations``: named tuples would compile each annotation.
"""

import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

Dialect = Literal["postgres", "sqlite"]

SCHEMA = "holdfast"
FOUNDATION = 5
"""The version from which on the tables contain what governs migrations: leases, gates and the audit."""
_MIGRATIONS = os.path.join(os.path.dirname(__file__), "migrations")
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_NOUNS = (
    "database",
    "doctor",
    "governance",
    "lease",
    "lineage",
    "lock",
    "objects",
    "operations",
    "recipes",
    "schedules",
)
"""The folders with statements, in a file for each engine."""
# PostgreSQL's reserved words, and its one schema that does not begin with pg_.
_RESERVED = frozenset(
    """all analyse analyze and any array as asc asymmetric authorization binary both case cast check collate collation
    column concurrently constraint create cross current_catalog current_date current_role current_schema current_time
    current_timestamp current_user default deferrable desc distinct do else end except false fetch for foreign freeze
    from full grant group having ilike in initially inner intersect into is isnull join lateral leading left like
    limit localtime localtimestamp natural not notnull null offset on only or order outer overlaps placing primary
    references returning right select session_user similar some symmetric system_user table tablesample then to
    trailing true union unique user using variadic verbose when where window with information_schema""".split()  # noqa: SIM905
)
_IDENTIFIER = r"[a-z_][a-z0-9_]{0,39}"
_PARAMETER = r"(?<![:\w]):([a-z_]+)"
_WRITES = frozenset({"insert", "update", "delete", "replace"})
_NOW = "((julianday('now') - 2440587.5) * 86400.0)"


class Statement(NamedTuple):
    name: str
    sql: str
    parameters: tuple[str, ...] = ()
    """In the order of their numbers on PostgreSQL; SQLite binds by name."""

    @property
    def reads_only(self) -> bool:
        first, *rest = self.sql.replace("(", " ").replace(")", " ").split()
        return first in ("select", "pragma") or (first == "with" and _WRITES.isdisjoint(rest))


class Migration(NamedTuple):
    version: int
    name: str
    up: str
    down: str

    def __repr__(self) -> str:
        return f"<Migration {self.version:04} {self.name}>"


def check_schema(schema: str, dialect: Dialect) -> str:
    if schema == SCHEMA:
        return schema
    if not isinstance(schema, str):
        raise TypeError(f"schema must be a str, not {type(schema).__name__}")
    if not re.fullmatch(_IDENTIFIER, schema) or schema.startswith("pg_") or schema in _RESERVED:
        raise ValueError(
            "schema must be 1 to 40 lower-case letters, digits or underscores, not begin with a digit or 'pg_', "
            f"and be neither information_schema nor a keyword of SQL: {schema!r}"
        )
    if dialect == "sqlite" and f"{schema}_".startswith("sqlite_"):  # it begins the names of our tables
        raise ValueError(
            f"schema must not be 'sqlite' or begin with 'sqlite_', which are SQLite's own names: {schema!r}"
        )
    return schema


def _in_schema(text: str, dialect: Dialect, schema: str) -> str:
    """Replace ``holdfast.`` or ``holdfast_`` by the schema. The SQL functions holdfast_gone and
    holdfast_waiting keep their names."""
    if dialect == "sqlite":
        text = text.replace("{now}", _NOW)
    if schema == SCHEMA:
        return text
    if dialect == "postgres":
        text = re.sub(rf"\b{SCHEMA}\.", f"{schema}.", text)
        return re.sub(rf"(?<=\bschema ){SCHEMA}\b|(?<='){SCHEMA}(?=')", schema, text)
    return re.sub(rf"\b{SCHEMA}_(?!(?:gone|waiting)\b)", f"{schema}_", text)


def _read(*path: str) -> str:
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()


class Statements(Mapping[str, Statement]):
    """All statements of a dialect, by name."""

    def __init__(self, dialect: Dialect, text: str) -> None:
        blocks = (block.partition("\n") for block in f"\n{text}".split("\n-- name: ")[1:])
        self._dialect, self._bodies = dialect, {name: body for name, _, body in blocks}
        self._parsed: dict[str, Statement] = {}

    def __getitem__(self, name: str) -> Statement:
        if (statement := self._parsed.get(name)) is None:
            statement = self._parsed[name] = _parse(self._dialect, name, self._bodies[name])
        return statement

    def __iter__(self) -> Iterator[str]:
        return iter(self._bodies)

    def __len__(self) -> int:
        return len(self._bodies)


@lru_cache
def statements(dialect: Dialect, schema: str = SCHEMA) -> Statements:
    text = "\n".join(_read(_PACKAGE, noun, f"{dialect}.sql") for noun in _NOUNS)
    return Statements(dialect, _in_schema(text, dialect, schema))


def _parse(dialect: Dialect, name: str, body: str) -> Statement:
    [text] = split(body)
    if dialect == "sqlite":
        return Statement(name, text)
    parameters = parameters_of(text)
    numbers = {parameter: f"${number}" for number, parameter in enumerate(parameters, 1)}
    return Statement(name, re.sub(_PARAMETER, lambda match: numbers[match[1]], text), parameters)


def parameters_of(sql: str) -> tuple[str, ...]:
    """The names in it that are written ``:name``."""
    return tuple(dict.fromkeys(re.findall(_PARAMETER, sql)))


def split(script: str) -> list[str]:
    """The statements of a script, without comments. Semicolons end lines, never strings."""
    parts: list[str] = []
    lines: list[str] = []
    for line in [*script.splitlines(), ";"]:
        code = line.split("--", 1)[0].rstrip()
        if code:
            lines.append(code)
        if code.endswith(";"):
            text = "\n".join(lines).rstrip(";").strip()
            if text:
                parts.append(text)
            lines = []
    return parts


@lru_cache
def migrations(dialect: Dialect, schema: str = SCHEMA) -> tuple[Migration, ...]:
    scripts = []
    for entry in sorted(os.listdir(os.path.join(_MIGRATIONS, dialect))):
        if entry.endswith(".up.sql"):
            version, name = entry.removesuffix(".up.sql").split("_", 1)
            texts = [
                _in_schema(_read(_MIGRATIONS, dialect, f"{version}_{name}.{direction}.sql"), dialect, schema)
                for direction in ("up", "down")
            ]
            scripts.append(Migration(int(version), name, *texts))
    return tuple(scripts)
