"""A PostgreSQL server as the poorest provider rents it, made of a role and a database on the tests' own server.

The role is a plain one that owns its schema and nothing else: it cannot write to ``public``, has no session-level
advisory locks, and has short timeouts by default. PostgreSQL has no privilege for LISTEN, so ``without_listen`` makes
the statement itself one that the server refuses, as poolers do.
"""

from __future__ import annotations

from functools import cache

import psycopg
import pytest

import holdfast
from holdfast.database.statements import Statement, statements

ROLE = "tenant"
SESSION_LOCKS = (
    "pg_advisory_lock", "pg_advisory_lock_shared", "pg_try_advisory_lock", "pg_try_advisory_lock_shared",
    "pg_advisory_unlock", "pg_advisory_unlock_shared", "pg_advisory_unlock_all",
)  # fmt: skip
WAL_FUNCTIONS = ("pg_current_wal_lsn", "pg_control_system", "pg_walfile_name")
REFUSED = SESSION_LOCKS + WAL_FUNCTIONS
"""Functions of PostgreSQL that the role may not execute."""
LIMIT = "5s"
"""Of every timeout: holdfast must connect and set its own within it, however busy the machine is."""
TIMEOUTS = ("statement_timeout", "transaction_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout")
TABLES = (
    "lease", "beat", "history", "object", "object_change", "idempotency_log", "wal_more", "outbox", "review", "audit",
)  # fmt: skip
REVOKE = """
do $$ declare f regprocedure; begin
    for f in select oid from pg_proc where pronamespace = 'pg_catalog'::regnamespace and proname = any ('{%s}') loop
        execute format('revoke execute on function %%s from public', f);
    end loop;
end $$
"""
STUBS = """
do $$ declare f pg_proc; begin
    for f in select * from pg_proc
              where pronamespace = 'pg_catalog'::regnamespace and proname ~ '^pg_(try_)?advisory_' loop
        execute format('alter function %s rename to %I', f.oid::regprocedure, 'real_' || f.proname);
        execute format('create function pg_catalog.%I(%s) returns %s language sql as %L', f.proname,
                       pg_get_function_identity_arguments(f.oid), f.prorettype::regtype,
                       case f.prorettype when 'void'::regtype then 'select' else 'select true' end);
    end loop;
end $$
"""
"""Replaces every advisory lock of a database by a function that locks nothing and answers true, as CockroachDB's do."""
UNSUPPORTED = "do 'begin raise feature_not_supported using message = ''LISTEN is not supported''; end'"


def tenant(url: str, *refused: str) -> str:
    """The empty database of a superuser's URL as the poor role sees it, without the functions ``refused``."""
    with psycopg.connect(url, autocommit=True) as database:
        if database.execute("select rolname from pg_roles where rolname = %s", (ROLE,)).fetchone() is None:
            database.execute(f"create role {ROLE} login".encode())
            known = "select name from pg_settings where name = any (%s)"
            for (name,) in database.execute(known, (list(TIMEOUTS),)).fetchall():
                database.execute(f"alter role {ROLE} set {name} = '{LIMIT}'".encode())
        database.execute(f'grant create on database "{database.info.dbname}" to {ROLE}'.encode())
        database.execute("revoke create on schema public from public")
        database.execute((REVOKE % ",".join(refused)).encode())
    return url.replace("//postgres@", f"//{ROLE}@")


@cache
def poor_postgres() -> str:
    """One migrated database for all tests of this process."""
    from tests.conftest import server

    url = tenant(server().database(), *REFUSED)
    with holdfast.Client(url) as client:
        client.migrate()
    return url


@cache
def stub_postgres() -> str:
    """A migrated database in which advisory locks lock nothing."""
    from tests.conftest import server

    url = server().database()
    with psycopg.connect(url, autocommit=True) as database:
        database.execute(STUBS.encode())
    with holdfast.Client(url) as client:
        client.migrate()
    return url


def emptied_poor_postgres() -> str:
    url = poor_postgres()
    with psycopg.connect(url, autocommit=True) as database:
        database.execute(f"truncate {', '.join(f'holdfast.{table}' for table in TABLES)}".encode())
    return url


def without_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the server refuse LISTEN from this process."""
    parsed = statements("postgres")
    _ = parsed["listen"]
    # private: Statements._parsed
    monkeypatch.setitem(parsed._parsed, "listen", Statement("listen", UNSUPPORTED))
