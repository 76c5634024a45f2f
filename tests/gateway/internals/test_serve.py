"""A replica as a process: it starts, says where it is, and ends as it is told to, in order and in time."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import MagicMock

import httpx
import pytest

import holdfast
from holdfast.driver import daemon
from holdfast.driver import daemon_signals as _daemon
from holdfast.driver.daemon_signals import stop_on_signals
from holdfast.gateway import server as gateway_server
from holdfast.gateway.app import _advertised_address
from holdfast.gateway.server import _is_dead
from holdfast.gateway.settings import Settings
from tests.children import PATIENCE, Child, backends, eventually, rows
from tests.cli.command import Running, at, call
from tests.conftest import server
from tests.driver.daemon import Daemon, clean, reaches, runs
from tests.gateway.replicas import Replica

NONE = "unix:/nowhere/driver.sock"
"""Where no driver is needed."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Of one test: short enough for a socket in it."""
    with TemporaryDirectory(prefix="hf-") as made:
        yield Path(made)
        clean(Path(made) / "d")


def file(place: Path) -> str:
    return f"sqlite:///{place / 'app.db'}"


HOLDING = """
    import holdfast, sys
    client = holdfast.Client(sys.argv[1])
    grant = client.lease("gateway:instance", ttl=600).acquire()
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_on_the_same_file_is_refused_with_the_firsts_host_and_pid(place: Path) -> None:
    """Also on the port that the first one has, as whoever starts it twice in one folder does."""
    with Replica(file(place), place, driver=NONE) as first:
        port = str(first.http.base_url.port)
        done = call(*at(file(place), "serve", "--port", port, "--driver", NONE), cwd=place)
        assert (done.returncode, done.stdout) == (75, "")
        assert f"process {first.process.pid} on {socket.gethostname()} serves this file already" in done.stderr
        assert first.http.get("/readyz").status_code == 200
        assert first.end() == 0


def test_one_that_was_killed_is_dead_before_it_is_buried() -> None:
    """As in a container whose first process buries nobody."""
    with Child("import sys; sys.stdin.read()") as child:
        record = SimpleNamespace(host=socket.gethostname(), pid=child.pid)
        assert not _is_dead(record)
        os.kill(child.pid, signal.SIGKILL)
        eventually(lambda: ") Z " in Path(f"/proc/{child.pid}/stat").read_text(), "it has ended, and nobody buries it")
        assert _is_dead(record)
    assert _is_dead(record)
    assert not _is_dead(SimpleNamespace(host="elsewhere", pid=child.pid))


def test_one_that_was_killed_is_waited_for_as_long_as_its_lease_lives(place: Path) -> None:
    with Child(HOLDING, file(place)) as dead:
        dead.expect("held")
        dead.kill()
    replica = Replica(file(place), place, driver=NONE)
    eventually(lambda: replica.events("instance.waits"), "it waits")
    assert replica.end() == 0, "told to end, it waits no longer"
    replica.begin()
    eventually(lambda: len(replica.events("instance.waits")) == 2, "it waits anew")
    with holdfast.Client(file(place)) as client:
        assert client.leases.force_release("gateway:instance", actor="me", reason="it is dead")
    with replica:
        assert [each["pid"] for each in replica.events("instance.waits")] == [dead.pid, dead.pid]
        assert replica.end() == 0


def test_the_driver_beside_ends_with_us_and_its_sandboxes_go_on(place: Path) -> None:
    with Replica(file(place), place) as replica:
        [started] = replica.events("driver.started")
        driver = holdfast.reconciler.ProcessDriver(replica.told["driver"])
        driver.create("web", ["sleep", "1000"])
        pid = reaches(driver, "web", "Started").details["pid"]

        assert replica.end() == 0
        assert not runs(started["pid"])
        assert runs(pid)
        names = [each["event"] for each in replica.events()]
        assert names[-3:] == ["gateway.stopping", "driver.ended", "gateway.stopped"]

        replica.restart()
        found = driver.get("web")
        assert found is not None
        assert found.details["pid"] == pid, "adopted, and not started again"

        replica.end(signal.SIGKILL)
        started = replica.events("driver.started")[-1]
        eventually(lambda: not runs(started["pid"]), "the kernel has ended the driver of a replica that was killed")
        assert runs(pid)

    with Replica(f"sqlite:///{place / 'another.db'}", place, "--end-sandboxes") as replica:
        assert replica.end() == 0
    assert not runs(pid)


def test_a_driver_that_runs_there_is_used_and_one_that_dies_is_replaced(place: Path) -> None:
    with Daemon(place / "d") as daemon, Replica(file(place), place) as replica:
        assert replica.told["driver"] == daemon.address
        assert replica.events("driver.started") == []
        daemon.end()
        eventually(lambda: replica.events("driver.started"), "another is started in its place")
        assert holdfast.reconciler.ProcessDriver(replica.told["driver"]).list() == []
        assert replica.end() == 0
        assert not runs(replica.events("driver.started")[0]["pid"])


HANGING = """
    import asyncio
    from holdfast.gateway import server

    config = server._config

    def hurried(app, settings):
        made = config(app, settings)
        made.timeout_graceful_shutdown = 1
        return made

    server._config = hurried

    @feature.router.get("/hang")
    async def hang():
        started.set()
        await asyncio.Event().wait()

    @feature.router.get("/stream")
    async def stream():
        from fastapi.responses import StreamingResponse

        async def forever():
            yield b"begun\\n"
            await asyncio.Event().wait()

        return StreamingResponse(forever())

    started = asyncio.Event()

    @feature.router.get("/begun")
    async def begun():
        await started.wait()
"""


def test_requests_have_half_of_the_time_that_there_is_to_end() -> None:
    for within, half in ((600.0, 300), (20.0, 10), (1.0, 1)):
        settings = Settings("sqlite:///none.db", stop_within=within)
        assert gateway_server._config(MagicMock(), settings).timeout_graceful_shutdown == half


def test_neither_a_hanging_request_nor_a_stream_holds_up_the_end(place: Path, postgres_url: str) -> None:
    """Which it would for 600 s. Requests have a second here to come to their end."""
    with (
        Replica(postgres_url, place, feature=HANGING, driver=NONE) as replica,
        socket.create_connection(tuple(replica.address.removeprefix("http://").split(":"))) as line,  # type: ignore[arg-type]
        replica.http.stream("GET", "/stream") as stream,
    ):
        pieces = stream.iter_raw()
        assert next(pieces) == b"begun\n"
        line.sendall(b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n")
        httpx.get(f"{replica.address}/begun", timeout=PATIENCE)
        replica.process.send_signal(signal.SIGTERM)
        line.settimeout(PATIENCE)
        answer = line.recv(65536)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"application/problem+json" in answer
        with pytest.raises(httpx.RemoteProtocolError):
            next(pieces)
        assert replica.process.wait(PATIENCE) == 0, "and not 1, as of one that is overdue"
        assert not replica.events("gateway.overdue")
    assert rows(postgres_url) == {"lease": 0, "beat": 0}, "leases are released, not left to expire"
    assert backends(postgres_url) == []


STUBBORN = """
    import asyncio

    app._FIRST_PAUSE = 0.01
    mended = []

    def loops(gateway):
        async def stubborn():
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    pass

        times = []

        async def failing():
            times.append(1)
            if len(times) < 3:
                raise RuntimeError(f"attempt {len(times)}, postgresql://me:hunter2@db/app")
            mended.append(True)
            await asyncio.Event().wait()

        return [context.Loop("stubborn", stubborn), context.Loop("failing", failing)]

    feature.loops = loops

    @feature.router.get("/mended")
    async def has_mended() -> bool:
        return bool(mended)
"""


def test_a_loop_that_fails_runs_again_and_one_that_never_ends_does_not_hold_up_the_end(place: Path) -> None:
    with Replica(file(place), place, "--stop-within", "1", feature=STUBBORN, driver=NONE) as replica:
        eventually(lambda: replica.http.get("/mended").json(), "the third attempt goes well")
        failures = replica.events("loop.failed")
        assert [each["loop"] for each in failures] == ["failing", "failing"]
        assert failures[0]["again_in"] < failures[1]["again_in"]
        assert "attempt 1" in failures[0]["error"]
        assert "hunter2" not in replica.log.read_text(encoding="utf-8")
        assert replica.end() == 1
        assert [each["within"] for each in replica.events("gateway.stopping")] == [1]
        assert replica.events("gateway.overdue")


def test_told_twice_it_ends_at_once(place: Path) -> None:
    with Replica(file(place), place, feature=STUBBORN, driver=NONE) as replica:
        replica.process.send_signal(signal.SIGINT)
        eventually(lambda: replica.events("gateway.stopping"), "it was told")
        assert replica.end(signal.SIGTERM) == 1
        assert not replica.events("gateway.overdue"), "which it would be after 600 s"


@pytest.mark.parametrize(
    "listen",
    [lambda: gateway_server._stop_on_signal(60), lambda: stop_on_signals(daemon.STOP_SIGNALS)],
    ids=["serve", "driver"],
)
async def test_a_signal_that_comes_to_the_process_and_to_its_group_is_one_word(
    monkeypatch: pytest.MonkeyPatch, listen: Callable[[], asyncio.Event]
) -> None:
    """For as long as one may be the echo of the other: here for an hour, and then no longer."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(threading, "Timer", MagicMock())
    monkeypatch.setattr(_daemon, "ECHO", 3600.0)
    told, loop = listen(), asyncio.get_running_loop()
    last = signal.SIGRTMIN  # of several signals that wait the kernel delivers the one with the highest number last
    heard = asyncio.Event()
    loop.add_signal_handler(last, heard.set)
    try:
        for number, left, echo in (
            (signal.SIGTERM, [], 3600.0),
            (signal.SIGTERM, [], 3600.0),
            (signal.SIGINT, [1], 3600.0),
            (signal.SIGTERM, [1, 1], 0.0),
        ):
            monkeypatch.setattr(_daemon, "ECHO", echo)
            heard.clear()
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), last)
            await asyncio.wait_for(heard.wait(), PATIENCE)
            await asyncio.wait_for(told.wait(), PATIENCE)
            assert ended == left
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, last):
            loop.remove_signal_handler(number)


def test_what_it_cannot_do_is_told_in_a_line(place: Path) -> None:
    """Exit code 1, and nothing on stdout."""
    bare = server().database()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        options = ("--port", "0", "--driver", NONE)
        cases = [
            (bare, options, "holdfast migrate"),
            ("postgresql://127.0.0.1:1/none", options, "127.0.0.1"),
            (file(place), ("--port", port, *options[2:]), f"cannot listen on 127.0.0.1 port {port}"),
            (file(place), ("--port", "0", "--driver-folder", "/proc/d"), "cannot write to the folder /proc/d"),
        ]
        for url, flags, said in cases:
            done = call("serve", *flags, cwd=place, HOLDFAST_URL=url)
            assert (done.returncode, done.stdout) == (1, ""), done.stderr
            assert said in done.stderr.splitlines()[-1]


def test_an_address_that_leads_other_replicas_to_themselves_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    for url, told in (("sqlite:///app.db", []), ("postgresql://db1/app", ["gateway.unreachable"])):
        assert _advertised_address(Settings(url, host="0.0.0.0", port=80)) == "http://127.0.1.1:80"
        assert [each.getMessage() for each in caplog.records] == told


def test_on_a_terminal_it_writes_for_people(place: Path) -> None:
    with Running("serve", "--port", "0", "--driver", NONE, columns=80, cwd=place) as running:
        running.until_it_says("listening on http://127.0.0.1:")
        assert os.path.exists(place / "holdfast.db")  # noqa: PTH110
        code, said = running.end(signal.SIGTERM)
    assert code == 0
    assert f"no database is configured (--url, HOLDFAST_URL, url in holdfast.toml): using {place}/holdfast.db" in said
    assert "gateway.stopped" in said
