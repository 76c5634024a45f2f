"""holdfast run: a lost lease ends the whole group, and before the TTL has ended, whatever it was lost by."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import pytest

import holdfast
from holdfast.testing import Postgres
from tests.children import eventually, query
from tests.cli.runs import FAMILY, STUBBORN, Run, alive, finish, gone
from tests.conftest import migrated

TTL = 3.0
both = pytest.mark.parametrize("command", [FAMILY, STUBBORN], ids=["family", "stubborn"])


class Wire:
    """A TCP proxy in front of a database that can be cut: nothing is closed, nothing arrives any more."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._target = (place.hostname, place.port)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = url.replace(f":{place.port}/", f":{self._door.getsockname()[1]}/")
        self._hush, self._ring = socket.socketpair()
        self._cut = False
        self._peers: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        self._ring.send(b"c")
        eventually(lambda: self._cut, "the wire is cut")

    def _forward(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._door, selectors.EVENT_READ)
            selector.register(self._hush, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    if source is self._hush:
                        self._cut = True
                        if source.recv(1) == b"e":
                            return
                    elif source is self._door:
                        inner, outer = source.accept()[0], socket.create_connection(self._target)
                        self._peers |= {inner: outer, outer: inner}
                        for each in (inner, outer):
                            selector.register(each, selectors.EVENT_READ)
                    elif self._cut:
                        selector.unregister(source)
                    elif data := source.recv(65536):
                        self._peers[source].sendall(data)
                    else:
                        selector.unregister(source)
                        self._peers[source].shutdown(socket.SHUT_WR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ring.send(b"e")
        self._thread.join()
        for each in (self._door, self._hush, self._ring, *self._peers):
            each.close()


def ends_at(url: str) -> float:
    """When the TTL of the run ends, by the database's clock, as it was last renewed."""
    [(moment,)] = query(
        url,
        "select max(expires_at) from holdfast_beat"
        if url.startswith("sqlite")
        else "select extract(epoch from max(expires_at))::float8 from holdfast.beat",
    )
    return float(moment)


def lost(run: Run) -> None:
    """holdfast has said so and ended with a code that is not that of success."""
    assert run.wait() in (128 + signal.SIGTERM, 128 + signal.SIGKILL)
    assert "lease 'job'" in (said := run.errors())
    assert "so the command was ended" in said
    assert "Traceback" not in said


@both
def test_the_database_is_stopped(command: tuple[str, ...]) -> None:
    with Postgres.create() as server:
        url = migrated(server.database())
        with Run(url, "--ttl", str(TTL), command=command) as run:
            family = run.pids()
            server.stop("immediate")
            ended = gone(family)
            lost(run)
            server.start()
            assert ended < ends_at(url)


@both
def test_the_database_is_paused(command: tuple[str, ...]) -> None:
    with Postgres.create() as server:
        url = migrated(server.database())
        with Run(url, "--ttl", str(TTL), command=command) as run:
            family = run.pids()
            before = ends_at(url)
            eventually(lambda: ends_at(url) > before, "it is renewed, so that there is time until the next heartbeat")
            latest = ends_at(url)
            server.pause()
            ended = gone(family)
            lost(run)
            assert ended < latest


@both
def test_the_database_is_cut_off(postgres_url: str, command: tuple[str, ...]) -> None:
    with Wire(postgres_url) as wire, Run(wire.url, "--ttl", str(TTL), command=command) as run:
        family = run.pids()
        wire.cut()
        ended = gone(family)
        assert ended < ends_at(postgres_url)
        lost(run)


@both
def test_holdfast_itself_is_stopped(either: str, command: tuple[str, ...]) -> None:
    """Nobody renews, and nobody is there to notice: the watcher is."""
    with Run(either, "--ttl", str(TTL), command=command) as run:
        family = run.pids()
        os.kill(run.pid, signal.SIGSTOP)
        ended = gone(family)
        assert ended < ends_at(either)
        os.kill(run.pid, signal.SIGCONT)
        lost(run)


@both
def test_with_the_guard_nothing_runs_after_all_were_stopped_together(either: str, command: tuple[str, ...]) -> None:
    """A frozen container: the watcher sees no more than holdfast does, and only the kernel knows that time is up."""
    with Run(either, "--guard", "--ttl", str(TTL), command=command) as run, holdfast.Client(either) as client:
        family, watcher = run.pids(), run.watcher()
        stopped = [watcher, run.pid, *family]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        with client.lease("job", ttl=TTL, timeout=30):
            os.kill(run.pid, signal.SIGCONT)
            assert run.wait() == -signal.SIGALRM
            eventually(lambda: not alive(family[0]), "the kernel ended the command, which never went on")
            os.kill(watcher, signal.SIGCONT)
            gone(family)
        assert run.errors() == ""


def test_the_guard_lets_a_command_finish_that_runs_for_longer_than_the_ttl(either: str) -> None:
    done = finish(either, "--guard", "--ttl", "0.5", "job", "--", "sh", "-c", "sleep 1.5; exit 3")
    assert (done.returncode, done.stderr) == (3, "")


@both
def test_an_operator_forces_it_away(either: str, command: tuple[str, ...]) -> None:
    with Run(either, "--ttl", str(TTL), command=command) as run, holdfast.Client(either) as client:
        family = run.pids()
        latest = ends_at(either) + TTL
        assert client.leases.force_release("job", actor="test", reason="test")
        assert gone(family) < latest
        assert run.wait() in (128 + signal.SIGTERM, 128 + signal.SIGKILL)
        assert "taken away by force" in run.errors()


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
