"""The driver and the supervisors are killed: at every step that touches the disk or starts a process, and nothing runs
twice, is lost, or is left behind.

A process with everything imported forks drivers and supervisors that kill themselves at a given step: before the n-th
change of a file or process of a sandbox, as Python's own audit tells it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import holdfast
from holdfast.driver import reconcile_folder, store
from holdfast.driver.reconcile_folder import FolderReconciler
from holdfast.driver.sandbox import SUPERVISOR
from holdfast.driver.spec import parse
from holdfast.reconciler import ProcessDriver
from tests.children import PATIENCE, Child, eventually, pass_time, until
from tests.cli.command import call
from tests.driver.daemon import Daemon, reaches, runs, state, text

CRASHING = """
import json, os, re, signal, sys
from pathlib import Path
from holdfast.driver import daemon, supervisor
from holdfast.driver.daemon import DriverSettings

# A line is one write: a driver that kills itself must not leave half of one before the next line of its parent.
sys.stdout.reconfigure(write_through=False, line_buffering=True)
WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.fork", "subprocess.Popen"}

def changes(event, args):
    # between two of these nothing is done but reading; a folder is opened to be brought to the disk
    if event == "open" and (isinstance(args[0], int) or os.fsdecode(args[0]).endswith("lock")):
        return False
    return event in WRITES or (event == "open" and (args[0] == "." or args[2] & (os.O_WRONLY | os.O_RDWR)))

def crash_at(step, matters):
    me, seen = os.getpid(), 0
    def hook(event, args):
        nonlocal seen
        if os.getpid() == me and changes(event, args) and matters(args):
            seen += 1
            if seen == step:
                os.kill(me, signal.SIGKILL)
    sys.addaudithook(hook)

def drive(step, folder):
    crash_at(step, lambda args: re.search("/(sandboxes|work)/", str(args)))
    return daemon.run(DriverSettings(Path(folder)))

def supervise(step, box):
    run = json.loads((Path(box) / "spec.json").read_text())["run"]
    os.setsid()
    crash_at(step, lambda args: True)
    return supervisor.main(box, run)

for line in sys.stdin:
    what, step, folder = line.split()
    if what == "echo":
        print(what, flush=True)
        continue
    said, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(said, 1)
        try:
            os._exit({"drive": drive, "supervise": supervise}[what](int(step), folder))
        except BaseException as error:
            print("failed", repr(error), flush=True)
            os._exit(99)
    print(pid, flush=True)
    os.write(say, b".")
    os.close(said), os.close(say)
    if what == "supervise":
        print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture
def crashing() -> Iterator[Child]:
    with Child(CRASHING) as child:
        yield child


class Forked:
    """A driver that kills itself at a step; at step 0 it does not."""

    def __init__(self, forker: Child, folder: Path, step: int) -> None:
        forker.say(f"drive {step} {folder}")
        self._forker, self.pid = forker, int(forker.line())
        assert (line := forker.line()).startswith("holdfast driver: listening"), line

    def client(self, folder: Path) -> ProcessDriver:
        return ProcessDriver(f"unix:{folder}/driver.sock", timeout=PATIENCE)

    def wait(self) -> None:
        eventually(lambda: not runs(self.pid), "it dies")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()


def insist(call: Callable[[], object]) -> bool:
    """Whether it was answered; a driver that dies meanwhile is no surprise."""
    try:
        call()
    except holdfast.DriverError as error:
        if error.status is not None:
            raise
        return False
    return True


def test_a_driver_killed_at_any_step_of_create_and_delete_runs_nothing_twice_and_leaves_nothing(
    crashing: Child, tmp_path: Path
) -> None:
    """After each crash the next driver is asked again, as a caller that got no answer does."""
    crashes, unfinished = {"create": 0, "delete": 0}, []
    for step in range(1, 1000):
        folder, count, crashed = tmp_path / f"d{step}", tmp_path / f"count{step}", False
        argv = ["sh", "-c", f"echo $$ >> {count}; exec sleep 1000"]
        driver = Forked(crashing, folder, step)
        client = driver.client(folder)

        def create(argv: list[str] = argv, client: ProcessDriver = client) -> None:
            client.create("a", argv)
            reaches(client, "a", "Started")

        def delete(client: ProcessDriver = client) -> None:
            assert client.delete("a", wait=PATIENCE)

        for what, ask in (("create", create), ("delete", delete)):
            if not insist(ask):
                crashed, crashes[what] = True, crashes[what] + 1
                driver.wait()
                driver = Forked(crashing, folder, 0)
                ask()
            eventually(lambda count=count: count.exists() and count.read_text(), "it runs")  # type: ignore[misc]
        pids = [int(line) for line in count.read_text().split()]
        assert len(pids) == 1, f"run once, step {step}"
        assert not runs(pids[0]), f"ended, step {step}"
        driver.kill()
        left = [each.name for each in (folder / "sandboxes").iterdir()]
        assert all(name.startswith(".") for name in left)
        if left:
            unfinished.append(folder)
        if not crashed:
            break
    for folder in unfinished[::5]:
        Forked(crashing, folder, 0).kill()
        assert [*(folder / "sandboxes").iterdir(), *(folder / "work").iterdir()] == [], (
            "what was being made or removed is gone, too"
        )
    assert crashes["create"] > 6
    assert crashes["delete"] >= 4


def test_a_driver_killed_again_and_again_while_it_adopts_gets_there_in_the_end(crashing: Child, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    boxes = store.SandboxStore(folder)
    for name in ("never-started", "unwanted", "lost"):
        boxes.create(name, parse({"argv": ["sh", "-c", f"echo >> {tmp_path / name}"]}))
    store.write(boxes.folder("unwanted") / "deleting", {"grace": 1.0})
    store.write(boxes.folder("lost") / "started.json", {"pid": 1, "supervisor": 1, "started_at": 1.0})
    (folder / "sandboxes" / ".new-one" / "work").mkdir(parents=True)
    client, crashes, listens = ProcessDriver(f"unix:{folder}/driver.sock", timeout=PATIENCE), 0, False
    while True:
        crashing.say(f"drive {crashes + 1} {folder}")
        pid = int(crashing.line())
        while runs(pid) and not (listens := insist(client.list)):
            pass_time(0.01)
        if not listens:
            crashing.say("echo 0 0")
            listens = crashing.line() != "echo"  # it did, before it was killed
            if listens:
                crashing.expect("echo")
        elif not crashing.line().startswith("holdfast driver: listening"):
            pytest.fail("it answers and has not said where it listens")
        if listens:
            break
        crashes += 1
    assert crashes > 2
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    driver = Forked(crashing, folder, 0)
    assert reaches(client, "never-started", "Exited").details["exit_code"] == 0
    assert (tmp_path / "never-started").read_text() == "\n", "run once"
    assert state(client, "unwanted") == "gone"
    assert state(client, "lost") == "SupervisorLost"
    assert not (tmp_path / "unwanted").exists()
    assert not (tmp_path / "lost").exists()
    there = {"never-started", "lost"}
    eventually(lambda: {each.name for each in (folder / "sandboxes").iterdir()} == there, "nothing else is left")
    driver.kill()


def test_a_supervisor_killed_at_any_step_runs_the_program_at_most_once_and_leaves_nothing(
    crashing: Child, tmp_path: Path
) -> None:
    """No driver is there meanwhile; the next one starts what never was, and says of the rest that it was lost."""
    step, folder, seen = 0, tmp_path / "d", set()
    boxes = store.SandboxStore(folder)
    code = "-9"
    while code != "0":
        step += 1
        count = tmp_path / f"count{step}"
        boxes.create(f"s{step}", parse({"argv": ["sh", "-c", f"echo $$ >> {count}"]}))
        crashing.say(f"supervise {step} {boxes.folder(f's{step}')}")
        crashing.line()
        code = crashing.line().removeprefix("ended ")
        assert code in ("0", "-9")
    driver = Forked(crashing, folder, 0)
    client = driver.client(folder)
    for each in range(1, step + 1):
        reason = reaches(client, f"s{each}", "Exited", "SupervisorLost").conditions[0].reason
        count = tmp_path / f"count{each}"
        pids = count.read_text().split() if count.exists() else []
        assert len(pids) <= 1, f"at most once, step {each}"
        assert len(pids) == 1 or reason == "SupervisorLost"
        assert not any(runs(int(pid)) for pid in pids)
        seen.add((reason, len(pids)))
        assert client.delete(f"s{each}", wait=PATIENCE)
    assert seen >= {("Exited", 1), ("SupervisorLost", 0), ("SupervisorLost", 1)}
    driver.kill()


def test_of_many_supervisors_on_one_sandbox_one_runs_it_and_none_does_again(tmp_path: Path) -> None:
    """As when a driver is killed after it started one, and the next one, which knows nothing of it, starts another."""
    boxes, count = store.SandboxStore(tmp_path), tmp_path / "count"
    for name in ("a", "unwanted", "lost"):
        boxes.create(name, parse({"argv": ["sh", "-c", f"echo {name} >> {count}"]}))
    store.write(boxes.folder("unwanted") / "deleting", {"grace": 1.0})
    store.write(boxes.folder("lost") / "started.json", {"pid": 1, "supervisor": 1, "started_at": 1.0})

    def supervise(name: str, run: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-I", "-S", SUPERVISOR, str(boxes.folder(name)), run])

    right = {name: store.read_facts(boxes.folder(name)).spec["run"] for name in boxes.names()}
    assert supervise("a", right["unwanted"]).wait(PATIENCE) == 0, "it was meant for another one of that name"
    assert not count.exists()
    assert [each.wait(PATIENCE) for each in [supervise("a", right["a"]) for _ in range(4)]] == [0] * 4
    assert supervise("a", right["a"]).wait(PATIENCE) == 0
    for name in ("unwanted", "lost"):
        assert supervise(name, right[name]).wait(PATIENCE) == 0
    assert count.read_text() == "a\n"
    assert (store.read_facts(boxes.folder("a")).exit or {})["exit_code"] == 0


def test_sandboxes_live_on_without_a_driver_and_the_next_one_has_them_again(daemon: Daemon) -> None:
    client = daemon.client()
    go = daemon.folder / "go"
    os.mkfifo(go)
    client.create("ends", ["sh", "-c", f"echo before; read x < {go}; echo after; exit 7"])
    client.create("runs", ["sh", "-c", "echo $$; exec sleep 1000"])
    eventually(lambda: text(client, "ends") and text(client, "runs"), "they run")
    before = {each.id: each.details for each in client.list()}
    pid = int(text(client, "runs"))
    daemon.end(signal.SIGKILL)
    assert runs(pid)
    go.write_text("\n")
    eventually((daemon.box("ends") / "exit.json").exists, "it ends while nobody looks")
    daemon.start()
    assert daemon.ready["sandboxes"] == 2
    assert daemon.ready["running"] == 1
    found = {each.id: each for each in client.list()}
    assert found["ends"].details["exit_code"] == 7
    assert text(client, "ends") == "before\nafter\n"
    assert found["runs"].details == before["runs"]
    assert runs(pid)
    assert client.delete("runs", wait=PATIENCE)
    assert not runs(pid)


def test_a_killed_supervisor_takes_its_sandbox_with_it_and_a_pid_that_is_anothers_by_now_is_spared(
    daemon: Daemon,
) -> None:
    client = daemon.client()
    client.create("a", ["sh", "-c", "setsid sleep 1000 & echo $! $$; wait"])
    eventually(lambda: text(client, "a"), "it runs")
    pids = [int(each) for each in text(client, "a").split()]
    innocent = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        daemon.end(signal.SIGKILL)
        os.kill(daemon.supervisor("a"), signal.SIGKILL)
        eventually(lambda: not runs(pids[1]), "its program has ended with it, though no driver is there")
        started = daemon.box("a") / "started.json"
        numbers = {**json.loads(started.read_text()), "pid": innocent.pid, "supervisor": innocent.pid}
        started.write_text(json.dumps(numbers))  # as if the numbers had come round
        daemon.start()
        lost = reaches(client, "a", "SupervisorLost")
        assert lost.conditions[0].terminal
        assert lost.details["exit_code"] is None
        eventually(lambda: not any(map(runs, pids)), "nothing of it runs")
        assert client.delete("a", wait=PATIENCE)
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


def test_a_supervisor_killed_under_a_running_driver_is_noticed_at_once(daemon: Daemon) -> None:
    client = daemon.client()
    client.create("a", ["sleep", "1000"])
    reaches(client, "a", "Started")
    watch = client.watch()
    assert next(watch) is None
    os.kill(daemon.supervisor("a"), signal.SIGKILL)
    while (event := next(watch)) is None or event.reason != "SupervisorLost":
        pass
    watch.close()
    assert state(client, "a") == "SupervisorLost"


ESCAPE = """
exec >/dev/null
setsid env -i sh -c 'sleep 1000 & echo $! >>pids; wait' & echo $! >>pids
while grep -q HOLDFAST /proc/$!/environ || [ $(wc -l <pids) -lt 2 ]; do :; done
"""
"""A process leaves its session and has no variable of the driver, and so has its child."""


@pytest.mark.parametrize("forge", ["", "cp ../../exit.json ../../sandboxes/a;"], ids=["", "with a forged exit"])
def test_what_has_escaped_from_its_session_and_killed_its_supervisor_is_not_left(daemon: Daemon, forge: str) -> None:
    client = daemon.client()
    end = {"exit_code": 0, "signal": None, "problem": None, "ended": False, "finished_at": 1.0}
    (daemon.folder / "exit.json").write_text(json.dumps(end))
    client.create("other", ["sh", "-c", "echo $$; exec sleep 1000"])
    eventually(lambda: text(client, "other"), "it runs")
    client.create("a", ["sh", "-c", f"{ESCAPE} {forge} kill -9 $PPID"])
    reaches(client, "a", "SupervisorLost", "Exited")
    pids = [int(each) for each in (daemon.work("a") / "pids").read_text().split()]
    assert len(pids) == 2
    assert client.delete("a", wait=PATIENCE)
    assert not any(map(runs, pids))
    assert runs(int(text(client, "other"))), "no other sandbox is touched"
    assert daemon.process.returncode is None


def test_a_child_that_the_driver_did_not_start_is_left_alone(start: Callable[..., Daemon], tmp_path: Path) -> None:
    """As of a shell that has started it, and then executes the driver."""
    pid = tmp_path / "pid"
    before = (
        "import os, pathlib; child = os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '1000')\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child))"
    )
    daemon = start(before=before)
    client = daemon.client()
    client.create("a", ["sh", "-c", "kill -9 $PPID"])
    reaches(client, "a", "SupervisorLost")
    assert client.delete("a", wait=PATIENCE)
    other = int(pid.read_text())
    assert runs(other)
    os.kill(other, signal.SIGKILL)


async def test_a_supervisor_that_is_stopped_cannot_hold_up_a_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile_folder, "KILL_AFTER", 0.1)
    monkeypatch.setattr(reconcile_folder, "TICK", 0.1)
    sandboxes = FolderReconciler(tmp_path, 10, lambda _: None)
    await sandboxes.open()
    box, _ = sandboxes.create("a", parse({"argv": ["sleep", "1000"], "grace": 0.1}))
    await until(lambda: box.facts.running, "it runs")
    assert box.facts.started is not None
    os.kill(box.facts.started["supervisor"], signal.SIGSTOP)
    sandboxes.delete(box, None)
    await until(lambda: box.removed.is_set(), "it is gone")
    assert not runs(box.facts.started["pid"])
    assert not runs(box.facts.started["supervisor"])
    await sandboxes.close()


async def test_a_lock_that_cannot_be_looked_at_for_a_while_does_not_end_the_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when there is no descriptor to be had."""
    monkeypatch.setattr(reconcile_folder, "TICK", 0.01)
    said: list[Any] = []
    sandboxes = FolderReconciler(tmp_path, 10, said.append)
    await sandboxes.open()
    box, _ = sandboxes.create("a", parse({"argv": ["sleep", "1000"]}))
    await until(lambda: box.facts.running, "it runs")
    with monkeypatch.context() as patched:
        patched.setattr(store, "has_supervisor", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        await until(lambda: len([each for each in said if each.get("reason") == "Trouble"]) > 1, "again and again")
    await sandboxes.end_all()
    await sandboxes.close()


async def test_a_look_at_a_sandbox_that_is_being_started_does_not_miss_that_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile_folder, "TICK", 1000.0)
    sandboxes = FolderReconciler(tmp_path, 10, lambda _: None)
    await sandboxes.open()
    box, _ = sandboxes.create("a", parse({"argv": ["sleep", "1000"]}))
    sandboxes.reconcile(box)
    await until(lambda: box.facts.running, "it runs, and the driver was told")
    await sandboxes.end_all()
    await sandboxes.close()


def test_told_to_end_the_driver_leaves_sandboxes_running_unless_it_was_asked_to_end_them(
    start: Callable[..., Daemon],
) -> None:
    daemon = start()
    client = daemon.client()
    client.create("a", ["sh", "-c", "trap 'exit 5' TERM; echo $$; while :; do sleep 0.05; done"])
    eventually(lambda: text(client, "a"), "it runs")
    pid = int(text(client, "a"))
    watch = client.watch()
    assert next(watch) is None
    assert daemon.end(signal.SIGTERM) == 0
    with pytest.raises(holdfast.DriverError, match="cut off"):
        list(watch)
    watch.close()
    assert runs(pid)
    assert not (daemon.folder / "driver.sock").exists()
    ending = start("--end-sandboxes")
    assert ending.ready["running"] == 1
    assert ending.end(signal.SIGINT) == 0
    assert not runs(pid)
    assert json.loads((ending.box("a") / "exit.json").read_text())["exit_code"] == 5


def test_a_second_driver_on_the_folder_is_refused_and_told_the_first_ones_pid(daemon: Daemon) -> None:
    done = call("driver", "--folder", str(daemon.folder))
    assert done.returncode == 1
    assert f"another driver has {daemon.folder}: pid {daemon.process.pid}" in done.stderr
    assert daemon.client(timeout=PATIENCE).list() == []
