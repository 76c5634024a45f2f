"""holdfast audit, slots and gates, on both engines."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import commands as governed
from holdfast.governance.audit import Audit
from tests.children import Child, eventually
from tests.cli.command import Running, ask, at, columns_of, invoke, printed, valid

LONG: dict[str, Any] = {"ttl": 600.0}
WAIT = """
    import sys, holdfast
    holdfast.Client(sys.argv[1]).slots("gpu", 2).claim(owner="late", timeout=None)
"""


def test_the_audit_tells_who_did_what_why_and_how_it_ended(either: str) -> None:
    with holdfast.Client(either) as client:
        client.lease("import", **LONG).acquire()
        done = governed.run(client, "lease.release", {"name": "import"}, actor="jane", reason="db1 is gone")
        with pytest.raises(governed.CommandRefused):
            governed.run(client, "lease.release", {"name": "import"}, actor="bob", reason="again")
        client.audit.begin("a.tool", "disk 7", actor="bob", reason="it is full")
        latest, _, refused, act, _, released = columns_of(ask(*at(either, "audit")))
        assert (latest["actor"], latest["action"], latest["subject"]) == ("bob", "a.tool", "disk 7")
        assert (latest["outcome"], latest["reason"], latest["fence"]) == ("not recorded", "it is full", "-")
        assert (refused["actor"], refused["outcome"]) == ("bob", "refused: lease 'import' is not held")
        assert (released["entry"], released["fence"]) == (str(done.entry), str(done.fence))
        assert (released["outcome"], released["reason"]) == ("done", "db1 is gone")
        assert (act["action"], act["subject"], act["reason"]) == ("lease_force_release", "import", "db1 is gone")
        assert valid("audit", printed(*at(either, "audit", "--json")))[0]["outcome"] is None
        [row] = valid("audit", printed(*at(either, "audit", "--json", "--action", "lease.release", "--actor", "jane")))
        assert (row["id"], row["reason"], row["outcome"]) == (done.entry, "db1 is gone", "done")
        assert row["detail"]["parameters"] == {"name": "import"}
        limited = valid("audit", printed(*at(either, "audit", "--json", "--limit", "2", "--actor", "jane")))
        assert [row["action"] for row in limited] == ["lease_force_release", "gate.window"]


def test_an_audit_with_nothing_to_show_says_so(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.lease("import").acquire()
    for more, text in (((), "the audit log is empty\n"), (("--actor", "x"), "no such entry is in the audit log\n")):
        done = invoke(*at(sqlite_url, "audit", *more))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", text)
    assert valid("audit", printed(*at(sqlite_url, "audit", "--json"))) == []
    wrong = invoke(*at(sqlite_url, "audit", "--actor", "a\nb"))
    assert (wrong.returncode, "actor must not contain control" in wrong.stderr) == (2, True)


def test_slots_are_listed_by_pool_with_owners_and_waiters(either: str) -> None:
    with holdfast.Client(either) as client:
        for number in (1, 2):
            client.slots("gpu", 2, **LONG).claim(owner=f"session-{number}")
        grant = client.slots("a:b", 20, **LONG).claim(owner="session-3")
        client.lease("import", **LONG).acquire()
        with Child(WAIT, either):
            eventually(lambda: client.leases.get("@slot:gpu:1").waiting == 1, "it waits")  # type: ignore[union-attr]
            other, first, second, idle = columns_of(ask(*at(either, "slots"), HOLDFAST_POOLS="gpu=2,idle=4"))
            pools = valid("slots", printed(*at(either, "slots", "--json"), HOLDFAST_POOLS="gpu=2,idle=4"))
        assert (other["pool"], other["slot"], other["owner"], other["in use"]) == ("a:b", "1", "session-3", "1")
        assert (other["fence"], other["waiting"]) == (str(grant.fence), "0")
        assert [(row["pool"], row["slot"], row["owner"]) for row in (first, second)] == [
            ("gpu", "1", "session-1"), ("gpu", "2", "session-2")]  # fmt: skip
        assert {(row["in use"], row["waiting"]) for row in (first, second)} == {("2 of 2", "1")}
        assert first["left"].endswith(" s")
        assert (idle["pool"], idle["slot"], idle["owner"], idle["in use"]) == ("idle", "-", "-", "0 of 4")
        assert [(pool["pool"], pool["capacity"], pool["in_use"], pool["waiting"]) for pool in pools] == [
            ("a:b", None, 1, 0), ("gpu", 2, 2, 1), ("idle", 4, 0, 0)]  # fmt: skip
        assert [slot["owner"] for slot in pools[1]["slots"]] == ["session-1", "session-2"]
        [pool] = valid("slots", printed(*at(either, "slots", "a:b", "--json")))
        assert pool["pool"] == "a:b"


def test_slots_beyond_nine_are_in_the_order_of_their_numbers(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        for _ in range(11):
            client.slots("gpu", 11, **LONG).claim()
        rows = columns_of(printed(*at(sqlite_url, "slots")))
    assert [row["slot"] for row in rows] == [str(number) for number in range(1, 12)]


def test_the_capacity_of_a_pool_is_that_of_holdfast_toml(sqlite_url: str, tmp_path: Path) -> None:
    (tmp_path / "holdfast.toml").write_text("[gateway]\npools = {gpu = 3}\n")
    [row] = columns_of(printed(*at(sqlite_url, "slots"), cwd=tmp_path))
    assert (row["pool"], row["in use"]) == ("gpu", "0 of 3")
    [row] = columns_of(printed(*at(sqlite_url, "slots"), cwd=tmp_path, HOLDFAST_POOLS="tpu=5"))
    assert (row["pool"], row["in use"]) == ("tpu", "0 of 5")
    (tmp_path / "holdfast.toml").write_text('[gateway]\npools = "gpu"\n')
    wrong = invoke(*at(sqlite_url, "slots"), cwd=tmp_path)
    assert (wrong.returncode, "a pool is NAME=SLOTS" in wrong.stderr) == (2, True)


def test_no_slot_is_told_beside_the_data_and_watch_sees_one_come_and_go(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.slots("tpu", 2, **LONG).claim()
        done = invoke(*at(sqlite_url, "slots", "gpu"))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "no slot is in use\n")
        with Running(*at(sqlite_url, "slots", "gpu", "--watch", "--every", "0.1", "--json")) as running:
            running.until_it_says("[]\n")
            with client.slots("gpu", 2, **LONG).claim(owner="session-1"):
                running.until_it_says("session-1")
            eventually(lambda: running.text.count("[]\n") == 2, "it is free again")
            assert running.end(signal.SIGINT) == (0, "")
        assert [len(valid("slots", line)) for line in running.text.splitlines()] == [0, 1, 0]


def test_gates_that_are_open_are_listed_with_actor_reason_and_end(either: str) -> None:
    with holdfast.Client(either) as client:
        done = invoke(*at(either, "gates"))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "no gate is open\n")
        client.gates.open("dot_config", seconds=7200, actor="jane", reason="new addresses")
        with client.gate("danger", actor="deploy", reason="rolling forward", **LONG) as grant:
            window, timed = columns_of(ask(*at(either, "gates")))
            rows = valid("gates", printed(*at(either, "gates", "--json")))
        assert (window["gate"], window["actor"], window["closes in"]) == ("danger", "deploy", "when done")
        assert (window["reason"], window["fence"]) == ("rolling forward", str(grant.fence))
        assert (timed["gate"], timed["actor"], timed["reason"]) == ("dot_config", "jane", "new addresses")
        assert timed["closes in"] in ("2 h 00 m", "1 h 59 m")
        assert [(row["name"], row["timed"], row["reason"]) for row in rows] == [
            ("danger", False, "rolling forward"), ("dot_config", True, "new addresses")]  # fmt: skip
        [left] = valid("gates", printed(*at(either, "gates", "--json")))
        assert left["name"] == "dot_config"


def test_watch_sees_a_gate_open_and_close(sqlite_url: str) -> None:
    """Opened for a time: the fence of a window is in the audit log a moment after the gate is open, and its reason is
    found by it."""
    with (
        holdfast.Client(sqlite_url) as client,
        Running(*at(sqlite_url, "gates", "--watch", "--every", "0.1")) as running,
    ):
        running.until_it_says("UTC: no gate is open\n\n")
        client.gates.open("danger", seconds=7200, actor="deploy", reason="rolling forward")
        running.until_it_says("rolling forward")
        client.gates.close("danger", actor="deploy", reason="rolled forward")
        eventually(lambda: running.text.count("no gate is open") == 2, "it is closed again")
        assert running.end(signal.SIGINT) == (0, "")
        assert running.text.count("UTC: ") == 3


def test_watch_shows_the_reason_of_a_window_once_it_is_known(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks when the gate is open and the audit log does not have its fence yet."""
    note = Audit.note
    with (
        holdfast.Client(sqlite_url) as client,
        Running(*at(sqlite_url, "gates", "--watch", "--every", "0.1")) as running,
    ):

        def note_later(audit: Audit, entry: int, *, fence: int) -> None:
            running.until_it_says("danger")
            assert "rolling forward" not in running.text
            note(audit, entry, fence=fence)

        monkeypatch.setattr(Audit, "note", note_later)
        with client.gate("danger", actor="deploy", reason="rolling forward", **LONG):
            running.until_it_says("rolling forward")
        assert running.end(signal.SIGINT) == (0, "")


def test_a_live_view_says_which_columns_are_hidden(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.lease("a lease with a rather long name, as people give them", **LONG).acquire()
        with Running(*at(sqlite_url, "ls", "--watch", "--every", "0.1"), columns=40) as running:
            running.until_it_says("see --wide")
            assert running.end(signal.SIGINT) == (0, "")
