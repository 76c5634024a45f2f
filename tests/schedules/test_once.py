"""`holdfast once` and `holdfast schedules`: cron on many machines, and what operators see and order."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import holdfast
from tests.children import Child, eventually
from tests.cli.command import Running, at, call, invoke, printed

DAY = ("--every", "1d")
once = importlib.import_module("holdfast.cli.once")


def test_the_first_machine_runs_it_and_the_others_exit_with_0(either: str) -> None:
    with holdfast.Client(either) as client:
        client.migrate()
    command = ("sh", "-c", 'echo "for $HOLDFAST_SLOT, attempt $HOLDFAST_ATTEMPT"; echo problem >&2')
    first = call(*at(either, "once", "backup", *DAY, "--", *command))
    assert first.returncode == 0
    assert first.stdout.endswith("T00:00:00+00:00, attempt 1\n")
    assert first.stderr == "problem\n"
    second = call(*at(either, "once", "backup", *DAY, "--", *command))
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    shown = printed(*at(either, "schedules", "show", "backup"))
    assert "success" in shown
    assert "problem" in shown, "the output is kept"
    [run] = json.loads(printed(*at(either, "schedules", "show", "backup", "--json")))
    assert (run["status"], run["attempt"]) == ("success", 1)
    assert sorted(run["note"].splitlines())[1] == "problem"
    [schedule] = json.loads(printed(*at(either, "schedules", "--json")))
    assert (schedule["name"], schedule["every"], schedule["overdue"]) == ("backup", "86400 s", 0.0)


def test_a_failure_keeps_its_exit_code_and_is_tried_again_within_a_time(either: str, tmp_path: Path) -> None:
    with holdfast.Client(either) as client:
        client.migrate()
    flag = tmp_path / "repaired"
    command = ("--", "sh", "-c", f"echo trying; test -e {flag} || exit 3")
    for options in ((*DAY, "--at", "00:00"), ()):
        flag.unlink(missing_ok=True)
        name = "nightly" if options else "deploy"
        assert call(*at(either, "once", name, *options, *command)).returncode == 3
        if options:  # without --every, a step of a deployment, it is always tried again
            quiet = call(*at(either, "once", name, *options, *command))
            assert (quiet.returncode, quiet.stdout) == (0, "")
        assert "CommandFailed: exit code 3" in printed(*at(either, "schedules", "show", name))
        flag.touch()
        again = call(*at(either, "once", name, "--retry-within", "2d", *options, *command))
        assert (again.returncode, again.stdout) == (0, "trying\n")
        assert call(*at(either, "once", name, "--retry-within", "2d", *options, *command)).stdout == ""
    assert "Output of once:" in printed(*at(either, "schedules", "show", "deploy"))
    assert re.search("deploy .* done .* success", printed(*at(either, "schedules")))
    assert "1970" not in printed(*at(either, "schedules")) + printed(*at(either, "schedules", "show", "deploy"))


def test_a_command_dies_with_its_holdfast_and_the_next_caller_runs_it_again(either: str) -> None:
    with holdfast.Client(either) as client:
        client.migrate()
        with Running(*at(either, "once", "backup", *DAY, "--", "sh", "-c", "echo $$; exec sleep 600")) as running:
            eventually(lambda: running.text.endswith("\n"), "it runs")
            pid = int(running.text)
            skipped = call(*at(either, "once", "backup", *DAY, "--", "echo", "too"))
            assert (skipped.returncode, skipped.stdout) == (0, ""), "it runs elsewhere"
            running.process.kill()
            eventually(lambda: not is_alive(pid), "the kernel has killed it")
        again = "sh", "-c", "echo $HOLDFAST_ATTEMPT"
        eventually(lambda: call(*at(either, "once", "backup", *DAY, "--", *again)).stdout == "2\n", "it runs again")


def test_what_the_command_has_started_ends_when_the_lease_is_lost(tmp_path: Path) -> None:
    written = tmp_path / "pid"

    class Slot:
        time, attempt = datetime.now(UTC), 1

        @property
        def lost(self) -> bool:
            return written.exists() and written.read_text().endswith("\n")

        def note(self, text: str) -> None: ...

    slot: Any = Slot()
    assert once._execute(["sh", "-c", f"sleep 600 >&- 2>&- & echo $! > {written}; wait"], slot) == 128 + signal.SIGTERM
    pid = int(written.read_text())
    try:
        assert not is_alive(pid), "it has ended, or is waited for"
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_slot_that_was_left_or_ordered_runs_with_the_next_call(either: str) -> None:
    command = ("once", "backup", "--every", "1s", "--", "sh", "-c", "echo $HOLDFAST_ATTEMPT; exec sleep $PAUSE")
    with holdfast.Client(either) as client:
        client.migrate()
        with Running(*at(either, *command), PAUSE="600") as running:
            eventually(lambda: running.text.endswith("\n"), "it runs")
            left = client.schedules.list()[0].running[0]
            running.process.kill()

        def is_run_again() -> bool:
            later = call(*at(either, *command), PAUSE="0")
            assert later.returncode == 0
            return "2\n" in later.stdout

        eventually(is_run_again, "the slot that was left runs")
        eventually(lambda: call(*at(either, *command), PAUSE="0").stdout == "1\n", "later ones run")
        runs = {run.slot: run for run in client.schedules.runs("backup")}
        assert (runs[left].status, runs[left].attempt) == ("success", 2)
        ordered = client.schedules.run_now("backup", actor="jane", reason="a test")
        call(*at(either, *command), PAUSE="0")
        assert {run.slot: run.status for run in client.schedules.runs("backup")}[ordered] == "success"
        assert client.schedules.list()[0].running == ()


def test_a_command_with_another_timetable_runs_for_the_slot_that_is_due(either: str) -> None:
    with holdfast.Client(either) as client:
        client.migrate()
        assert call(*at(either, "once", "backup", *DAY, "--", "echo", "daily")).stdout == "daily\n"
        frequent = ("once", "backup", "--every", "0.1s", "--", "echo", "frequent")

        def runs_frequently() -> bool:
            """On a slow machine more than one slot falls due in one call."""
            return set(call(*at(either, *frequent)).stdout.splitlines()) == {"frequent"}

        assert runs_frequently()
        assert client.schedules.list()[0].every == "0.1 s"
        eventually(runs_frequently, "a later slot is due")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_output_is_bounded_and_a_command_that_is_missing_is_told(sqlite_url: str) -> None:
    long = ("sh", "-c", "i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done")
    assert call(*at(sqlite_url, "once", "long", "--", *long)).stdout.endswith("2999\n")
    [run] = json.loads(printed(*at(sqlite_url, "schedules", "show", "long", "--json")))
    assert len(run["note"]) == 10_000
    assert run["note"].endswith("2998\n2999\n")
    assert call(*at(sqlite_url, "once", "missing", "--", "no-such-command")).returncode == 127
    assert call(*at(sqlite_url, "once", "daily", *DAY, "--", "true")).returncode == 0
    for mistake, message in (
        (("--every", "1x", "n", "--", "true"), "'1x' is not a duration"),
        (("--every", "0 0 30 2 *", "n", "--", "true"), "never fires"),
        (("--every", "1d", "--at", "25:00", "n", "--", "true"), "--at must be a time of day"),
        (("--at", "03:00", "n", "--", "true"), "--at needs --every 1d"),
        (("--every", "0 3 * * *", "--zone", "Mars/Base", "n", "--", "true"), "'Mars/Base' is not known"),
        (("--zone", "Europe/Berlin", "n", "--", "true"), "is for a cron expression"),
        (("daily", "--", "true"), "schedule 'daily' has a timetable"),
        (("n", "true"), "put -- before the command"),
    ):
        done = invoke(*at(sqlite_url, "once", *mistake))
        assert done.returncode == 2
        assert message in done.stderr
    missing = invoke(*at(sqlite_url, "schedules", "show", "nothing"))
    assert (missing.returncode, missing.stderr.count("there is no schedule 'nothing'")) == (1, 1)


def test_operators_pause_and_order_runs_with_a_reason(either: str) -> None:
    program = """
        import sys, holdfast, holdfast.schedules.runner
        holdfast.schedules.runner.LOOK_EVERY = 0.3
        client = holdfast.Client(sys.argv[1])
        client.migrate()
        def work(slot):
            print("works", flush=True)
        client.schedule("report", 86400).run(work, signals=True)
    """
    said = ("--reason", "a test", "--actor", "jane")
    with Child(program, either) as child, holdfast.Client(either) as client:
        eventually(lambda: client.migrations.version() and client.schedules.list(), "it runs")
        printed(*at(either, "do", "schedule.pause", "report", *said))
        assert json.loads(printed(*at(either, "schedules", "--json")))[0]["paused"] == "by jane: a test"
        assert "is paused already" in invoke(*at(either, "do", "schedule.pause", "report", *said)).stderr
        printed(*at(either, "do", "schedule.run", "report", *said))
        child.expect("works")
        printed(*at(either, "do", "schedule.resume", "report", *said))
        assert "is not paused" in invoke(*at(either, "do", "schedule.resume", "report", *said)).stderr
        assert "is skipped" in printed(*at(either, "do", "schedule.skip", "report", *said))
        assert "was skipped already" in invoke(*at(either, "do", "schedule.skip", "report", *said)).stderr
        wrong = invoke(*at(either, "do", "schedule.skip", "report", "--slot", "2027-01-01T00:00:01Z", *said))
        assert "has no slot at" in wrong.stderr
        entries = [(entry.action, entry.subject, entry.actor, entry.outcome) for entry in client.audit.list()]
        assert ("schedule.pause", "report", "jane", "done") in entries
        assert ("schedule.run", "report", "jane", "done") in entries
        assert "no schedule 'other'" in invoke(*at(either, "do", "schedule.remove", "other", *said)).stderr
