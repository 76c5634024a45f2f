"""Copies of the log: a standby that is promoted, and a subscriber by logical replication. Both know what was done."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing import Postgres
from tests.children import eventually
from tests.conftest import migrated

PUBLISHED = "holdfast.idempotency_log, holdfast.wal_more, holdfast.outbox, holdfast.review"


def fail() -> Any:
    raise ValueError("broken")


def doctor(client: holdfast.Client) -> dict[str, str]:
    return {each.check: each.status for each in client.doctor().findings if each.status == "warn"}


def test_a_standby_that_is_promoted_knows_what_was_done_and_can_prove_it() -> None:
    with Postgres.create() as primary:
        url = migrated(primary.database("app"))
        with holdfast.Client(url) as client:
            client.operation("charge:42").run(lambda: "charged")
            assert doctor(client) == {"operation_log": "warn"}
            standby = primary.standby(synchronous=True)
            assert doctor(client) == {}
            client.operation("charge:43").run(lambda: "charged, too")
            entries = client.operations.verify().entries
        primary.kill()
        standby.promote()
        with holdfast.Client(f"postgresql://postgres@127.0.0.1:{standby.port}/app") as client:
            found = client.operations.verify()
            assert (found.passed, found.operations, found.entries) == (True, 2, entries)
            outcome = client.operation("charge:43").run(fail)
            assert (outcome.result, outcome.replayed) == ("charged, too", True)
            assert client.operation("charge:44").run(lambda: "and on").result == "and on"
            assert client.operations.verify().passed


def test_a_subscriber_has_the_log_with_its_changes_and_can_prove_it() -> None:
    logical = {"wal_level": "logical"}
    prepares = {**logical, "max_prepared_transactions": 1}
    with Postgres.create(settings=prepares) as origin, Postgres.create(settings=logical) as copy:
        url, there = migrated(origin.database("app")), migrated(copy.database("app"))
        origin.execute(f"create publication operations for table {PUBLISHED}", dbname="app")
        with holdfast.Client(url) as client, holdfast.Client(there) as reader:
            client.operation("done").run(lambda: {"rows": 7})
            with pytest.raises(ValueError, match="broken"):
                client.operation("again").run(fail)
            connection = f"host=127.0.0.1 port={origin.port} user=postgres dbname=app"
            copy.execute(
                f"create subscription operations connection '{connection}' publication operations", dbname="app"
            )
            try:
                assert doctor(client) == {}
                client.operation("again").run(lambda: "now")
                client.operation("told").run(lambda op: op.emit("lineage", {"dataset": "parcels"}))
                with psycopg.connect(url, autocommit=True) as mine:
                    mine.execute("begin")
                    client.operation("prepared", tx=mine).run(lambda: 1)
                    mine.execute("prepare transaction 'p'")
                    client.operation("meanwhile").run(lambda: 1)
                    assert not {"prepared", "meanwhile"} & {each.label for each in client.relays.events()}
                    mine.execute("commit prepared 'p'")
                labels = [each.label for each in client.relays.events()]
                assert labels[-4:] == ["prepared", "prepared", "meanwhile", "meanwhile"], "it counts as committed then"
                client.operations.archive(datetime.now(UTC) + timedelta(minutes=1), lambda lines: None)

                def same() -> bool:
                    return client.operations.replay() == reader.operations.replay() != []

                eventually(same, "the copy says the same")
                found = reader.operations.verify()
                assert (found.passed, found.operations) == (True, 5)
                assert [each.kind for each in reader.operations.history("again")] == ["archived"]
                assert reader.operations.replay("done")[0].value == {"rows": 7}
                assert {each.check: each.status for each in reader.operations.health().findings}["chains"] == "ok"
            finally:
                copy.execute("drop subscription operations", dbname="app")
