"""The log of operations: replayed, proven, put away, looked over. Whatever is done to the tables is found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import holdfast
from holdfast.core.health.operations import NEEDED
from tests.children import eventually, query

Connect = Callable[..., Any]
LATER = timedelta(minutes=1)


def table(url: str, name: str) -> str:
    return f"holdfast_{name}" if url.startswith("sqlite") else f"holdfast.{name}"


def change(url: str, statement: str) -> None:
    """Past holdfast, as somebody with a psql would: ``{wal}`` and ``{log}`` are the tables."""
    query(url, statement.format(wal=table(url, "wal"), log=table(url, "idempotency_log"), outbox=table(url, "outbox")))


def fail() -> None:
    raise ValueError("broken")


def fill(client: Any) -> None:
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

    with holdfast.Client(client.url) as dies, pytest.raises(KeyboardInterrupt):
        dies.operation("half done").run(die)


@pytest.fixture
def client(connect: Connect, either: str) -> Any:
    made = connect(either)
    made.url = either
    fill(made)
    return made


def problems(client: Any, **options: Any) -> set[str]:
    return {each.what for each in client.operations.verify(**options).problems if each.broken}


def test_replay_folds_the_log_into_states_and_results_and_calls_nobody(client: Any) -> None:
    known = {name: client.operations.get(name) for name in ("done", "second try", "failed", "half done")}
    states = {each.operation: each for each in client.operations.replay()}
    assert {record.key for record in known.values()} == states.keys()
    for record in known.values():
        state = states[record.key]
        assert (state.status, state.attempt, state.result_hash) == (record.status, record.attempt, record.result_hash)
    [done] = client.operations.replay("done")
    assert (done.value, done.kept, done.effect_started) == ({"rows": 7}, True, True)
    assert client.operations.replay("second try")[0].value == b"\x00"
    [half] = client.operations.replay("half done")
    assert (half.status, half.checkpoints, half.kept) == ("partial", {"draft": 42}, False)
    with pytest.raises(LookupError, match="no result"):
        _ = half.value
    assert client.operations.replay("failed")[0].error == "ValueError: broken"
    assert client.operations.replay("nobody's") == []
    assert client.operations.replay(since=datetime.now(UTC) + LATER) == []
    assert len(client.operations.replay(since=datetime.now(UTC) - LATER)) == 4


def test_verify_proves_what_nobody_has_touched_and_tells_of_locks_that_a_crash_left(client: Any) -> None:
    found = client.operations.verify()
    assert (found.operations, found.passed, found.broken) == (4, True, ())
    assert found.entries == sum(
        len(client.operations.history(name)) for name in ("done", "second try", "failed", "half done")
    )
    left = client.operations.get("half done").key
    assert [(each.what, each.operation) for each in found.problems] == [("unpaired", left)]
    assert client.operations.verify("done").operations == 1


OTHER = "(select {} from {{log}} where label = 'second try')"
TAMPERED = [
    ("update {wal} set entries = replace(entries, '\"success\"', '\"failure\"')", {"tampered"}),
    ("update {wal} set entries = replace(entries, 'broken', 'well')", {"tampered"}),
    ("update {wal} set entries = '[]' where number = 1", {"missing"}),
    ("update {wal} set entries = 'nonsense' where number = 1", {"tampered"}),
    ("delete from {wal} where number = 1", {"missing"}),
    ("delete from {wal} where number > 1", {"head"}),
    ("update {wal} set number = number + 100 where number = 1", {"reordered"}),
    ("delete from {log} where label = 'done'", {"missing"}),
    ("delete from {wal}", {"head"}),
    ("update {log} set status = 'failure' where label = 'done'", {"log"}),
    ("update {log} set attempt = 9 where label = 'failed'", {"log"}),
    ("update {log} set wal_pointer = '1:' || substr(wal_pointer, 3) where label = 'done'", {"head"}),
    (f"update {{log}} set result = {OTHER.format('result')} where label = 'done'", {"payload"}),
    (f"update {{log}} set result_hash = {OTHER.format('result_hash')} where label = 'done'", {"log"}),
]


@pytest.mark.parametrize(("statement", "expected"), TAMPERED, ids=[statement[:60] for statement, _ in TAMPERED])
def test_whatever_is_done_to_the_tables_is_found(either: str, statement: str, expected: set[str]) -> None:
    with holdfast.Client(either) as client:
        client.url = either  # type: ignore[attr-defined]
        fill(client)
        assert problems(client) == set()
        change(either, statement)
        assert expected <= problems(client), client.operations.verify().problems
        assert not client.operations.health().passed()


def test_a_row_that_says_otherwise_than_its_entries_is_found_whatever_it_says(client: Any) -> None:
    for name, statement in {
        "done": "fingerprint = null",
        "second try": 'error = \'{{"type": "x"}}\'',
        "failed": "effect_started = not effect_started",
        "half done": "error = '{{\"reset\": true}}'",  # it would be run as if nobody had begun it
    }.items():
        change(client.url, f"update {{log}} set {statement} where label = '{name}'")
        assert problems(client, key=name) == {"log"}, name


def test_what_is_taken_up_to_be_undone_is_partial_and_may_turn_out_to_be_done(client: Any) -> None:
    """Whoever undoes a failed attempt may fail at that, or die; then it is asked whether the effect is there."""

    def undo(op: Any) -> None:
        raise OSError("not now")

    with pytest.raises(OSError, match="not now"):
        client.operation("failed", rollback=undo).run(lambda: 1)
    assert client.operations.replay("failed")[0].status == client.operations.get("failed").status == "partial"
    assert problems(client) == set()
    assert client.operation("failed", verify=lambda op: op.done(7)).run(lambda: 1).result == 7
    assert problems(client) == set()


def test_chains_are_read_page_by_page(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast._sync.primitives import operation_log

    monkeypatch.setattr(operation_log, "PAGE", 3)
    with holdfast.Client(either) as client:
        for number in range(10):
            client.operation(f"n{number}").run(lambda: 1)
        assert len(client.operations.replay()) == client.operations.verify().operations == 10
        lines: list[list[str]] = []
        archived = client.operations.archive(datetime.now(UTC) + LATER, lambda page: lines.append(list(page)))
        assert (archived.operations, [len(page) for page in lines]) == (10, [3, 3, 3, 1])


def test_what_is_put_away_stays_provable_and_is_still_known(client: Any) -> None:
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
    change(client.url, "delete from {wal}")
    change(client.url, "delete from {log}")
    assert problems(client, archives=lines) == problems(client, key="done", archives=lines) == {"missing"}


def test_nothing_is_put_away_that_is_not_published_changed_meanwhile_or_broken(client: Any) -> None:
    client.operation("told").run(lambda op: op.emit("lineage", {"dataset": "parcels"}))
    with pytest.raises(ValueError, match="broken"):
        client.operation("goes on").run(fail)
    failed = client.operations.get("failed").key
    change(
        client.url, "update {wal} set entries = replace(entries, 'broken', 'well') where idem_key = '" + failed + "'"
    )

    lines: list[str] = []

    def write(page: Any) -> None:
        lines.extend(page)
        with holdfast.Client(client.url) as other:
            other.operation("goes on").run(lambda: "on")

    archived = client.operations.archive(datetime.now(UTC) + LATER, write)
    why = {client.operations.get(name).key: name for name in ("told", "failed", "goes on")}
    assert archived.operations == 2
    assert {why[key]: reason for key, reason in archived.left.items()} == {
        "told": "its lineage is not published",
        "failed": "its chain is broken: its hash is not the hash of what it says",
        "goes on": "it has gone on",
    }
    assert problems(client, archives=lines) == {"tampered"}, "and nothing else: what was written down is there once"
    change(client.url, "update {outbox} set published_at = created_at")
    assert client.operations.archive(datetime.now(UTC) + LATER, lines.extend).operations == 2
    assert problems(client, archives=lines) == {"tampered"}


def test_an_archive_that_cannot_be_written_takes_nothing_out(client: Any) -> None:
    def write(lines: Any) -> None:
        raise OSError("no space left")

    before = client.operations.verify().entries
    with pytest.raises(OSError, match="no space left"):
        client.operations.archive(datetime.now(UTC) + LATER, write)
    with pytest.raises(TypeError, match="write must be a function"):
        client.operations.archive(datetime.now(UTC) + LATER, "old.jsonl")
    assert client.operations.verify().entries == before


def test_nothing_is_taken_out_before_it_is_written_by_a_function_that_is_awaited(client: Any) -> None:
    before, lines = client.operations.verify().entries, list[str]()

    async def write(page: Any) -> None:
        await asyncio.sleep(0)
        lines.extend(page)

    if isinstance(client, holdfast.Client):
        with pytest.raises(TypeError, match="nobody awaits it here"):
            client.operations.archive(datetime.now(UTC) + LATER, lambda page: write(page))
        assert client.operations.verify().entries == before
    else:
        assert client.operations.archive(datetime.now(UTC) + LATER, write).operations == len(lines) == 3


def test_results_whose_time_is_over_are_let_go_of_and_the_chain_stays_sound(client: Any) -> None:
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
    change(client.url, "update {log} set result = null")
    gone = client.operation("long").run(fail)
    assert (gone.status, gone.replayed) == ("expired", True), "it was done, whatever the clock says"


def test_the_health_of_the_log(client: Any) -> None:
    found = {each.check: each for each in client.operations.health().findings}
    assert {name: each.status for name, each in found.items() if each.status != "ok"} == {"claims": "warn"}
    assert "1 of 1 unfinished have lost their owner" in found["claims"].found
    assert client.operations.health(stale=0).passed() is False
    dot = "." if client.url.startswith("postgres") else "_"
    query(client.url, f"drop index holdfast{dot}idempotency_log_unfinished")
    found = {each.check: each for each in client.operations.health().findings}
    assert (found["indexes"].status, found["indexes"].found) == (
        "fail",
        "missing or invalid: idempotency_log_unfinished",
    )


def test_an_index_that_the_migrations_make_is_missed(postgres_url: str) -> None:
    made = query(
        postgres_url,
        "select indexname from pg_indexes where schemaname = 'holdfast' and tablename in ('idempotency_log', 'wal', "
        "'outbox', 'review') and not (indexname in ('outbox_pkey', 'review_pkey'))",
    )
    assert {name for (name,) in made} == NEEDED


def test_a_look_at_a_long_log_reads_a_part_of_it(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast._sync.primitives import operation_log

    monkeypatch.setattr(operation_log, "ENOUGH", 500)
    monkeypatch.setattr(operation_log, "LATEST", 100)
    query(
        postgres_url,
        "insert into holdfast.idempotency_log (idem_key, status, created_at, updated_at, wal_pointer, attempt, fence, "
        "label, effect_started, failures, result, expires_at) select i::text, 'success', now(), now() - "
        "make_interval(hours => i), '1:x', 1, 0, 'x', true, 0, 'x', now() + interval '1 day' from generate_series(1, "
        "20000) i",
    )
    query(postgres_url, "vacuum analyze holdfast.idempotency_log")
    counted = "coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)"
    asked = f"select {counted} from pg_stat_user_tables where relname = 'idempotency_log'"
    [(before,)] = query(postgres_url, asked)
    with holdfast.Client(postgres_url) as client:
        assert client.operations.expire() == 0
        assert len(client.operations.list(most=5)) == 5
        assert client.operations.get("nobody's") is None
        found = {each.check: each.found for each in client.operations.health().findings}
    assert found["growth"].startswith("20000 operations, 23 of them since yesterday")

    def read() -> int:
        return int(query(postgres_url, asked)[0][0]) - int(before)

    eventually(lambda: read() > 0, "the session of the client is over, and what it did is counted")
    assert read() < 2000, "of 20,000"


def test_the_latest_is_listed_first_although_a_clock_says_the_same_of_two(client: Any) -> None:
    """That of SQLite has milliseconds, and an operation takes less."""
    before = [each.label for each in client.operations.list()]
    if client.url.startswith("sqlite"):
        change(client.url, "update {log} set updated_at = 1.5")
    assert [each.label for each in client.operations.list()] == before == ["half done", "failed", "second try", "done"]


def test_what_waits_for_somebody_is_listed_and_a_reset_is_an_answer(client: Any) -> None:
    with pytest.raises(holdfast.OperationFailed, match="up for review"):
        client.operation("failed", max_attempts=1).run(lambda: 1)
    [review] = client.reviews.list()
    assert (review.label, review.reason, review.key) == ("failed", "attempts", client.operations.get("failed").key)
    assert {each.check: each.status for each in client.operations.health().findings}["failures"] == "warn"
    client.operations.reset("failed", actor="jane", reason="mended")
    assert client.reviews.list() == []
    assert client.operation("failed", max_attempts=1).run(lambda: 1).result == 1
    assert problems(client) == set()


@pytest.mark.parametrize("wrong", [7, datetime(2026, 1, 1), "now"])  # noqa: DTZ001
def test_a_wrong_moment_is_named(sqlite_url: str, wrong: Any) -> None:
    with holdfast.Client(sqlite_url) as client:
        for call in (
            lambda: client.operations.replay(since=wrong),
            lambda: client.operations.verify(since=wrong),
            lambda: client.operations.archive(wrong, print),
        ):
            with pytest.raises((TypeError, ValueError), match=r"^(since|before) must"):
                call()
        with pytest.raises(TypeError, match="before must be a datetime, not NoneType"):
            client.operations.archive(None, print)  # type: ignore[arg-type]


def test_a_sovereign_dataset_is_locked_whole_and_marked(client: Any) -> None:
    parts: dict[str, Any] = {"pipeline": "etl", "task": "load", "dataset": "graves", "operation": "upsert"}
    with pytest.raises(ValueError, match="dataset 'graves' is sovereign and is locked whole"):
        client.operation(holdfast.OperationKey(**parts, shards=4), sovereign=True).run(fail)
    key = holdfast.OperationKey(**parts)
    client.operation(key, sovereign=True, actor="jane", justification="the council agreed").run(lambda: 1)
    [state] = client.operations.replay(key)
    assert (state.sovereignty, client.operations.replay("done")[0].sovereignty) == (True, False)
    marks = {each.kind: json.loads(each.detail) for each in client.operations.history(key)}
    assert marks["sovereignty"] == {"dataset": "graves", "sovereignty_event": True}
    assert marks["claimed"] == {"actor": "jane", "justification": "the council agreed"}
    assert problems(client) == set()


def test_what_was_done_since_waits_for_nobody_and_what_somebody_undid_has_not_failed(client: Any) -> None:
    def failures() -> tuple[str, str]:
        [found] = [each for each in client.operations.health().findings if each.check == "failures"]
        return found.status, found.found

    with pytest.raises(holdfast.OperationFailed, match="up for review"):
        client.operation("failed", max_attempts=1).run(lambda: 1)
    [review] = client.reviews.list()
    client.operations.register("undo", rollback=lambda op: None)
    assert client.operation("failed", rollback="undo").run(lambda: 1).attempt == 2
    assert client.reviews.list() == []
    assert [each.id for each in client.reviews.list(status="done")] == [review.id]
    assert failures() == ("ok", "none")
    with pytest.raises(holdfast.Conflict, match="its operation has been done"):
        client.reviews.approve(review.id, actor="jane", reason="fine")
    client.operations.reset("failed", actor="jane", reason="not wanted")
    client.operation("other", rollback="undo").run(lambda: 1)
    client.operations.rollback("other", actor="jane", reason="not wanted")
    assert failures() == ("ok", "none")
    with pytest.raises(ValueError, match="broken"):
        client.operation("another").run(fail)
    assert failures() == ("ok", "1 have failed and none waits for a review")
    assert problems(client) == set()


def test_what_is_to_be_decided_anew_is_asked_anew(client: Any) -> None:
    """The question of before stands no more, for the operation was done; and is done again, for its result expired."""
    mine, others = (
        holdfast.OperationKey(pipeline="p", task="t", dataset="parcels", operation="upsert", version=version)
        for version in ("1", "2")
    )
    numbers = []
    for result in ("first", "second"):
        with client.operation(others) as op:
            op.result = None
            with pytest.raises(holdfast.OperationInProgress, match="up for review"):
                client.operation(mine, when_locked="escalate").run(lambda: 0)
        numbers += [each.id for each in client.reviews.list(key=mine)]
        client.operations.reset(others, actor="jane", reason="once more")
        assert client.operation(mine, keep=0.001).run(lambda result=result: result).result == result
        assert client.reviews.list() == []
    assert len(set(numbers)) == 2
    assert [each.id for each in client.reviews.list(status="done", key=mine)] == numbers
