"""A log of operations to look at, and somebody who changes it past holdfast."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import holdfast
from tests.children import query

Connect = Callable[..., Any]

LATER = timedelta(hours=1)


def table(url: str, name: str) -> str:
    return f"holdfast_{name}" if url.startswith("sqlite") else f"holdfast.{name}"


WRITABLE_VIEW = """
create or replace function public.change_wal() returns trigger language plpgsql as $$
begin
    if tg_op <> 'INSERT' then
        delete from {more} where idem_key = old.idem_key and number = old.number;
        if not found then
            update {log} set entries = null where idem_key = old.idem_key;
            if tg_op = 'UPDATE' and new.number = 1 then
                update {log} set entries = new.entries, horizon = new.horizon, place = new.place, created_at = new.at
                 where idem_key = old.idem_key;
                return new;
            end if;
        end if;
    end if;
    if tg_op = 'DELETE' then
        return old;
    end if;
    insert into {more} values (new.*);
    return new;
end $$;
create or replace trigger change_wal instead of insert or update or delete on {wal}
    for each row execute function public.change_wal()
"""
"""The entries of an operation are in its row or in ``wal_more``: the view of both, made writable."""
WRITABLE_SQLITE_VIEW = (
    """
create trigger if not exists holdfast_wal_delete instead of delete on holdfast_wal begin
    update holdfast_idempotency_log set entries = null where idem_key = old.idem_key and place = old.place;
    delete from holdfast_wal_more where place = old.place;
end""",
    """
create trigger if not exists holdfast_wal_update instead of update on holdfast_wal begin
    update holdfast_idempotency_log set created_at = new.at, place = new.place,
           entries = case new.number when 1 then new.entries end where idem_key = old.idem_key and place = old.place;
    insert into holdfast_wal_more select new.place, new.idem_key, new.number, new.at, new.entries
     where new.number > 1 and not exists (select 1 from holdfast_wal_more where place = old.place);
    update holdfast_wal_more set place = new.place, number = new.number, at = new.at, entries = new.entries
     where place = old.place and new.number > 1;
end""",
)


def change(url: str, statement: str) -> None:
    """Change the tables without holdfast, as with psql: ``{wal}`` is the view of all entries, ``{log}`` the rows."""
    if "{wal}" in statement and url.startswith("sqlite"):
        for trigger in WRITABLE_SQLITE_VIEW:
            query(url, trigger)
    elif "{wal}" in statement:
        names = {name: table(url, name) for name in ("wal", "wal_more", "idempotency_log")}
        query(url, WRITABLE_VIEW.format(wal=names["wal"], more=names["wal_more"], log=names["idempotency_log"]))
    query(url, statement.format(wal=table(url, "wal"), log=table(url, "idempotency_log"), outbox=table(url, "outbox")))


def fail() -> None:
    raise ValueError("broken")


def fill(client: Any, url: str) -> Any:
    """One that was done, one that was done at the second try, one that failed, one that was left half done."""
    client.operation("done", payload=1).run(lambda: {"rows": 7})
    with pytest.raises(ValueError, match="broken"):
        client.operation("second try").run(fail)
    client.operation("second try").run(lambda: b"\x00")
    with pytest.raises(ValueError, match="broken"):
        client.operation("failed").run(fail)

    def die(op: Any) -> None:
        op.checkpoint("draft", 42)
        raise KeyboardInterrupt

    with holdfast.Client(url) as dies, pytest.raises(KeyboardInterrupt):
        dies.operation("half done").run(die)
    return client


def problems(client: Any, **options: Any) -> set[str]:
    found = client.operations.verify(**options).problems
    assert all(each.operation for each in found), "it names the operation"
    return {each.what for each in found if each.broken}
