"""holdfast relay, and holdfast ops verify --lineage, as processes of their own."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

import holdfast
from tests.children import eventually
from tests.cli.command import Running, ask, at, call, columns_of, invoke, printed, valid

PICKY = """
class Picky:
    def publish(self, events):
        if any(event.label == "bad" for event in events):
            raise ValueError("not that one")

sink = Picky()

def broken():
    raise RuntimeError("no such server")
"""


@pytest.fixture
def filled(sqlite_url: str) -> str:
    with holdfast.Client(sqlite_url) as client:
        for name in ("a", "bad", "b"):
            key = holdfast.OperationKey(
                pipeline="etl", task="load", dataset="parcels", operation="upsert", version=name
            )
            client.operation(name if name == "bad" else key).run(lambda op: op.emit("topic", 1))
    return sqlite_url


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True)


def test_what_was_published_is_compared_with_the_log(filled: str, tmp_path: Path) -> None:
    file = tmp_path / "lineage.jsonl"
    assert "9 events published" in call(*at(filled, "relay", "run", "r", f"jsonl:{file}", "--once")).stderr
    published = lines(file)
    assert len(published) == 9
    verify = at(filled, "ops", "verify", "--lineage", str(file))
    assert "3 operations, 9 events: sound" in printed(*verify)

    def found(text: list[str], *more: str) -> dict[str, int]:
        file.write_text("".join(text), encoding="utf-8")
        done = invoke(*verify, *more, "--json")
        about = valid("ops-verify", done.stdout)
        assert done.returncode == (0 if about["passed"] else 1)
        kinds = [each["what"] for each in about["problems"]]
        return {kind: kinds.count(kind) for kind in kinds}

    assert found(published + published[2:5]) == {}, "twice is once"
    assert found(published[1:]) == {"missing": 1}
    assert found([published[2], *published[:2], *published[3:]]) == {"reordered": 2}
    assert found([*published[3:6], *published[:3], *published[6:]]) == {}, "another dataset has an order of its own"
    assert found([*published, published[0].replace('"attempt":1', '"attempt":2')]) == {"differs": 1}
    other = json.dumps({**json.loads(published[0]), "id": "6f2d2f2e-5f0b-5c0e-9a55-4b6f1f3c8f11"}) + "\n"
    assert found([*published, other]) == {"unknown": 1}
    with holdfast.Client(filled) as client:
        client.operation("later").run(lambda: 1)
    assert found(published) == {"missing": 2}
    assert found(published, "--relay", "r") == {"waiting": 2}
    for alone in (("--lineage",), ("--relay", "r"), ("--lineage", "--relay", "r")):
        done = invoke(*at(filled, "ops", "verify", *alone, "--json"))
        assert (done.returncode, [each["what"] for each in json.loads(done.stdout)["problems"]]) == (0, ["waiting"] * 2)
    assert invoke(*at(filled, "ops", "verify", "--lineage", "nowhere.jsonl")).returncode == 2
    for wrong in (("--relay", "x"), ("KEY",), ("--since", "5")):
        assert invoke(*verify, *wrong).returncode == 2
    file.write_text("nonsense\n", encoding="utf-8")
    done = invoke(*verify)
    assert (done.returncode, "line 1 is no event of a relay" in done.stderr) == (2, True)


def test_what_a_sink_refuses_is_shown_and_told_again(filled: str, tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(PICKY, encoding="utf-8")
    done = call(*at(filled, "relay", "run", "r", "picky:broken"), cwd=tmp_path)
    assert (done.returncode, "'picky:broken' is none: RuntimeError: no such server" in done.stderr) == (2, True)
    done = call(*at(filled, "relay", "run", "r", "picky:sink", "--once", "--tries", "1"), cwd=tmp_path)
    assert (done.returncode, "6 events published" in done.stderr) == (0, True), done.stderr
    [row] = columns_of(printed(*at(filled, "relay", "ls")))
    assert (row["relay"], row["published"], row["pending"], row["parked"]) == ("r", "6", "0", "3")
    [about] = valid("relay-ls", printed(*at(filled, "relay", "ls", "--json")))
    assert (about["entries"], about["holder"], about["problem"]) == (0, None, None)
    parked = valid("relay-parked", printed(*at(filled, "relay", "parked", "r", "--json")))
    assert [each["event"]["type"] for each in parked] == ["START", "MESSAGE", "COMPLETE"]
    assert {row["problem"] for row in columns_of(printed(*at(filled, "relay", "parked", "r")))} == {
        "ValueError: not that one"
    }
    checked = valid("ops-verify", invoke(*at(filled, "ops", "verify", "--relay", "r", "--json")).stdout)
    assert [each["what"] for each in checked["problems"]] == ["parked"] * 3
    assert invoke(*at(filled, "relay", "retry", "r", "unknown")).returncode == 1
    assert "3 events will be published again" in invoke(*at(filled, "relay", "retry", "r")).stderr
    output = ask(*at(filled, "relay", "run", "r", "jsonl:-", "--once")).splitlines()
    assert [json.loads(each)["type"] for each in output] == ["START", "MESSAGE", "COMPLETE"]
    assert invoke(*at(filled, "ops", "verify", "--relay", "r")).returncode == 0
    assert invoke(*at(filled, "relay", "rm", "r", "--reason", "done")).returncode == 0
    assert invoke(*at(filled, "relay", "rm", "r", "--reason", "done")).returncode == 1
    assert "there are no relays" in invoke(*at(filled, "relay", "ls")).stderr
    done = invoke(*at(filled, "ops", "verify", "--lineage"))
    assert (done.returncode, "no relay was ever run" in done.stderr) == (2, True)


def test_it_runs_until_it_is_told_to_stop(sqlite_url: str, tmp_path: Path) -> None:
    file = tmp_path / "lineage.jsonl"
    with (
        Running(*at(sqlite_url, "relay", "run", "r", f"jsonl:{file}", "--poll", "0.01")) as running,
        holdfast.Client(sqlite_url) as client,
    ):
        client.operation("a").run(lambda: 1)
        eventually(lambda: file.exists() and len(lines(file)) == 2, "it is told")
        assert running.end(signal.SIGTERM)[0] == 0


def test_sinks_that_are_none_are_refused(sqlite_url: str) -> None:
    for wrong in ("jsonl", "jsonl:", "nowhere:sink", "json:dumps", "json:nothing", "graph:nowhere"):
        done = invoke(*at(sqlite_url, "relay", "run", "r", wrong))
        assert (done.returncode, "sink" in done.stderr) == (2, True), (wrong, done.stderr)
