"""The short version of `make chaos`: every scenario for a while, with the faults of a fixed seed, and the report."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.testing.checker import check
from holdfast.testing.history import Recorder, read
from proof.chaos.__main__ import main
from proof.chaos.contender import Belief, Contender, Job
from proof.chaos.contenders import Contenders
from proof.chaos.report import Run, as_html, as_json, as_text, status
from proof.chaos.scenario import Outcome, Scenario
from proof.chaos.services import Services
from proof.chaos.tables import Tables
from proof.chaos.targets import TARGETS, Target, available_targets
from tests.children import eventually
from tests.cli.runs import command_lines, state

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parent.parent.parent
FAULTS, WRITES, LIMIT = 3, 8, 400.0
"""A scenario runs until it has had so many faults and writes, but at most LIMIT seconds."""


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "proof.chaos", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.parametrize("lane", TARGETS)
def test_no_promise_is_broken_under_fire(lane: str, tmp_path: Path) -> None:
    if lane not in available_targets():
        pytest.skip("libfaketime is not installed: apt-get install faketime")
    kept, began = tmp_path / lane, time.monotonic()
    scenario = Scenario(lane, kept, 11)

    def enough() -> bool:
        if time.monotonic() - began > LIMIT:
            return True
        if scenario.faults.total() < FAULTS:
            return False
        return sum(file.read_text().count('"kind":"ok","op":"write"') for file in kept.glob("*.jsonl")) >= WRITES

    outcome = scenario.run(enough)
    run = Run(11, 0.5, "unknown", [outcome])
    if not outcome.ok:  # what happens once in a hundred runs is to be looked at: pytest keeps the last few folders
        copy = shutil.copytree(kept, Path(tempfile.mkdtemp(prefix="holdfast-chaos-failed-"), lane))
        pytest.fail(f"the history is in {copy}\n{as_text(run)}")
    [played] = json.loads(as_json(run))["lanes"]
    assert played["ok"]
    assert sum(played["faults"].values()) >= FAULTS
    assert played["figures"]["operations"]["write"]["ok"] >= WRITES
    assert check(kept).ok  # a kept history can be checked again
    page = as_html(run)
    assert page.count('class="grant"') == played["figures"]["grants"]
    assert not re.search(r"src=|href=|url\(", page), "it needs something from elsewhere"


def test_the_command_reports_what_it_played(tmp_path: Path) -> None:
    """So short a run may have had nothing to count: then it says so."""
    done = chaos("--minutes", "0.02", "--seed", "11", "--lane", "sqlite", "--folder", str(tmp_path), "--json")
    assert done.returncode in (0, 3), done.stderr
    report = json.loads(done.stdout)
    assert (report["seed"], [each["lane"] for each in report["lanes"]]) == (11, ["sqlite"])
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert "sqlite" in (tmp_path / "report.html").read_text()
    assert [each for each in report["lanes"][0]["verdicts"] if each["violations"]] == []


def test_a_folder_that_holds_a_history_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "sqlite").mkdir()
    done = chaos("--minutes", "0.01", "--lane", "sqlite", "--folder", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "earlier run" in done.stderr


@pytest.mark.parametrize("minutes", ["-1", "0", "nan", "inf", "soon"])
def test_a_length_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], minutes: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--minutes", minutes])
    assert f"must be a number above 0, not {minutes}" in capsys.readouterr().err


def test_a_kind_of_fault_that_a_lane_does_not_have_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = chaos("--minutes", "0.01", "--lane", "sqlite", "--faults", "flood")
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == [], "a run that never was leaves no folder"
    assert "has no fault of these kinds; it has force, fork, kill, pause, writer" in done.stderr
    assert "Traceback" not in done.stderr


def played(lane: str, folder: Path, over: Callable[[float], bool], **options: Any) -> Outcome:
    """Until it is over, by the seconds that have passed."""
    began = time.monotonic()
    return Scenario(lane, folder, 7, **options).run(lambda: over(time.monotonic() - began))


def test_it_would_be_noticed_if_protect_did_not_hold_the_row(tmp_path: Path) -> None:
    """Holdfast with one word changed in its functions: FOR KEY SHARE lets a takeover through."""
    weaken = """
    do $$ declare each text; begin
        for each in select pg_get_functiondef(p.oid) from pg_proc p where p.pronamespace = 'holdfast'::regnamespace
                       and p.prosrc ~* 'for share' loop
            execute regexp_replace(each, 'for share', 'for key share', 'gi');
        end loop;
    end $$
    """
    overtaken = """
    select count(*) from proof_takeover t
     where older <> (select count(*) from proof_write w where w.name = t.name and w.fence < t.fence)
    """
    targets: list[Target] = []

    def prepare(target: Target) -> None:
        target.query(weaken)
        targets.append(target)

    def noticed(seconds: float) -> bool:
        time.sleep(0.5)  # a look is a new session
        return seconds > LIMIT or targets[0].query(overtaken) != [(0,)]

    outcome = played("postgres", tmp_path / "kept", noticed, ttl=0.4, size=6, kinds=["pause"], prepare=prepare)
    assert not outcome.error
    assert outcome.report is not None
    assert "C3" in outcome.report.violated
    assert status([outcome]) == 1


def test_relays_shards_and_reconcilers_break_no_promise_under_fire(tmp_path: Path) -> None:
    services, began = Services(tmp_path, 11), time.monotonic()
    outcome = services.run(lambda: services.faults.total() >= FAULTS or time.monotonic() - began > LIMIT)
    assert outcome.ok, as_text(Run(11, 0.5, "unknown", [outcome]))
    assert outcome.faults.total() >= FAULTS
    assert outcome.report is not None
    assert {each.check for each in outcome.report.verdicts} >= {
        "relays skip nothing", "the reconciler keeps records true", "watches skip nothing",
        "no superseded holder commits",
    }  # fmt: skip
    assert "the reconciler keeps records true" in as_html(Run(11, 0.5, "unknown", [outcome]))


def test_it_would_be_noticed_if_numbers_came_from_the_sequence_alone(tmp_path: Path) -> None:
    """A dump restores it to its last number, which the copy of a running server does not."""
    numbers: list[Target] = []

    def prepare(target: Target) -> None:
        target.query(
            "create or replace function holdfast.draw(counter regclass) returns bigint language sql as "
            "'select nextval(counter)'"
        )
        numbers.append(target)

    def repeated(seconds: float) -> bool:
        time.sleep(0.5)
        grants = "select count(*) from proof_grant group by fence having count(*) > 1"
        granted = [event.fence for event in read(kept) if event.op == "acquire" and event.kind == "ok"]
        return seconds > LIMIT or len(granted) > len({*granted}) or bool(numbers[0].query(grants))

    kept = tmp_path / "kept"
    outcome = played("restores", kept, repeated, ttl=0.4, size=6, kinds=["restore_dump"], prepare=prepare)
    assert not outcome.error
    assert outcome.report is not None
    assert "C1" in outcome.report.violated
    assert status([outcome]) == 1


def test_it_would_be_noticed_if_a_forked_child_had_its_parents_grant(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.Client(sqlite_url) as client, client.lease("a", ttl=600) as grant:
        job = Job(sqlite_url, str(tmp_path), "w", ["a"], 600.0, 1, sane_clocks=True)
        contender = Contender(job, 1, client, threading.Event(), threading.Event())
        contender._fork(grant)
        monkeypatch.setattr(Tables, "lets_in", lambda *_: True)
        with pytest.raises(RuntimeError, match="a forked child was let into a transaction under its parent's grant"):
            contender._fork(grant)


def test_a_contender_that_falls_over_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a contender did not expect is a finding, not noise: a run of the dead must not be a success."""
    monkeypatch.setattr("proof.chaos.contenders.FAILPOINTS", ["after:no_such_statement=kill"])
    kept = tmp_path / "kept"

    def replaced(seconds: float) -> bool:
        """There is a fifth contender: one of the four has fallen over, for nobody is killed."""
        return seconds > LIMIT or any(kept.glob("contender-5-*"))

    outcome = played("sqlite", kept, replaced, kinds=["force"])
    assert not outcome.ok
    assert "ended with 3" in outcome.error
    assert status([outcome]) == 3
    assert "no_such_statement" in (kept / "contenders.log").read_text()


@pytest.mark.parametrize(("action", "fell"), [("kill", False), ("stop", True)])
def test_whoever_was_born_to_be_killed_may_be_so_when_it_is_told_to_go_and_nobody_else(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, fell: bool
) -> None:
    """The end of a beat is the last that a contender says."""
    monkeypatch.setattr("proof.chaos.contenders.FAILPOINTS", [f"before:beat_end={action}"])
    with Contenders([sqlite_url], Job("", str(tmp_path), "", ["a"], 60.0, 1, sane_clocks=True), 1) as contenders:
        [pid] = contenders.pids()
        eventually(lambda: '"ok"' in "".join(each.read_text() for each in tmp_path.glob("*.jsonl")), "it held a lease")
        contenders.dismiss()
        if action == "stop":
            eventually(lambda: state(pid) == "T", "it has come to its end")
            os.kill(pid, signal.SIGKILL)
        assert contenders.wait() == []
    assert contenders.crashed == ([f"{pid} ended with -9 after dismiss()"] if fell else [])
    assert contenders.failpoints.total() == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_to_end_it_leaves_no_process_and_no_folder(tmp_path: Path, number: signal.Signals) -> None:
    """As a terminal does it, to the whole group."""
    command = [sys.executable, "-m", "proof.chaos", "--minutes", "5", "--lane", "sqlite", "--folder"]
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    kept = tmp_path / "kept" / "sqlite"
    with subprocess.Popen([*command, str(kept.parent)], cwd=ROOT, start_new_session=True, env=environment) as process:
        eventually(lambda: list(kept.glob("contender-*.jsonl")), "contenders are at work")
        os.killpg(process.pid, number)
        assert process.wait(60) == 130
    assert list((tmp_path / "temporary").iterdir()) == []
    eventually(lambda: str(kept) not in command_lines(), "every contender is gone")


class HeldUp:
    """A grant whose holder is held up for five seconds whenever it has looked at its trust."""

    name, fence, lost = "a", 7, False

    def __init__(self) -> None:
        self.time, self.trusted_until = 100.0, 103.0

    def remaining(self) -> float:
        left = max(0.0, self.trusted_until - self.time)
        self.time += 5.0
        return left


@pytest.mark.parametrize("last", ["look", "end"])
def test_no_belief_is_recorded_past_the_end_of_its_trust_by_a_worker_that_is_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """The checker would see two who believe at once, and neither was wrong."""
    grant = HeldUp()
    monkeypatch.setattr("proof.chaos.contender.now", lambda: grant.time)
    with Recorder(tmp_path, "w") as record:
        belief = Belief(record)
        belief.begin(grant)
        grant.time = 101.0
        getattr(belief, last)()
        belief.end()
    spans = [(event.data["from"], event.data["until"], event.data["sure"]) for event in read(tmp_path)]
    assert spans[0] == (100.0, 101.0, True)
    assert max(until for _, until, _ in spans) <= 103.0
