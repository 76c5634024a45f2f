"""The short version of `make cluster`: three faults of the leader of a Patroni cluster, and the judge on its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.testing.checker.checks import CheckVerdict
from holdfast.testing.history import DatabaseRows, Recorder, write_database
from proof.cluster import etcd, report
from proof.cluster.__main__ import main, run
from proof.cluster.run import FaultRecord, available_kinds
from proof.workload.verdicts import FinalState, judge
from proof.workload.worker import LAST_NOTE
from tests.children import PATIENCE, eventually

ROOT = Path(__file__).parents[2]
needs_etcd = pytest.mark.skipif(etcd.find() is None, reason="etcd is not installed: apt-get install etcd-server")
CHANGES = [("a", 1), ("a", 2), (LAST_NOTE, 3)]
GOOD = FinalState(CHANGES, ["e1", "e2"], parked=0, disagreeing=[], pruned=[], crashed=[])
FAULTS = [
    FaultRecord("kill", "SIGKILL", 1.0, 21.0, 22.5, 0.0),
    FaultRecord("kill", "SIGKILL", 60.0, 19.0, 20.0, 0.1),
    FaultRecord("clock", "+5 s", 99.0, None, 0.2, 0.0),
]


@needs_etcd
@pytest.mark.timeout(900)
def test_the_leader_of_a_cluster_fails_and_no_promise_is_broken(tmp_path: Path) -> None:
    """Three kinds that take seconds; a leader that is stopped or partitioned takes as long as one that is killed."""
    kinds = [kind for kind in ("switchover", "kill", "clock") if kind in available_kinds()]
    outcome = run(tmp_path, 7, 3, kinds, ttl=3.0)
    assert [each for each in outcome.verdicts if not each.ok] == []
    assert len(outcome.faults) == 3
    assert outcome.status == 0


@needs_etcd
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "proof.cluster", "--fault=switchover"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as process:
        eventually(lambda: len(list(tmp_path.glob("holdfast-postgres-*/server-*/log"))) >= 2, "the cluster starts")
        process.send_signal(number)
        assert process.wait(PATIENCE) == 130
    assert [file for folder in tmp_path.glob("holdfast-postgres-*") for file in folder.glob("server-*")] == []
    assert list(tmp_path.glob("holdfast-cluster-*")) == []
    eventually(lambda: not _processes_below(tmp_path), "no process is left")


def _processes_below(folder: Path) -> list[str]:
    """The command lines of processes that name a file in the folder."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            lines.append(line)
    return lines


def record_good_run(folder: Path) -> None:
    with Recorder(folder, "one") as one, Recorder(folder, "watcher") as watcher:
        one.info("fault", fault="clock", phase="begin")
        one.info("believe", "x", 1, **{"from": 0.0, "until": 1e12})
        one.info("believe", "x", 2, **{"from": 0.0, "until": 1e12})
        one.info("fault", fault="clock", phase="end")
        one.invoke("acquire", "x").ok(3)
        one.invoke("takeover", "x", 3).ok(older=0)
        one.invoke("write", "x", 3, key="k").ok()
        one.invoke("run", "op").ok(result="r")
        one.info("believe", "y", 3, **{"from": 1.0, "until": 2.0})
        one.info("reacquired", "x", after=0.1, bound=60.0)
        one.info("leftover", what="processes", count=0)
        one.invoke("cas", "a", old=None, value="v").ok(version=1)
        one.invoke("read", "a", value="v").ok()
        one.info("relayed", ids=["e1"])
        one.info("relayed", ids=["e1", "e2"])
        for id, version in CHANGES:
            watcher.info("watched", id, version=version, kind="updated")
    write_database(
        folder,
        DatabaseRows(
            [{"name": "x", "fence": 3, "key": "k"}],
            [{"name": "x", "fence": 3, "older": 0, "newest": None}],
            effects=[{"name": "op", "value": "r"}],
        ),
    )


def test_the_judge_accepts_a_good_run(tmp_path: Path) -> None:
    record_good_run(tmp_path)
    assert [each for each in judge(tmp_path, GOOD, ttl=3.0) if not each.ok] == []


@pytest.mark.parametrize(
    ("check", "state"),
    [
        ("no acknowledged change is lost", GOOD._replace(changes=CHANGES[1:])),
        ("watches skip nothing", GOOD._replace(changes=[("b", 1), *CHANGES])),
        ("watches skip nothing", GOOD._replace(changes=CHANGES[1:])),
        ("relays skip nothing", GOOD._replace(events=["e1", "e2", "e3"])),
        ("relays skip nothing", GOOD._replace(events=["e1"])),
        ("relays skip nothing", GOOD._replace(events=["e2", "e1"])),
        ("relays skip nothing", GOOD._replace(parked=1)),
        ("the reconciler keeps records true", GOOD._replace(disagreeing=["sb-1"])),
        ("the reconciler keeps records true", GOOD._replace(pruned=["sb-1"])),
        ("no worker crashes", GOOD._replace(crashed=["a worker ended with status 3"])),
    ],
)
def test_the_judge_finds_what_the_database_contradicts(check: str, state: FinalState, tmp_path: Path) -> None:
    record_good_run(tmp_path)
    assert check in [each.check for each in judge(tmp_path, state, ttl=3.0) if each.violations]


def test_a_watch_that_listed_the_objects_has_missed_only_what_is_newer(tmp_path: Path) -> None:
    record_good_run(tmp_path)
    with Recorder(tmp_path, "watcher") as watcher:
        watcher.info("listed", versions={"b": 5})
    for version, is_missing in ((5, False), (6, True)):
        verdicts = judge(tmp_path, GOOD._replace(changes=[("b", version), *CHANGES]), ttl=3.0)
        assert ("watches skip nothing" in [each.check for each in verdicts if each.violations]) == is_missing


def test_a_watch_that_was_killed_is_judged_by_what_it_returned(tmp_path: Path) -> None:
    record_good_run(tmp_path)
    with Recorder(tmp_path, "worker-1-watch") as watcher:
        watcher.info("watched", CHANGES[0][0], version=CHANGES[0][1], kind="updated")
    for killed, is_missing in ((["worker-1"], False), ([], True)):
        verdicts = judge(tmp_path, GOOD._replace(killed=killed), ttl=3.0)
        assert ("watches skip nothing" in [each.check for each in verdicts if each.violations]) == is_missing
    with Recorder(tmp_path, "worker-1-watch") as watcher:
        watcher.info("watched", "a", version=99, kind="updated")
    verdicts = judge(tmp_path, GOOD._replace(killed=["worker-1"]), ttl=3.0)
    assert "watches skip nothing" in [each.check for each in verdicts if each.violations]


def test_the_judge_finds_two_holders_a_fence_that_falls_and_a_watch_that_repeats(tmp_path: Path) -> None:
    record_good_run(tmp_path)
    with Recorder(tmp_path, "two") as two:
        two.invoke("acquire", "x").ok(2)
        two.info("believe", "y", 4, **{"from": 1.5, "until": 2.5})
        for _ in range(2):
            two.info("watched", "a", version=2, kind="updated")
        two.invoke("read", "a", value=None).ok()
    violated = {each.check for each in judge(tmp_path, GOOD, ttl=3.0) if each.violations}
    assert violated == {
        "fences rise", "leases are linearizable", "no two trust one lease at once", "objects are linearizable",
        "watches skip nothing",
    }  # fmt: skip


def test_the_report_has_a_table_and_a_picture() -> None:
    verdict = CheckVerdict.of("fences rise", 3, [])
    outcome = report.ClusterReport(7, "abc", 120.0, FAULTS, [verdict], {"total": 0.5, "longest": 0.1}, 0, [])
    text = report.as_text(outcome)
    assert "kill             2      20.0    21.0      21.2    22.5" in text
    assert "clock            1         -       -       0.2     0.2" in text
    assert json.loads(report.as_json(outcome))["summary"]["kill"]["pause"] == [21.2, 22.5]
    picture = report.as_svg(outcome)
    assert picture.count('class="pause"') == 3
    assert picture.count('class="leader"') == 2
    assert outcome.status == 0
    broken = verdict._replace(violations=["fence 2 came after 3"])
    assert outcome._replace(verdicts=[verdict, broken]).status == 1
    assert outcome._replace(verdicts=[CheckVerdict.of("fences rise", 0, [])]).status == 3


@pytest.mark.parametrize("option", ["--times=0", "--ttl=0.5", "--fault=flood"])
def test_wrong_arguments_are_refused_before_anything_starts(option: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([option])


@needs_etcd
def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(SystemExit, match="2"):
        main([f"--folder={tmp_path}"])
    assert "is not empty: name another folder" in capsys.readouterr().err


def test_without_etcd_it_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "find", lambda: None)
    assert main([]) == 0
    assert capsys.readouterr().err == "skipped: etcd is not installed: apt-get install etcd-server\n"
