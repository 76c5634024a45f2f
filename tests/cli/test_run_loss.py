"""holdfast run: a lost lease ends the whole group, and before the TTL has ended, whatever it was lost by."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain, repeat

import pytest

import holdfast
from holdfast.cli import watcher
from holdfast.testing import Postgres, Proxy
from tests.children import eventually, query
from tests.cli.runs import FAMILY, STUBBORN, Run, alive, finish, gone
from tests.conftest import migrated

TTL = 5.0
COMMANDS = {"family": FAMILY, "stubborn": STUBBORN}
both = pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)


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
    """holdfast has said so and ended with a code that is not that of success."""
    assert run.wait() in (128 + signal.SIGTERM, 128 + signal.SIGKILL)
    said = run.errors()
    assert said.startswith(f"holdfast: lease '{name}'")
    assert said.endswith("; so the command was ended")
    assert len(said.splitlines()) == 1, said


@contextmanager
def both_at_once(url: str, *options: str) -> Iterator[dict[str, Run]]:
    """A run of each command, under a lease of that name: what befalls both takes its time once."""
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(Run(url, *options, "--ttl", str(TTL), command=command, name=name))
            for name, command in COMMANDS.items()
        }
        for run in runs.values():
            run.pids()
        yield runs


def gone_each(runs: dict[str, Run]) -> dict[str, float]:
    """When the last of each family was gone."""
    with ThreadPoolExecutor(len(runs)) as pool:
        return dict(zip(runs, pool.map(lambda run: gone(run.family), runs.values()), strict=True))


def test_the_database_is_stopped() -> None:
    with Postgres.create() as server:
        url = migrated(server.database())
        with both_at_once(url) as runs:
            server.stop("immediate")
            ended = gone_each(runs)
            server.start()
            for name, run in runs.items():
                lost(run, name)
                assert ended[name] < ends_at(url, name)


def test_the_database_is_paused() -> None:
    with Postgres.create() as server:
        url = migrated(server.database())
        with both_at_once(url) as runs:
            latest: dict[str, float] = {}

            def early() -> bool:
                latest.update({name: ends_at(url, name) for name in runs})
                return all(end - time.time() > TTL * 2 / 3 + 0.3 for end in latest.values())

            eventually(early, "it is a while until the next heartbeat of either")
            server.pause()
            ended = gone_each(runs)
            for name, run in runs.items():
                lost(run, name)
                assert ended[name] < latest[name]


def test_a_lease_that_cannot_be_given_back_is_told_soon_and_truly() -> None:
    """The command has ended, and the database does not answer: nobody waits for it, and nothing is promised that only a
    process could keep that is gone."""
    with Postgres.create() as server:
        url = migrated(server.database())
        with Run(url, "--ttl", "60", command=("sh", "-c", "echo $$; read line; exit 3")) as run:
            run.pids()
            server.pause()
            began = time.monotonic()
            run.say("end")
            assert run.wait() == 3
            assert time.monotonic() - began < 9, "3 s, on a machine that may be busy"
            [said] = run.errors().splitlines()
            assert said.startswith("holdfast: lease 'job' is not released, and expires within 60 s: ")
        server.resume()


def test_the_database_is_cut_off(postgres_url: str) -> None:
    with Proxy(postgres_url) as way, both_at_once(way.url) as runs:
        way.stall()
        ended = gone_each(runs)
        for name, run in runs.items():
            assert ended[name] < ends_at(postgres_url, name)
            lost(run, name)


def test_holdfast_itself_is_stopped(either: str) -> None:
    """Nobody renews, and nobody is there to notice: the watcher is."""
    with both_at_once(either) as runs:
        for run in runs.values():
            os.kill(run.pid, signal.SIGSTOP)
        ended = gone_each(runs)
        for name, run in runs.items():
            assert ended[name] < ends_at(either, name)
            os.kill(run.pid, signal.SIGCONT)
            lost(run, name)


def test_with_the_guard_nothing_runs_after_all_were_stopped_together(either: str) -> None:
    """A frozen container: the watcher sees no more than holdfast does, and only the kernel knows that time is up."""
    with both_at_once(either, "--guard") as runs, holdfast.Client(either) as client:
        watchers = {name: run.watcher() for name, run in runs.items()}
        for name, run in runs.items():
            for pid in (watchers[name], run.pid, *run.family):
                os.kill(pid, signal.SIGSTOP)
        for name, run in runs.items():
            with client.lease(name, ttl=TTL, timeout=30):
                assert run.wait() == -signal.SIGKILL, "ended while it stands still: nobody has to wake it for that"
                eventually(lambda run=run: not alive(run.family[0]), "the kernel ended the command")  # type: ignore[misc]
                os.kill(watchers[name], signal.SIGCONT)
                gone(run.family)
            assert run.errors() == ""


def test_the_guard_lets_a_command_finish_that_runs_for_longer_than_the_ttl(either: str) -> None:
    done = finish(either, "--guard", "--ttl", "3", "job", "--", "sh", "-c", "sleep 3.5; exit 3")
    assert (done.returncode, done.stderr) == (3, "")


@both
def test_an_operator_forces_it_away(either: str, command: tuple[str, ...]) -> None:
    with Run(either, "--ttl", str(TTL), command=command) as run, holdfast.Client(either) as client:
        family = run.pids()
        latest = ends_at(either) + TTL
        assert client.leases.force_release("job", actor="test", reason="test")
        assert gone(family) < latest
        assert run.wait() in (128 + signal.SIGTERM, 128 + signal.SIGKILL)
        [said] = run.errors().splitlines()
        assert "taken away by force" in said


@both
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "stopped"])
def test_without_its_watcher_holdfast_ends_the_group(
    sqlite_url: str, command: tuple[str, ...], number: signal.Signals
) -> None:
    with Run(sqlite_url, "--ttl", str(TTL), command=command) as run, holdfast.Client(sqlite_url) as client:
        family, watcher = run.pids(), run.watcher()
        os.kill(watcher, number)
        assert client.leases.force_release("job", actor="test", reason="test")
        gone(family)
        assert run.wait() in (128 + signal.SIGTERM, 128 + signal.SIGKILL)
        assert not alive(watcher)


def test_a_watcher_that_is_gone_is_told_once_and_the_command_goes_on(sqlite_url: str) -> None:
    with Run(sqlite_url, "--ttl", str(TTL), command=("sh", "-c", "echo $$; read line; exit 3")) as run:
        run.pids()
        os.kill(run.watcher(), signal.SIGKILL)
        latest = ends_at(sqlite_url)
        eventually(lambda: ends_at(sqlite_url) > latest + TTL, "the lease is renewed all the same, more than once")
        run.say("end")
        assert run.wait() == 3
        assert run.errors().count("watcher is gone") == 1


@both
def test_with_the_guard_a_watcher_that_is_gone_ends_the_group(sqlite_url: str, command: tuple[str, ...]) -> None:
    """Fail closed: should holdfast be killed now, nobody would end what the command has started."""
    with Run(sqlite_url, "--guard", "--ttl", str(TTL), command=command) as run:
        family = run.pids()
        os.kill(run.watcher(), signal.SIGKILL)
        gone(family)
        assert run.wait() in (128 + signal.SIGTERM, 128 + signal.SIGKILL)
        assert run.errors() == "holdfast: its watcher is gone, so the command is ended"


def test_with_the_guard_alrm_ends_holdfast_and_the_command(sqlite_url: str) -> None:
    """It is the signal of the timer where the kernel has no better one."""
    with Run(sqlite_url, "--guard") as run:
        family = run.pids()
        os.kill(run.pid, signal.SIGALRM)
        assert run.wait() == -signal.SIGALRM
        gone(family)


def test_a_stopped_command_hears_that_it_is_to_end(sqlite_url: str) -> None:
    """TERM waits for a process that is stopped: it is continued, so that it can put things in order."""
    script = "trap 'echo in order; exit 0' TERM; echo $$; while :; do sleep 0.01; done"
    with Run(sqlite_url, "--ttl", "6", command=("sh", "-c", script)) as run, holdfast.Client(sqlite_url) as client:
        [pid] = run.pids()
        os.kill(pid, signal.SIGSTOP)
        assert client.leases.force_release("job", actor="test", reason="test")
        assert run.line() == "in order"
        assert run.wait() == 1


def test_a_run_of_the_same_holder_takes_over_and_ends_the_earlier_one(either: str) -> None:
    with Run(either, "--ttl", str(TTL), "--holder", "replica-1") as first:
        family = first.pids()
        with Run(either, "--holder", "replica-1") as second:
            second.pids()
            gone(family)
            assert first.wait() == 128 + signal.SIGTERM
            assert all(map(alive, second.family))


def test_a_heartbeat_that_comes_back_in_time_lets_the_command_go_on() -> None:
    """An outage that is shorter than the TTL ends nothing."""
    with Postgres.create() as server:
        url = migrated(server.database())
        with Run(url, "--ttl", "4") as run:
            family = run.pids()
            server.restart("immediate")
            latest = ends_at(url)
            eventually(lambda: ends_at(url) > latest, "it is renewed again")
            assert all(map(alive, family))
            run.process.terminate()
            assert run.wait() == 128 + signal.SIGTERM


def test_time_that_runs_out_between_two_looks_at_the_clock_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when it is the watcher that the machine lets wait: what is left is less than nothing then."""
    times, ended = chain([0.0, 4.9], repeat(5.1)), []
    monkeypatch.setattr(watcher, "clock", lambda: next(times))
    monkeypatch.setattr(watcher, "end", lambda group, by: ended.append((group, by)))
    reader, writer = os.pipe()
    os.write(writer, b"group 7\nuntil 5.0\n")
    try:
        watcher._watch(reader, 1.0)
    finally:
        os.close(reader)
        os.close(writer)
    assert ended == [(7, 6.0)]
