"""The log of operations, looked over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.database.statements import statements
from holdfast.doctor.operations import NEEDED
from tests.children import eventually, query
from tests.operations.logs import fill
from tests.pairs import EACH_ONCE

Connect = Callable[..., Any]


@pytest.fixture
def client(connect: Connect, either: str) -> Any:
    return fill(connect(either), either)


@EACH_ONCE
def test_the_health_of_the_log(client: Any, either: str) -> None:
    found = {each.check: each for each in client.operations.health().findings}
    assert {name: each.status for name, each in found.items() if each.status != "ok"} == {"claims": "warn"}
    assert "1 of 1 unfinished have lost their owner" in found["claims"].found
    assert client.operations.health(stale=0).passed() is False
    dot = "." if either.startswith("postgres") else "_"
    query(either, f"drop index holdfast{dot}idempotency_log_unfinished")
    found = {each.check: each for each in client.operations.health().findings}
    assert (found["indexes"].status, found["indexes"].found) == (
        "fail",
        "missing or invalid: idempotency_log_unfinished",
    )


def test_an_index_that_the_migrations_make_is_missed(postgres_url: str) -> None:
    made = query(
        postgres_url,
        "select indexname from pg_indexes where schemaname = 'holdfast' and tablename in ('idempotency_log', "
        "'wal_more', 'outbox', 'review') and not (indexname in ('outbox_pkey', 'review_pkey'))",
    )
    assert {name for (name,) in made} == NEEDED


LONG_LOG = (
    "insert into holdfast.idempotency_log (idem_key, status, created_at, updated_at, wal_pointer, attempt, fence, "
    "label, effect_started, failures, result, expires_at) select i::text, 'success', now(), "
    "now() - make_interval(hours => i), '1:x', 1, 0, 'x', true, 0, 'x', now() + interval '1 day' "
    "from generate_series(1, 20000) i"
)


def test_a_prefix_is_looked_up_in_the_index_of_a_long_log(postgres_url: str) -> None:
    query(postgres_url, LONG_LOG)
    query(postgres_url, "vacuum analyze holdfast.idempotency_log")
    asked = (
        "select (select sum(seq_tup_read) from pg_stat_user_tables where relname = 'idempotency_log') + "
        "(select sum(idx_tup_read) from pg_stat_user_indexes where relname = 'idempotency_log')"
    )
    [(before,)] = query(postgres_url, asked)
    with holdfast.Client(postgres_url) as client:
        for _ in range(7):  # the server makes a generic plan after five
            assert len(client.operations.match("1234", limit=20)) == 11

    def read() -> int:
        return int(query(postgres_url, asked)[0][0]) - int(before)

    eventually(lambda: read() > 0, "the session of the client is over, and what it did is counted")
    assert read() < 2000, "of 20,000, seven times"


def test_a_prefix_is_looked_up_in_the_index_of_a_file(sqlite_url: str) -> None:
    sql = statements("sqlite")["operation_match"].sql.replace(":prefix", "'abcd'").replace(":limit", "10")
    with holdfast.Client(sqlite_url) as client:
        assert client.operations.match("abcd") == []
    plan = [str(detail) for *_, detail in query(sqlite_url, f"explain query plan {sql}")]
    assert any("USING INDEX" in each and "idem_key>? AND idem_key<?" in each for each in plan), plan
    assert not any(each.startswith("SCAN") and "idempotency_log" in each for each in plan), plan


def test_a_look_at_a_long_log_reads_a_part_of_it(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.operations import operations

    monkeypatch.setattr(operations, "COUNT_LIMIT", 500)
    monkeypatch.setattr(operations, "LATEST", 100)
    query(postgres_url, LONG_LOG)
    query(postgres_url, "vacuum analyze holdfast.idempotency_log")
    counted = "coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)"
    asked = f"select {counted} from pg_stat_user_tables where relname = 'idempotency_log'"
    [(before,)] = query(postgres_url, asked)
    with holdfast.Client(postgres_url) as client:
        assert client.operations.expire() == 0
        assert len(client.operations.list(limit=5)) == 5
        assert client.operations.get("nobody's") is None
        found = {each.check: each.found for each in client.operations.health().findings}
    assert found["growth"].startswith("20000 operations, 23 of them since yesterday")

    def read() -> int:
        return int(query(postgres_url, asked)[0][0]) - int(before)

    eventually(lambda: read() > 0, "the session of the client is over, and what it did is counted")
    assert read() < 2000, "of 20,000"
