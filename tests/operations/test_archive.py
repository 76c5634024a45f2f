"""The log of operations within bounds: what is put away stays provable, and what is let go of stays known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import holdfast
from tests.children import eventually
from tests.lineage.recording_sink import RecordingSink
from tests.operations.logs import LATER, change, fail, fill, problems
from tests.pairs import EACH_ONCE

Connect = Callable[..., Any]


@pytest.fixture
def client(connect: Connect, either: str) -> Any:
    return fill(connect(either), either)


@EACH_ONCE
def test_what_is_put_away_stays_provable_and_is_still_known(client: Any, either: str) -> None:
    before = {name: client.operations.replay(name)[0] for name in ("done", "second try", "failed")}
    lines: list[str] = []
    assert client.operations.archive(datetime.now(UTC) - LATER, lines.extend).operations == 0
    archived = client.operations.archive(datetime.now(UTC) + LATER, lines.extend)
    assert (archived.operations, dict(archived.left)) == (3, {})
    assert len(lines) == 3, "what was left half done stays"
    assert [each.kind for each in client.operations.history("done")] == ["archived"]
    for name, state in before.items():
        now = client.operations.replay(name)[0]
        assert (now.status, now.attempt, now.result_hash, now.error, now.result) == (
            state.status, state.attempt, state.result_hash, state.error, state.result)  # fmt: skip
    assert client.operation("done", payload=1).run(fail).result == {"rows": 7}, "it is replayed all the same"
    with pytest.raises(holdfast.KeyReused):
        client.operation("done", payload=2).run(fail)
    assert problems(client) == problems(client, archives=lines) == set()
    assert client.operation("failed").run(lambda: "now").attempt == 2
    assert client.operations.archive(datetime.now(UTC) + LATER, lines.extend).operations == 1
    assert problems(client, archives=lines) == set()
    assert len(client.operations.history("failed")) == 1
    forged = [line.replace("broken", "well") for line in lines]
    assert problems(client, archives=forged) == {"tampered"}
    assert problems(client, archives=[line for line in lines if "broken" not in line]) == set(), "the rest is sound"
    change(either, "delete from {wal}")
    change(either, "delete from {log}")
    assert problems(client, archives=lines) == problems(client, key="done", archives=lines) == {"missing"}


@EACH_ONCE
def test_nothing_is_put_away_that_is_not_published_changed_meanwhile_or_broken(client: Any, either: str) -> None:
    client.operation("told").run(lambda op: op.emit("lineage", {"dataset": "parcels"}))
    with pytest.raises(ValueError, match="broken"):
        client.operation("goes on").run(fail)
    failed = client.operations.get("failed").key
    change(either, "update {wal} set entries = replace(entries, 'broken', 'well') where idem_key = '" + failed + "'")

    lines: list[str] = []

    def write(page: Any) -> None:
        lines.extend(page)
        with holdfast.Client(either) as other:
            other.operation("goes on").run(lambda: "on")

    archived = client.operations.archive(datetime.now(UTC) + LATER, write)
    why = {client.operations.get(name).key: name for name in ("told", "failed", "goes on")}
    assert archived.operations == 2
    assert {why[key]: reason for key, reason in archived.left.items()} == {
        "told": "its lineage is not published",
        "failed": "its chain is broken: its hash is not the hash of its content",
        "goes on": "it has gone on",
    }
    assert problems(client, archives=lines) == {"tampered"}, "and nothing else: what was written down is there once"
    change(either, "update {outbox} set published_at = created_at")
    assert client.operations.archive(datetime.now(UTC) + LATER, lines.extend).operations == 2
    assert problems(client, archives=lines) == {"tampered"}


@EACH_ONCE
def test_an_archive_that_cannot_be_written_takes_nothing_out(client: Any) -> None:
    def write(lines: Any) -> None:
        raise OSError("no space left")

    before = client.operations.verify().entries
    with pytest.raises(OSError, match="no space left"):
        client.operations.archive(datetime.now(UTC) + LATER, write)
    with pytest.raises(TypeError, match="write must be a function"):
        client.operations.archive(datetime.now(UTC) + LATER, "old.jsonl")
    assert client.operations.verify().entries == before


@EACH_ONCE
def test_nothing_is_taken_out_before_it_is_written_by_a_function_that_is_awaited(client: Any) -> None:
    before, lines = client.operations.verify().entries, list[str]()

    async def write(page: Any) -> None:
        await asyncio.sleep(0)
        lines.extend(page)

    if isinstance(client, holdfast.Client):
        with pytest.raises(TypeError, match="which has to be awaited"):
            client.operations.archive(datetime.now(UTC) + LATER, lambda page: write(page))
        assert client.operations.verify().entries == before
    else:
        assert client.operations.archive(datetime.now(UTC) + LATER, write).operations == len(lines) == 3


@EACH_ONCE
def test_results_whose_time_is_over_are_let_go_of_and_the_chain_stays_sound(client: Any, either: str) -> None:
    client.operation("short", keep=0.001).run(lambda: "x" * 1000)
    client.operation("long", keep=1000).run(lambda: "y")
    over = client.operations.get("short").expires_at + timedelta(milliseconds=2)  # SQLite's clock counts whole ones
    eventually(lambda: datetime.now(UTC) > over, "the result's time to be over")
    assert client.operations.expire() == 1
    assert client.operations.expire() == 0
    [short], [long] = client.operations.replay("short"), client.operations.replay("long")
    assert (short.kept, short.status, long.value) == (False, "success", "y")
    assert short.result_hash == client.operations.get("short").result_hash
    assert problems(client) == set()
    change(either, "update {log} set result = null")
    gone = client.operation("long").run(fail)
    assert (gone.status, gone.replayed) == ("expired", True), "it was done, whatever the clock says"


def test_declared_lineage_is_not_put_away_before_a_relay_has_run(client: Any, either: str) -> None:
    lineage = holdfast.lineage.Lineage(inputs=["raw"], outputs=["parcels"])
    client.operation("declared", lineage=lineage).run(int)
    [finding] = [each for each in client.operations.health().findings if each.check == "lineage"]
    assert "no relay has ever run" in finding.found
    left = client.operations.archive(datetime.now(UTC) + LATER, lambda lines: None).left
    assert list(left.values()) == [
        "its lineage is not published, and no relay has ever run: run one (holdfast relay run)"
    ]
    client.relay("catalogue", RecordingSink()).step()
    assert client.operations.archive(datetime.now(UTC) + LATER, lambda lines: None).operations == 1
