"""holdfast run: signals reach the whole group, and nothing of the group outlives holdfast, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.testing import Proxy
from tests.children import NONE, PATIENCE, eventually, rows
from tests.cli.command import SCRIPT, environment
from tests.cli.runs import FAMILY, OFTEN, STUBBORN, Run, alive, children, finish, gone, state

TOLD = """
import os, signal, time
names = "INT TERM HUP QUIT USR1 USR2 ALRM WINCH".split()
def told(number, _):
    os.write(1, f"{who} {signal.Signals(number).name}\\n".encode())
for name in names:
    signal.signal(getattr(signal, "SIG" + name), told)
who = "child" if os.fork() else "grandchild"
os.write(1, f"{who} {os.getpid()}\\n".encode())
while True:
    time.sleep(0.1)  # not pause(): a signal that comes just before would be told with the next one
"""


def test_signals_are_passed_on_to_the_whole_group(sqlite_url: str) -> None:
    with Run(sqlite_url, command=(sys.executable, "-c", TOLD)) as run:
        run.family += [int(run.line().split()[1]) for _ in range(2)]
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGWINCH"):
            os.kill(run.pid, getattr(signal, name))
            assert {run.line(), run.line()} == {f"child {name}", f"grandchild {name}"}
        assert all(map(alive, (run.pid, *run.family)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_child_and_grandchild_are_gone_when_holdfast_is_told_to_end(sqlite_url: str, number: signal.Signals) -> None:
    with Run(sqlite_url) as run:
        family, watchdog = run.pids(), run.watchdog()
        os.kill(run.pid, number)
        assert run.wait() == 128 + number
        assert not any(map(alive, family))
        assert not alive(watchdog)
        assert rows(sqlite_url) == NONE
        assert run.errors() == ""


@pytest.mark.parametrize("command", [FAMILY, STUBBORN], ids=["family", "stubborn"])
def test_child_and_grandchild_are_gone_when_holdfast_is_killed(sqlite_url: str, command: tuple[str, ...]) -> None:
    with Run(sqlite_url, command=command) as run:
        family, watchdog = run.pids(), run.watchdog()
        run.process.kill()
        gone([*family, watchdog])


@pytest.mark.parametrize("command", [FAMILY, STUBBORN], ids=["family", "stubborn"])
def test_a_killed_holdfast_frees_its_lease_when_its_command_is_gone(either: str, command: tuple[str, ...]) -> None:
    """Its TTL is ten minutes. The other one looks for processes of the command when it begins."""
    with Run(either, command=command) as killed:
        family = killed.pids()
        look = f"for pid in {' '.join(map(str, family))}; do grep '^State:.[^XZ]' /proc/$pid/status; done"
        look += " 2>/dev/null; echo next"
        with Run(either, "--wait", command=("sh", "-c", look)) as run:
            run.waits()
            killed.process.kill()
            assert run.line() == "next", "a process of the command still ran"
            assert run.wait() == 0
    with holdfast.Client(either) as client:
        assert [each.outcome for each in client.leases.history("job")] == ["released", "released"]


def test_a_watchdog_releases_the_lease_when_the_database_answers_again(postgres_url: str) -> None:
    with Proxy(postgres_url) as way, Run(way.url) as run, holdfast.Client(postgres_url) as client:
        family, watchdog = run.pids(), run.watchdog()
        way.reset()
        run.process.kill()
        gone(family)
        assert [each.name for each in client.leases.list()] == ["job"]
        way.heal()
        gone([watchdog])
        assert client.leases.list() == []


def test_with_session_failover_the_death_of_all_its_processes_frees_the_lease(either: str) -> None:
    """As of a container. Its TTL is ten minutes."""
    with Run(either, "--failover", "session") as killed:
        family, watchdog = killed.pids(), killed.watchdog()
        with Run(either, "--wait", command=("echo", "next")) as run:
            run.waits()
            os.kill(watchdog, signal.SIGKILL)
            killed.process.kill()
            gone(family[:1])
            assert run.line() == "next"
            assert run.wait() == 0


def test_a_short_command_holds_its_lease_for_at_least_as_long_as_it_is_to(either: str) -> None:
    assert finish(either, "--at-least", "600", "job", "--", "true").returncode == 0
    assert finish(either, "job", "--", "echo", "ran").returncode == 75
    assert finish(either, "--skip", "job", "--", "echo", "ran").stdout == ""
    with Run(either, "--at-least", "600", name="killed") as run:
        family, watchdog = run.pids(), run.watchdog()
        run.process.kill()
        gone([*family, watchdog])
    assert finish(either, "killed", "--", "echo", "ran").returncode == 75


def test_without_its_watcher_the_kernel_still_ends_the_command_with_holdfast(sqlite_url: str) -> None:
    with Run(sqlite_url, command=("sh", "-c", "echo $$; exec sleep 1000")) as run:
        family, watchdog = run.pids(), run.watchdog()
        os.kill(watchdog, signal.SIGKILL)
        gone([watchdog])
        assert all(map(alive, family))
        run.process.kill()
        gone(family)


def test_a_killed_holdfast_that_waits_leaves_nothing(sqlite_url: str) -> None:
    with Run(sqlite_url) as first:
        first.pids()
        with Run(sqlite_url, "--wait") as second:
            second.waits()
            below = children(second.pid)
            second.process.kill()
            gone(below)


@pytest.mark.parametrize(
    ("engine", "number"),
    [("sqlite", signal.SIGTERM), ("sqlite", signal.SIGHUP), ("postgres", signal.SIGINT)],
)
def test_a_signal_while_it_waits_ends_it_without_a_word_and_leaves_nothing(
    request: pytest.FixtureRequest, tmp_path: Path, engine: str, number: signal.Signals
) -> None:
    url = request.getfixturevalue(f"{engine}_url")
    with Run(url) as first:
        first.pids()
        with Run(url, "--wait", command=("touch", str(tmp_path / "ran"))) as second:
            second.waits()
            below = children(second.pid)
            os.kill(second.pid, number)
            assert second.wait() == 128 + number
            assert not any(map(alive, below))
            assert second.errors() == ""
        assert not (tmp_path / "ran").exists()
        with holdfast.Client(url) as client:
            assert [lease.pid for lease in client.leases.list()] == [first.pid]


@pytest.mark.parametrize("leave", ["", "trap '' TERM; "], ids=["willing", "stubborn"])
def test_what_the_command_leaves_running_is_ended_before_the_lease_is_released(sqlite_url: str, leave: str) -> None:
    """Otherwise the next holder would work beside it."""
    script = f"{leave}sleep 1000 >&- 2>&- & echo $$ $!; exit 5"
    with Run(sqlite_url, command=("sh", "-c", script)) as run:
        family = run.pids()
        assert run.wait() == 5
        assert not any(map(alive, family))
        assert finish(sqlite_url, "job", "--", "echo", "next").stdout == "next\n"


def test_after_a_normal_end_nothing_runs_and_nothing_is_held(sqlite_url: str) -> None:
    with Run(sqlite_url, command=("sh", "-c", "echo $$; read -r _ < /dev/null")) as run:
        run.pids()
        below = children(run.pid)
        assert run.wait() == 1
        assert not any(map(alive, (*below, *run.family)))
        assert rows(sqlite_url) == NONE


def test_a_stopped_command_without_a_terminal_keeps_the_lease(sqlite_url: str) -> None:
    """An operator's kill -STOP, say for a debugger: that is no reason for holdfast to stop, too, and so lose it."""
    with Run(sqlite_url, "--ttl", "600", before=OFTEN) as run:
        family = run.pids()
        os.kill(family[0], signal.SIGSTOP)
        eventually(lambda: state(family[0]) == "T", "it is stopped")
        with holdfast.Client(sqlite_url) as client:
            before = client.leases.get("job")
            assert before is not None
            eventually(lambda: held_longer(client, before.expires_at.timestamp() + 1), "it is renewed")
        assert [state(family[0]), alive(run.pid)] == ["T", True]
        os.kill(family[0], signal.SIGCONT)
        run.terminate()
        assert run.wait() == 128 + signal.SIGTERM


def held_longer(client: holdfast.Client, than: float) -> bool:
    now = client.leases.get("job")
    return now is not None and now.expires_at.timestamp() > than


def test_signals_that_are_ignored_stay_ignored(sqlite_url: str) -> None:
    """nohup holdfast run …"""
    script = f"trap '' HUP; exec {SCRIPT} run job -- sh -c 'echo $$; exec sleep 1000'"
    with subprocess.Popen(
        ["sh", "-c", script], env=environment(HOLDFAST_URL=sqlite_url), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        command = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGHUP)
        os.kill(command, signal.SIGHUP)
        process.terminate()
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
