"""Who reads the tables or the files of a database finds no secret that a client holds, and nothing to act with."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
import pytest

import holdfast
from holdfast.errors import EngineError, FencedOut, LeaseLost, Refused
from holdfast.lease.keeper import keepers_of
from holdfast.lease.protect import protect
from holdfast.testing.operation_contract import name
from tests.children import query
from tests.raw_session import Raw

SECRET = "the secret to re-enter with"


class Stolen(NamedTuple):
    """What an object is written under."""

    name: str
    token: str

    def check(self) -> None:
        """It is believed to be held."""


@contextmanager
def user_connection(url: str) -> Iterator[Any]:
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            yield connection
    else:
        with psycopg.connect(url) as connection:
            yield connection


def answers(rows: list[Any]) -> list[Any]:
    return [value for row in rows for value in row.values()]


def contents(url: str) -> bytes:
    """Every column of every table as text, with bytes in hexadecimal, and the files that the tables are in."""
    if url.startswith("sqlite"):
        tables = query(url, "select name from sqlite_master where type = 'table'")
        rows = [row for (table,) in tables for row in query(url, f"select * from {table}")]
        columns = [each.hex() if isinstance(each, bytes) else str(each) for row in rows for each in row]
        files = [path.read_bytes() for path in Path(url.removeprefix("sqlite:///")).parent.glob("app.db*")]
        assert len(files) > 1, "the log is one of them"
    else:
        query(url, "checkpoint")
        tables = query(
            url,
            "select oid::regclass::text, pg_read_binary_file(pg_relation_filepath(oid)) from pg_class"
            " where relkind = 'r' and relnamespace = 'holdfast'::regnamespace",
        )
        files = [bytes(file) for _, file in tables]
        columns = [text for table, _ in tables for (text,) in query(url, f"select t::text from {table} t")]
    assert len(tables) > 20
    assert len(columns) > 20
    return b"\n".join([*files, *(text.encode() for text in columns)])


def is_in(secret: str, content: bytes) -> bool:
    forms = [secret.encode()]
    with suppress(ValueError):
        raw = UUID(secret).bytes
        forms += [raw, raw.hex().encode()]
    return any(form in content for form in forms)


def hold_everything(client: holdfast.Client, url: str) -> list[str]:
    """Hold a lease of each kind, and protect a transaction in both forms. The secrets that the client has then."""
    client.lease("entered", ttl=3600, holder="me", reenter=SECRET).acquire()
    client.lease("entered", ttl=3600, holder="me", reenter=SECRET).acquire()
    client.lease("strict", ttl=3600, strict=True).acquire()
    unrenewed = client.lease("unrenewed", ttl=3600, auto_renew=False).acquire()
    client.slots("gpu", 1, ttl=3600).claim(owner="s-1")
    client._guard_lease("guard", ttl=3600).acquire()
    client.gate("gate", actor="jane", reason="why").__enter__()
    grant = client.lease("import", ttl=3600).acquire()
    if not url.startswith("sqlite"):
        for at in ("start", "commit"):
            with psycopg.connect(url) as connection:
                grant.protect(connection, at=at)
    beats = [beat for keeper in keepers_of(client._database) for beat in keeper._beats]
    tokens = [token for beat in beats for token in beat.leases]
    assert len(tokens) >= 7, "with that of the operation; the keeper may not know yet that one was entered again"
    return [*tokens, unrenewed.token, *(beat.id for beat in beats), SECRET]


def test_no_table_and_no_file_has_a_secret_that_a_client_holds(either: str) -> None:
    found: list[str] = []

    def look() -> None:
        secrets = hold_everything(client, either)
        content = contents(either)
        assert is_in("strict", content), "names are in both"
        found.extend(secret for secret in secrets if is_in(secret, content))

    with holdfast.Client(either) as client:
        client.operation(name()).run(look)
    assert found == []


def guesses(stored: Any) -> list[str]:
    """What a reader may try in the place of a secret: the value, and what looks like a token in it."""
    text = stored.hex() if isinstance(stored, bytes) else str(stored)
    return [text, str(UUID(text.replace("-", "")[:32]))]


def test_with_what_is_stored_nothing_is_released_renewed_or_protected(either: str) -> None:
    """By a reader of the file or of a backup, who may call every function."""
    dot = "_" if either.startswith("sqlite") else "."
    with holdfast.Client(either) as client, holdfast.Client(either) as other, closing(Raw(either)) as thief:
        grants = [client.lease("import", ttl=3600).acquire(), client._guard_lease("guard", ttl=3600).acquire()]
        grants.append(client.slots("gpu", 1, ttl=3600).claim(owner="s-1"))
        held = client.leases.list()
        beats = query(either, f"select id, expires_at from holdfast{dot}beat")
        stored = query(either, f"select name, fence, token, beat from holdfast{dot}lease")
        assert len(stored) == 3
        for lease, fence, token, beat in stored:
            for guess in guesses(token):
                with pytest.raises((LeaseLost, ValueError)):
                    other.lease(lease).adopt(guess).check()
                with pytest.raises((FencedOut, Refused)):
                    other.objects.put_if("note", "1", {}, holdfast.Unconditional(), under=Stolen(lease, guess))
                with pytest.raises((FencedOut, EngineError)), user_connection(either) as connection:
                    protect(client._database, lease, guess, connection, "start")
                asked = {"name": lease, "token": guess}
                calls: list[Any] = [("lease_status", asked), ("lease_renew", asked), ("lease_release", asked)]
                calls += [("lease_abandon", asked), ("lease_wipe", asked | {"name": "guard", "prefix": ""})]
                calls += [("slot_release", asked | {"name": "@slot:gpu"})]
                for call, parameters in calls:
                    with suppress(Refused):  # it is no UUID
                        assert answers(thief.call(call, **parameters)) in ([], [0], [None]), call
            for guess in guesses(beat):
                for call in ("beat_renew", "beat_leases", "beat_wanted", "beat_end"):
                    with suppress(Refused):
                        assert answers(thief.call(call, beat=guess)) in ([], [0])
                with suppress(Refused):
                    assert not thief.done("beat_release", beat=guess, name=lease, fence=fence)
        assert client.leases.list() == held
        assert query(either, f"select id, expires_at from holdfast{dot}beat") == beats
        for grant in grants:
            grant.renew()
