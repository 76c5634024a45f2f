"""holdfast run: a lost lease ends the whole group, and before the TTL has ended, whatever it was lost by."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain, repeat
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

import holdfast
from holdfast.cli import process_group, run, watchdog
from holdfast.lease import trust
from holdfast.lease.trust import margin
from holdfast.testing import Postgres, Proxy
from holdfast.testing.standstill import Standstill
from tests.children import PATIENCE, eventually, query
from tests.cli.runs import FAMILY, JUMP, OFTEN, STUBBORN, Run, alive, gone
from tests.conftest import migrated

TTL = 9.0
"""Seconds, where a real clock is to show it."""
LONG = ("--ttl", "600")
"""No machine stands still for that long."""
COMMANDS = {"family": FAMILY, "stubborn": STUBBORN}
LOST = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
"""How a command ends that is told to: by TERM, or by KILL where the machine lets it wait for longer than its grace."""


def ends_at(url: str, name: str = "job") -> float:
    """When the TTL of the run ends, by the database's clock, as it was last renewed."""
    [(moment,)] = query(
        url,
        "select b.expires_at from holdfast_beat b join holdfast_lease l on l.beat = b.id where l.name = %s"
        if url.startswith("sqlite")
        else "select extract(epoch from b.expires_at)::float8 from holdfast.beat b join holdfast.lease l"
        " on l.beat = b.id where l.name = %s",
        name,
    )
    return float(moment)


def lost(run: Run, name: str) -> None:
    """holdfast has reported the loss, in one line, and its exit code is not 0."""
    assert run.wait() in LOST
    errors = run.errors()
    assert errors.startswith(f"holdfast: lease '{name}'")
    assert errors.endswith("; the command was ended")
    assert len(errors.splitlines()) == 1, errors


@contextmanager
def both_at_once(url: str, *options: str, jump: Path | None = None) -> Iterator[dict[str, Run]]:
    """A run of each command, under a lease of that name: what befalls both takes its time once. With ``jump`` the TTL
    is ten minutes, and over once that file is there."""
    options = (*options, *(LONG if jump else ("--ttl", str(TTL))))
    before, more = (JUMP, {"JUMP": str(jump)}) if jump else ("", {})
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(Run(url, *options, command=command, name=name, before=before, more=more))
            for name, command in COMMANDS.items()
        }
        for run in runs.values():
            run.pids()
        yield runs


def gone_each(runs: dict[str, Run], jump: Path | None) -> dict[str, float]:
    """When the last of each family was gone."""
    if jump:
        jump.touch()
    with ThreadPoolExecutor(len(runs)) as pool:
        return dict(zip(runs, pool.map(lambda run: gone(run.family), runs.values()), strict=True))


Ended = dict[str, tuple[float, float]]
"""By name of the lease: when the last of the command was gone, and when the TTL ended."""


def database_stopped(jump: Path | None = None) -> Ended:
    with Postgres.create() as server:
        url = migrated(server.database())
        with both_at_once(url, jump=jump) as runs:
            server.stop("immediate")
            ended = gone_each(runs, jump)
            server.start()
            for name, run in runs.items():
                lost(run, name)
            return {name: (ended[name], ends_at(url, name)) for name in runs}


def database_cut_off(url: str, jump: Path | None = None) -> Ended:
    with Proxy(url) as way, both_at_once(way.url, jump=jump) as runs:
        way.stall()
        ended = gone_each(runs, jump)
        ends = {name: (ended[name], ends_at(url, name)) for name in runs}
        for name, run in runs.items():
            lost(run, name)
        return ends


def holdfast_stopped(url: str, jump: Path | None = None) -> Ended:
    """Only the watchdog notices that the lease is not renewed any more."""
    with both_at_once(url, jump=jump) as runs:
        for run in runs.values():
            os.kill(run.pid, signal.SIGSTOP)
        ended = gone_each(runs, jump)
        ends = {name: (ended[name], ends_at(url, name)) for name in runs}
        for name, run in runs.items():
            os.kill(run.pid, signal.SIGCONT)
            lost(run, name)
        return ends


def test_the_database_is_stopped(tmp_path: Path) -> None:
    database_stopped(tmp_path / "jump")


def test_the_database_is_cut_off(postgres_url: str, tmp_path: Path) -> None:
    """It accepts connections and answers nothing, as one that is paused."""
    database_cut_off(postgres_url, tmp_path / "jump")


def test_holdfast_itself_is_stopped(postgres_url: str, tmp_path: Path) -> None:
    """Not on SQLite: stopped amid a heartbeat it would keep the file locked."""
    holdfast_stopped(postgres_url, tmp_path / "jump")


@pytest.mark.realtime
@pytest.mark.parametrize("loss", [database_stopped, database_cut_off, holdfast_stopped])
def test_nothing_of_the_command_runs_when_the_ttl_ends(
    request: pytest.FixtureRequest, loss: Callable[..., Ended], standstill: Standstill
) -> None:
    """With half a second to spare at the most: only a machine that does not stand still shows it."""
    started = time.monotonic()
    url = [] if loss is database_stopped else [request.getfixturevalue("postgres_url")]
    for ended, ttl_ends in loss(*url).values():
        assert ended - standstill.seconds(since=started) < ttl_ends


class Recorder:
    """In place of the watchdog, the child and the kernel's timer of a run: records the times that they are given. The
    child ends when a heartbeat has put the timer off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.grace = 0.0
        self.trusted: list[float] = []
        self.timer: list[float] = []
        self._put_off = threading.Event()
        self.pid = 0
        monkeypatch.setattr(run, "Watchdog", self.create_watchdog)
        monkeypatch.setattr(run, "Child", lambda argv: self)
        monkeypatch.setattr(run, "SignalPipe", lambda guard: None)
        monkeypatch.setattr("holdfast.runtime.kill_timer.KillTimer", lambda: self)

    def create_watchdog(self, grace: float, url: str, schema: str) -> Recorder:
        self.grace = grace
        return self

    def send(self, line: str) -> bool:
        word, _, value = line.partition(" ")
        if word == "until":
            self.trusted.append(float(value))
        return True

    def ends_at(self, moment: float) -> None:
        self.timer.append(moment)
        if moment > self.timer[0] + 0.5:
            self._put_off.set()

    def start(self, environment: Any) -> None:
        """There is no command."""

    def wait(self, signals: Any) -> int:
        assert self._put_off.wait(PATIENCE), "a heartbeat puts it off"
        return 0

    def end_group(self, grace: float, lost: Any) -> None:
        """There is no group."""

    def close(self) -> None:
        """There is no pipe."""


@pytest.mark.parametrize("short", [False, True], ids=["long TTL", "proportions of a short TTL"])
def test_term_kill_and_the_kernels_timer_are_set_to_moments_before_the_ttl_ends(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    """Whatever the machine does after it has set them. On one clock: the database keeps that of the day. Margin and
    grace are shares of a TTL that is shorter than ten seconds; here they are shares of ten minutes."""
    recorder = Recorder(monkeypatch)
    if short:
        monkeypatch.setattr(run, "GRACE", 600.0)
        monkeypatch.setattr(trust, "margin", lambda ttl: margin(ttl / 600) * 600)
    monkeypatch.setattr(run, "REPORTS", 5000)
    set_before: list[tuple[list[float], list[float], float]] = []

    def wait(signals: Any) -> int:
        code = Recorder.wait(recorder, signals)
        timers, trusted = (
            sorted(recorder.timer),
            sorted(recorder.trusted),
        )  # before the end, which a heartbeat may yet move
        ends = ends_at(sqlite_url) + max(process_group.clock() - time.time() for _ in range(100))
        set_before.append((trusted, timers, ends))
        return code

    monkeypatch.setattr(recorder, "wait", wait)
    terms = {"ttl": 600.0, "timeout": 0.0, "holder": None, "renew_every": 0.1, "strict": False}
    assert run._run(sqlite_url, "holdfast", "job", ["nothing"], terms, False, True, False) == 0
    eventually(lambda: recorder.timer[-1] == float("inf"), "it does not outlive the command")
    assert recorder.grace == (30.0 if short else 0.5)
    [(trusted, timers, ends)] = set_before
    assert timers[-1] < ends
    for until, timer in zip(trusted, timers, strict=False):  # two threads set them, in any order
        assert until < until + recorder.grace < timer


STOPS = f"""{OFTEN}
import os, signal
from holdfast.runtime.clock import now
from holdfast.runtime.kill_timer import KillTimer
def ends_at(dead_man, moment, arm=KillTimer.ends_at):
    if not os.path.exists(os.environ["STOP"]):
        return arm(dead_man, moment)
    arm(dead_man, now() + 0.5)
    os.kill(os.getpid(), signal.SIGSTOP)
KillTimer.ends_at = ends_at
"""
"""Run before the command line: once the file named STOP is there, holdfast stops as soon as it has set the kernel's
timer, to half a second later."""


def test_with_the_guard_nothing_runs_after_all_were_stopped_together(sqlite_url: str, tmp_path: Path) -> None:
    """A frozen container: watchdog and holdfast are both stopped, and only the kernel's timer runs."""
    stop = tmp_path / "stop"
    with Run(sqlite_url, "--guard", *LONG, command=STUBBORN, before=STOPS, more={"STOP": str(stop)}) as run:
        family, watchdog = run.pids(), run.watchdog()
        for pid in (watchdog, *family):
            os.kill(pid, signal.SIGSTOP)
        stop.touch()
        assert run.wait() == -signal.SIGKILL, "killed while it is stopped: it need not be continued for that"
        eventually(lambda: not alive(family[0]), "the kernel ended the command")
        os.kill(watchdog, signal.SIGCONT)
        gone(family)
        assert run.errors() == ""


def test_what_closing_the_client_waits_for_does_not_hold_up_the_exit() -> None:
    """A frozen server accepts connections, and never answers."""
    patient = """
from holdfast.database import background
from holdfast.lease import grant
background.EXIT_BUDGET = grant.CLOSE_TIMEOUT = 600
"""
    with Postgres.create() as server:
        url = migrated(server.database())
        for name, more in (("closing", "run._RELEASE_TIMEOUT = 0.2"), ("releasing", "run._RELEASE_TIMEOUT = 600")):
            before = f"{patient}\nfrom holdfast.cli import run\n{more}"
            with Run(url, *LONG, command=READS, before=before, name=name) as run:
                run.pids()
                server.pause()
                run.say("end")
                assert run.wait() == 3
                server.resume()


@pytest.mark.realtime
@pytest.mark.parametrize("ttl", ["600", "10"])
def test_with_a_frozen_server_it_returns_within_three_seconds_of_the_commands_end(ttl: str) -> None:
    """Also when trust in the lease has ended before."""
    command = ("sh", "-c", "echo $$; read line; date +%s.%N; exit 3")
    with Standstill() as pauses, Postgres.create() as server:
        url = migrated(server.database())
        with Run(url, "--ttl", ttl, command=command) as run:
            run.pids()
            server.pause()
            if ttl == "600":
                run.say("end")
                ended = float(run.line())
            else:
                gone(run.family)
                ended = time.time()
            run.wait()
            assert time.time() - ended - sum(pauses.pauses()) < 3
            server.resume()


@pytest.mark.realtime
def test_with_the_guard_nothing_of_what_was_stopped_runs_when_another_has_the_lease(sqlite_url: str) -> None:
    with both_at_once(sqlite_url, "--guard") as runs, holdfast.Client(sqlite_url) as client:
        watchdogs = {name: run.watchdog() for name, run in runs.items()}
        for name, run in runs.items():
            for pid in (watchdogs[name], run.pid, *run.family):
                os.kill(pid, signal.SIGSTOP)
        for name, run in runs.items():
            with client.lease(name, ttl=600, timeout=PATIENCE):
                assert run.wait() == -signal.SIGKILL
                eventually(lambda run=run: not alive(run.family[0]), "the kernel ended the command")  # type: ignore[misc]
                os.kill(watchdogs[name], signal.SIGCONT)
                gone(run.family)


READS = ("sh", "-c", "echo $$; read line; exit 3")
"""A command that ends when it reads a line."""


@pytest.mark.parametrize(
    ("engine", "command"), [("sqlite", FAMILY), ("postgres", STUBBORN)], ids=["sqlite", "postgres"]
)
def test_an_operator_forces_it_away(request: pytest.FixtureRequest, engine: str, command: tuple[str, ...]) -> None:
    """The message shows that a heartbeat noticed it, and not the end of the TTL."""
    url = request.getfixturevalue(f"{engine}_url")
    with Run(url, *LONG, command=command, before=OFTEN) as run, holdfast.Client(url) as client:
        family = run.pids()
        assert client.leases.force_release("job", actor="test", reason="test")
        gone(family)
        assert run.wait() in LOST
        [line] = run.errors().splitlines()
        assert "taken away by force by test: test" in line


@pytest.mark.parametrize(
    ("command", "number"), [(STUBBORN, signal.SIGKILL), (FAMILY, signal.SIGSTOP)], ids=["dead", "stopped"]
)
def test_without_its_watcher_holdfast_ends_the_group(
    sqlite_url: str, command: tuple[str, ...], number: signal.Signals
) -> None:
    """With TERM and KILL when it is dead; with KILL at once when it does not answer."""
    with Run(sqlite_url, *LONG, command=command, before=OFTEN) as run, holdfast.Client(sqlite_url) as client:
        family, watchdog = run.pids(), run.watchdog()
        os.kill(watchdog, number)
        assert client.leases.force_release("job", actor="test", reason="test")
        gone(family)
        assert run.wait() in LOST
        assert not alive(watchdog)


def test_a_watcher_that_is_gone_is_told_once_and_the_command_goes_on(sqlite_url: str) -> None:
    with Run(sqlite_url, *LONG, command=READS, before=OFTEN) as run:
        run.pids()
        os.kill(run.watchdog(), signal.SIGKILL)
        latest = ends_at(sqlite_url)
        eventually(
            lambda: ends_at(sqlite_url) > latest + 1.2, "it is renewed all the same, and reports, more than once"
        )
        run.say("end")
        assert run.wait() == 3
        assert run.errors().count("the watchdog died") == 1


def test_with_the_guard_a_watcher_that_is_gone_ends_the_group(sqlite_url: str) -> None:
    """Fail closed: if holdfast were killed now, no process would end what the command has started."""
    with Run(sqlite_url, "--guard", *LONG, command=STUBBORN, before=OFTEN) as run:
        family = run.pids()
        os.kill(run.watchdog(), signal.SIGKILL)
        gone(family)
        assert run.wait() in LOST
        assert run.errors() == "holdfast: the watchdog died: ending the command"


def test_with_the_guard_alrm_ends_holdfast_and_the_command(sqlite_url: str) -> None:
    """It is the signal of the timer where the kernel has no better one."""
    with Run(sqlite_url, "--guard") as run:
        family = run.pids()
        os.kill(run.pid, signal.SIGALRM)
        assert run.wait() == -signal.SIGALRM
        gone(family)


IN_ORDER = ("sh", "-c", "trap 'echo in order; exit 0' TERM; echo $$; while :; do sleep 0.01; done")


def test_a_stopped_group_hears_that_it_is_to_end() -> None:
    """TERM waits for a process that is stopped: it is continued, so that it can put things in order."""
    with Popen(IN_ORDER, stdout=PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        os.kill(process.pid, signal.SIGSTOP)
        ending = threading.Thread(target=process_group.end, args=(process.pid, process_group.clock() + PATIENCE))
        ending.start()
        assert process.stdout.readline() == "in order\n"
        assert process.wait(PATIENCE) == 0
        ending.join()


def test_a_command_that_ends_with_0_when_it_is_told_to_is_no_success(sqlite_url: str) -> None:
    """By the first heartbeat after the lease was taken away; with a grace that every machine is fast enough for."""
    options = ("--guard", "--ttl", "1200", "--renew-every", "0.2")
    slow = f"from holdfast.cli import run; run.GRACE = {PATIENCE}"
    with (
        Run(sqlite_url, *options, command=IN_ORDER, before=slow) as guarded,
        holdfast.Client(sqlite_url) as client,
    ):
        guarded.pids()
        assert client.leases.force_release("job", actor="test", reason="test")
        assert guarded.line() == "in order"
        assert guarded.wait() == 1
        assert "the command was ended" in guarded.errors()


def test_a_lease_that_cannot_be_given_back_is_told_while_the_database_does_not_answer(postgres_url: str) -> None:
    """The command has ended: holdfast does not wait any longer for the database, and says when the lease expires."""
    hurried = "from holdfast.cli import run; run._RELEASE_TIMEOUT = 0.2"
    with Proxy(postgres_url) as way, Run(way.url, *LONG, command=READS, before=hurried) as run:
        run.pids()
        way.stall()
        run.say("end")
        assert run.wait() == 3
        [line] = run.errors().splitlines()
        assert line.startswith("holdfast: lease 'job' could not be released and expires within 600 s: ")


def test_a_run_of_the_same_holder_takes_over_and_ends_the_earlier_one(sqlite_url: str) -> None:
    secret = {"HOLDFAST_REENTER": "our secret"}
    with Run(sqlite_url, *LONG, "--holder", "replica-1", before=OFTEN, more=secret) as first:
        family = first.pids()
        with Run(sqlite_url, "--holder", "replica-1") as stranger:
            assert stranger.wait() == 75
        with Run(sqlite_url, "--holder", "replica-1", more=secret) as second:
            second.pids()
            gone(family)
            assert first.wait() in LOST
            assert all(map(alive, second.family))


def test_time_that_runs_out_between_two_looks_at_the_clock_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the watchdog itself is starved of CPU: the time left is negative then."""
    times, ended = chain([0.0, 4.9], repeat(5.1)), []
    monkeypatch.setattr(watchdog, "clock", lambda: next(times))
    monkeypatch.setattr(watchdog, "end", lambda group, by: ended.append((group, by)))
    reader, writer = os.pipe()
    os.write(writer, b"group 7\nuntil 5.0\n")
    try:
        watchdog._watch(reader, 1.0, "sqlite:///none.db", "holdfast")
    finally:
        os.close(reader)
        os.close(writer)
    assert ended == [(7, 6.0)]


class EndsAtOnce:
    """A child whose command ends as soon as trust is being reported, as `true` may."""

    pid = 0

    def __init__(self, is_reporting: threading.Event) -> None:
        self._is_reporting = is_reporting

    def start(self, environment: object) -> None:
        pass

    def wait(self, signals: object) -> int:
        assert self._is_reporting.wait(PATIENCE)
        return 0

    def end_group(self, grace: float, is_lost: Callable[[], bool]) -> None:
        pass


def test_nothing_is_reported_to_a_watchdog_that_is_closed_when_the_command_has_ended() -> None:
    """The descriptor of its pipe may be another file's by then; and its end would be reported as a loss."""
    is_reporting, is_closed, late = threading.Event(), threading.Event(), []

    class Grant:
        lost = False

        def remaining(self) -> float:
            if threading.current_thread() is not threading.main_thread():
                is_reporting.set()
                is_closed.wait(0.2)  # long enough for a run that does not wait for this thread to return
            return 600.0

    class ClosedWatchdog:
        def send(self, line: str) -> bool:
            if is_closed.is_set():
                late.append(line)
            return not is_closed.is_set()

    leased: Any = run._LeasedRun(
        EndsAtOnce(is_reporting), ClosedWatchdog(), Grant(), threading.Event(), 0.0, guard=False  # type: ignore[arg-type]
    )  # fmt: skip
    assert leased.run(None, {}) == 0
    is_closed.set()
    eventually(lambda: "holdfast-report" not in {each.name for each in threading.enumerate()}, "its thread ends")
    assert (late, leased._has_lost_watchdog) == ([], False)
