"""holdfast ops, as a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.children import eventually, query
from tests.cli.command import ask, at, call, columns_of, invoke, on_terminal, printed, valid
from tests.operations.logs import change

BY_JANE = ("--actor", "jane", "--reason", "the bank says no")
REGISTER = """
def register(client):
    client.operations.register("unpublish", rollback=undo)

def undo(op):
    open("undone", "a").write(f"{op.checkpoints}\\n")
"""


def fail() -> None:
    raise ValueError("broken\x1b[31m")


def die(op: Any) -> None:
    op.checkpoint("draft", 42)
    raise KeyboardInterrupt


@pytest.fixture
def filled(sqlite_url: str) -> str:
    return fill(sqlite_url)


def fill(url: str) -> str:
    """A database with one that was done, one that failed, one that was left half done."""
    key = holdfast.OperationKey(pipeline="etl", task="load", dataset="parcels", operation="upsert")
    with holdfast.Client(url) as client:
        client.operation("charge:42").run(lambda: {"id": 7})
        with pytest.raises(ValueError, match="broken"):
            client.operation(key).run(fail)
        client.operations.register("unpublish", rollback=die)
        with pytest.raises(KeyboardInterrupt):
            client.operation("publish:7", rollback="unpublish").run(die)
    return url


def test_operations_are_listed(filled: str) -> None:
    rows = columns_of(ask(*at(filled, "ops", "ls")))
    assert [(row["operation"], row["status"], row["attempt"]) for row in rows] == [
        ("publish:7", "partial", "1"), ("etl/load parcels upsert", "failure", "1"), ("charge:42", "success", "1"),
    ]  # fmt: skip
    assert rows[1]["error"] == r"ValueError: broken\x1b[31m"
    assert rows[1]["dataset"] == "parcels"
    records = valid(
        "ops-ls", printed(*at(filled, "ops", "ls", "--json", "--status", "failure", "--dataset", "parcels"))
    )
    assert [(each["label"], each["error"]["type"]) for each in records] == [("etl/load parcels upsert", "ValueError")]
    assert valid("ops-ls", printed(*at(filled, "ops", "ls", "--json", "--status", "running"))) == []
    assert invoke(*at(filled, "ops", "ls", "--status", "running")).stderr == "no operation is running\n"
    assert len(valid("ops-ls", printed(*at(filled, "ops", "ls", "--json", "--limit", "1")))) == 1
    assert "publish:7" in on_terminal(*at(filled, "ops", "ls"), columns=40)


def test_one_is_shown_with_its_entries_by_text_or_by_digits(either: str) -> None:
    filled = fill(either)
    document = valid("ops-show", printed(*at(filled, "ops", "show", "charge:42", "--json")))
    assert (document["label"], document["status"], document["entries"][-1]["hash"]) == (
        "charge:42", "success", document["pointer"].partition(":")[2])  # fmt: skip
    assert valid("ops-show", printed(*at(filled, "ops", "show", document["key"], "--json"))) == document
    text = printed(*at(filled, "ops", "show", "publish:7"))
    assert "partial" in text
    assert '{"name":"draft","value":42}' in text
    done = invoke(*at(filled, "ops", "show", "nobody's"))
    assert (done.returncode, done.stderr) == (1, 'holdfast: there is no operation "nobody\'s"\n')


def test_the_result_is_shown_as_far_as_it_is_kept(either: str) -> None:
    results: dict[str, Any] = {"none": None, "bytes": b"\x00\xff", "long": ["x" * 1000], "text": "é"}
    with holdfast.Client(either) as client:
        for key, result in results.items():
            client.operation(key).run(lambda result=result: result)
        client.operation("old", keep=0.001).run(lambda: 7)
        eventually(lambda: client.operations.expire() == 1, "its time is over")
        with pytest.raises(ValueError, match="broken"):
            client.operation("failed").run(fail)

    def shown(key: str) -> str | None:
        rows = {
            row["what"]: row["value"] for row in columns_of(printed(*at(either, "ops", "show", key)).split("\n\n")[0])
        }
        return rows.get("result")

    assert [shown(key) for key in ("none", "bytes", "text", "old", "failed")] == [
        "null", "0x00ff", '"\\u00e9"', "not kept", None,
    ]  # fmt: skip
    whole = json.dumps(results["long"])
    assert shown("long") == whole
    terminal = "".join(on_terminal(*at(either, "ops", "show", "long"), columns=200).split())
    assert "…(1004characters;--jsonprintsall)" in terminal
    assert whole not in terminal
    for key, expected in (("none", (None, True)), ("bytes", ("00ff", True)), ("long", (["x" * 1000], True)),
                          ("old", (None, False)), ("failed", (None, False))):  # fmt: skip
        document = valid("ops-show", printed(*at(either, "ops", "show", key, "--json")))
        assert (document["result"], document["kept"]) == expected
    log = "holdfast_idempotency_log" if either.startswith("sqlite") else "holdfast.idempotency_log"
    query(either, f"update {log} set result_hash = '{'0' * 64}' where label = 'none'")
    assert shown("none") == "unknown: its entries name another one; run holdfast ops verify"


def test_a_key_is_found_by_its_first_digits(either: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(REGISTER)
    filled = fill(either)
    with holdfast.Client(filled) as client:
        digests = {each.label: each.key for each in client.operations.list()}
        one, other = "beef" + "0" * 60, "beef" + "1" * 60
        for digest in (one, other, "beef2" + "2" * 59, "beef2"):
            client.operation(digest).run(int)
    charge, publish = digests["charge:42"], digests["publish:7"]
    prefix = charge[:8]
    document = valid("ops-show", printed(*at(filled, "ops", "show", prefix, "--json")))
    assert (document["key"], document["label"]) == (charge, "charge:42")
    [state] = valid("ops-replay", printed(*at(filled, "ops", "replay", prefix, "--json")))
    assert state["operation"] == charge
    assert printed(*at(filled, "ops", "verify", prefix)).startswith("1 operations, 5 entries: sound")
    assert charge in printed(*at(filled, "ops", "export", prefix))
    assert "operation 'publish:7', partial" in ask(
        *at(filled, "ops", "rollback", publish[:8], *BY_JANE), "--with", "shop:register", cwd=tmp_path
    )
    assert "'charge:42', success in attempt 1, may run again" in printed(*at(filled, "ops", "reset", prefix, *BY_JANE))
    with holdfast.Client(filled) as client, pytest.raises(KeyboardInterrupt):
        client.operation("charge:42").run(die)
    assert "is done with the result 7" in printed(*at(filled, "ops", "complete", prefix, "--result", "7", *BY_JANE))
    done = invoke(*at(filled, "ops", "show", "beef"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "several operations begin with beef; give more digits" in done.stderr
    assert all(f"  {each}  success  {each}" in done.stderr for each in (one, other))
    assert json.loads(printed(*at(filled, "ops", "show", "beef2", "--json")))["label"] == "beef2", "a key goes first"
    for text in ("beef3", charge[:3], prefix.upper() + "Z"):
        done = invoke(*at(filled, "ops", "reset", text, *BY_JANE))
        assert (done.returncode, f"there is no operation '{text}'" in done.stderr) == (1, True)


def test_a_refused_operation_goes_before_a_prefix(filled: str) -> None:
    """It was never begun, so it has a review and no row: a reset of it must not reach another operation."""
    with holdfast.Client(filled) as client:
        client.operation("cafe" + "0" * 60).run(int)
    policy = holdfast.governance.Policy({}, lambda context: holdfast.governance.Review("who has seen it?"))
    with holdfast.Client(filled, policy=policy) as client, pytest.raises(holdfast.PolicyDenied):
        client.operation("cafe").run(int)
    text = printed(*at(filled, "ops", "reset", "cafe", *BY_JANE))
    assert "operation 'cafe', which was refused before it began, may run again" in text


def test_the_log_is_replayed_and_nothing_is_executed(filled: str) -> None:
    [state] = valid("ops-replay", printed(*at(filled, "ops", "replay", "charge:42", "--json")))
    assert (state["status"], state["result"], state["attempt"]) == ("success", {"id": 7}, 1)
    assert len(valid("ops-replay", printed(*at(filled, "ops", "replay", "--since", "600", "--json")))) == 3
    assert {row["status"] for row in columns_of(printed(*at(filled, "ops", "replay")))} == {
        "success",
        "failure",
        "partial",
    }
    for command in ("replay", "verify"):
        done = invoke(*at(filled, "ops", command, "nobody's"))
        assert (done.returncode, "there is no operation" in done.stderr) == (1, True)
        assert invoke(*at(filled, "ops", command, "charge:42", "--since", "0.001")).returncode == 0, "it is just older"
    done = invoke(*at(filled, "ops", "replay", "--since", "1e300"))
    assert (done.returncode, "--since 1e+300 is too large" in done.stderr) == (2, True)


def test_the_log_is_proven_and_what_was_changed_is_told(filled: str, tmp_path: Path) -> None:
    document = valid("ops-verify", printed(*at(filled, "ops", "verify", "--json")))
    assert (document["passed"], document["operations"]) == (True, 3)
    assert [each["what"] for each in document["problems"]] == ["unpaired"]
    assert printed(*at(filled, "ops", "verify", "charge:42")).startswith("1 operations, 5 entries: sound")
    done = invoke(*at(filled, "ops", "verify", "charge:43"))
    assert (done.returncode, done.stderr) == (1, "holdfast: there is no operation 'charge:43'\n")
    file = tmp_path / "old.jsonl"
    printed(*at(filled, "do", "wal.archive", "0", str(file), *BY_JANE))
    assert len(file.read_text().splitlines()) == 2
    assert printed(*at(filled, "ops", "verify", "--archive", str(file))).endswith("sound\n")
    file.write_text(file.read_text().replace("ValueError", "TypeError"))
    assert "tampered" in invoke(*at(filled, "ops", "verify", "--archive", str(file))).stdout
    change(filled, "update {wal} set entries = replace(entries, '42', '43')")
    done = invoke(*at(filled, "ops", "verify", "--json"))
    assert done.returncode == 1
    assert "tampered" in {each["what"] for each in valid("ops-verify", done.stdout)["problems"]}
    assert invoke(*at(filled, "ops", "verify", "--archive", str(tmp_path / "none"))).returncode == 2


def test_the_health_of_the_log_has_an_exit_code(filled: str) -> None:
    document = valid("ops-health", printed(*at(filled, "ops", "health", "--json")))
    assert {each["check"]: each["status"] for each in document["findings"] if each["status"] != "ok"} == {
        "claims": "warn"
    }
    assert invoke(*at(filled, "ops", "health", "--strict")).returncode == 1
    done = invoke(*at(filled, "ops", "health", "--stale", "0"))
    assert done.returncode == 1
    assert "holdfast ops recover" in done.stdout


def test_a_reset_is_governed_and_history_stays(filled: str) -> None:
    assert "operation.reset done; recorded: jane" in printed(*at(filled, "ops", "reset", "charge:42", *BY_JANE))
    with holdfast.Client(filled) as client:
        outcome = client.operation("charge:42").run(lambda: {"id": 8})
        assert (outcome.result, outcome.replayed, outcome.attempt) == ({"id": 8}, False, 2)
        kinds = [each.kind for each in client.operations.history("charge:42")]
        assert kinds.count("success") == 2
        [reset] = [each for each in client.operations.history("charge:42") if each.kind == "reset"]
        assert json.loads(reset.detail) == {"actor": "jane", "reason": "the bank says no"}
        assert client.operations.verify().passed
    assert invoke(*at(filled, "ops", "reset", "nobody's", *BY_JANE)).returncode == 1
    assert invoke(*at(filled, "ops", "reset", "charge:42")).returncode == 2


def test_an_interrupted_one_that_did_happen_is_completed(either: str) -> None:
    filled = fill(either)
    done = invoke(*at(filled, "ops", "complete", "publish:7", "--result", "{id: 7}", *BY_JANE))
    assert (done.returncode, "result must be JSON" in done.stderr) == (2, True)
    text = printed(*at(filled, "ops", "complete", "publish:7", "--result", '{"id": 7}', *BY_JANE))
    assert text == (
        "operation 'publish:7', partial in attempt 1, is done with the result {\"id\":7}\n"
        "operation.complete done; recorded: jane: the bank says no\n"
    )
    with holdfast.Client(filled) as client:
        assert client.operation("publish:7").run(dict).result == {"id": 7}
        assert client.operations.verify().passed
    for key, why in (("publish:7", "has succeeded already"), ("nobody's", "there is no operation")):
        done = invoke(*at(filled, "ops", "complete", key, *BY_JANE))
        assert (done.returncode, why in done.stderr) == (1, True)


def test_what_was_left_half_done_is_recovered_with_functions_of_the_users(filled: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(REGISTER)
    done = call(*at(filled, "ops", "recover"), cwd=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (1, "0 recovered, 1 still interrupted")
    [row] = columns_of(done.stdout)
    assert (row["operation"], row["status"]) == ("publish:7", "partial")
    assert row["why"] == "its rollback 'unpublish' is not registered here"
    done = call(*at(filled, "ops", "recover", "--json"), cwd=tmp_path)
    [left] = valid("ops-recover", done.stdout)
    assert (done.returncode, left) == (1, {**left, "label": "publish:7", "status": "partial", "reason": row["why"]})
    done = call(*at(filled, "ops", "recover", "--with", "shop:register"), cwd=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (0, "1 recovered, 0 still interrupted")
    [row] = columns_of(done.stdout)
    assert (row["status"], row["why"], row["key"]) == ("undone", "its rollback 'unpublish' was called", left["key"])
    done = call(*at(filled, "ops", "recover", "--json"), cwd=tmp_path)
    assert (done.returncode, valid("ops-recover", done.stdout)) == (0, [])
    assert (tmp_path / "undone").read_text() == "{'draft': 42}\n"
    for wrong in ("shop", "shop:nothing"):
        assert call(*at(filled, "ops", "recover", "--with", wrong), cwd=tmp_path).returncode == 2


def test_one_is_rolled_back_with_the_function_that_is_registered_for_it(filled: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(REGISTER)
    asked = at(filled, "ops", "rollback", "publish:7", *BY_JANE)
    assert call(*asked, cwd=tmp_path).returncode == 1
    with holdfast.Client(filled) as client:
        pointer = client.operations.find("publish:7").pointer
    output = ask(*at(filled, "ops", "rollback", pointer, *BY_JANE), "--with", "shop:register", cwd=tmp_path)
    assert "operation 'publish:7', partial in attempt 1, is undone by unpublish" in output
    assert (tmp_path / "undone").read_text() == "{'draft': 42}\n"
    done = call(*at(filled, "ops", "rollback", pointer, *BY_JANE), "--with", "shop:register", cwd=tmp_path)
    assert (done.returncode, "is not the latest any more" in done.stderr) == (1, True)
    assert call(*at(filled, "ops", "rollback", "charge:42", *BY_JANE)).returncode == 1


def test_a_file_that_cannot_be_read_is_named(filled: str, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(b"\xff\xfe\n")
    for option in ("--lineage", "--archive"):
        for name, why in (("missing", "No such file"), ("noise", "UTF-8")):
            done = invoke(*at(filled, "ops", "verify", option, str(tmp_path / name)))
            assert done.returncode == 2
            assert why in done.stderr
            assert "Errno" not in done.stderr
            assert "codec" not in done.stderr
