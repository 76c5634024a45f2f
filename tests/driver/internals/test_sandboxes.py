"""What a sandbox is given, what is known of it, and that nothing of it is left when it is gone."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import holdfast
from holdfast.reconciler import ProcessDriver
from tests.children import PATIENCE, eventually
from tests.driver.daemon import Daemon, reaches, runs, state, text

IGNORES_TERM = "trap '' TERM; echo $$; while :; do sleep 0.1; done"
LEAVES = """
import os, sys, time
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        print(os.getpid(), flush=True)
        os.write(writer, b".")
        os.execve("/bin/sleep", ["sleep", "1000"], {})
    os._exit(0)
os.wait()
os.read(reader, 1)
%s
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all that do not kill it."""
    with Daemon(tmp_path_factory.mktemp("sandboxes") / "d") as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[ProcessDriver]:
    """What a test leaves there is gone before the next one."""
    client = daemon.client()
    yield client
    for each in client.list():
        assert client.delete(each.id, grace=0, wait=PATIENCE)


def test_it_gets_its_arguments_environment_and_folder_and_nothing_of_the_drivers_secrets(
    start: Callable[..., Daemon], tmp_path: Path
) -> None:
    client = start(HOLDFAST_URL="postgresql://jane:hunter2@db/app", SECRET="hunter2").client()
    script = "pwd; echo $1 $COLOUR; cat; umask; env"
    client.create("a", ["sh", "-c", script, "sh", "one two"], env={"COLOUR": "grün"}, cwd=str(tmp_path))
    client.create("b", ["sh", "-c", "pwd; touch here"])
    ended = reaches(client, "a", "Exited")
    assert ended.details["exit_code"] == 0
    assert ended.details["env"] == ["COLOUR"], "names, no values"
    lines = text(client, "a").splitlines()
    assert lines[:3] == [str(tmp_path), "one two grün", "0022"]
    assert {line.partition("=")[0] for line in lines[3:]} >= {"PATH", "COLOUR", "HOLDFAST_SANDBOX"}
    assert "hunter2" not in text(client, "a")
    reaches(client, "b", "Exited")
    own = Path(text(client, "b").strip())
    assert (own / "here").exists()
    assert client.delete("b", wait=PATIENCE)
    eventually(lambda: not own.exists(), "its own folder goes with it")


def test_exit_codes_signals_and_failures_to_start_are_told_apart(client: ProcessDriver, tmp_path: Path) -> None:
    client.create("code", ["sh", "-c", "exit 3"])
    client.create("signal", ["sh", "-c", "kill -9 $$"])
    (tmp_path / "closed").mkdir(0)  # of a user who is not root, who finds nothing in it
    client.create("missing", ["no-such-program"], env={"PATH": f"{tmp_path / 'closed'}:{os.environ['PATH']}"})
    client.create("folder", ["true"], cwd=str(tmp_path / "not there"))
    client.create("denied", [str(tmp_path)])
    found = {id: reaches(client, id, "Exited", "Killed", "SpawnFailed") for id in
             ("code", "signal", "missing", "folder", "denied")}  # fmt: skip
    seen = {id: (each.conditions[0].reason, each.details["exit_code"], each.details["signal"])
            for id, each in found.items()}  # fmt: skip
    assert seen == {
        "code": ("Exited", 3, None),
        "signal": ("Killed", None, 9),
        "missing": ("SpawnFailed", 127, None),
        "folder": ("SpawnFailed", 126, None),
        "denied": ("SpawnFailed", 126, None),
    }
    assert all(each.conditions[0].terminal and each.conditions[0].status is False for each in found.values())
    assert "not there" in found["folder"].conditions[0].message
    assert {each.id for each in client.list()} == {*found}


def test_limits_are_set_and_the_one_on_cpu_time_ends_it(client: ProcessDriver) -> None:
    limits = {"memory_bytes": 2**30, "cpu_seconds": 7, "open_files": 64, "processes": 500}
    client.create("a", ["bash", "-c", "ulimit -v; ulimit -t; ulimit -n; ulimit -u; ulimit -c"], limits=limits)
    client.create("b", ["sh", "-c", "while :; do :; done"], limits={"cpu_seconds": 1})
    reaches(client, "a", "Exited")
    assert text(client, "a").split() == [str(2**20), "7", "64", "500", "0"]
    assert reaches(client, "b", "CpuLimit").details["signal"] == signal.SIGXCPU


def test_the_same_create_is_one_sandbox_however_often_and_another_spec_is_refused(
    client: ProcessDriver, tmp_path: Path
) -> None:
    count = tmp_path / "count"
    argv = ["sh", "-c", f"echo x >> {count}; exec sleep 1000"]
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: client.create("a", argv, owner="us"), range(32)))
    assert {each.details["owner"] for each in made} == {"us"}
    assert len({each.details["run"] for each in made}) == 1
    reaches(client, "a", "Started")
    eventually(lambda: count.exists() and count.read_text(), "it runs")
    assert count.read_text() == "x\n"
    for other in ({"grace": 1.0, "owner": "us"}, {"owner": "them"}, {}):
        with pytest.raises(holdfast.DriverError, match="another spec") as refused:
            client.create("a", argv, **other)
        assert refused.value.status == 409
    client.create("b", ["sh", "-c", IGNORES_TERM], grace=600)
    eventually(lambda: text(client, "b"), "it ignores TERM")
    assert not client.delete("b")
    with pytest.raises(holdfast.DriverError, match="being deleted"):
        client.create("b", ["sh", "-c", IGNORES_TERM], grace=600)
    assert client.delete("b", grace=0, wait=PATIENCE), "a shorter grace counts"


def test_delete_ends_the_whole_group_with_term_and_then_kill(client: ProcessDriver) -> None:
    client.create("polite", ["sh", "-c", "trap 'echo bye; kill $!; exit 0' TERM; sleep 1000 & echo $!; wait"])
    client.create("group", ["sh", "-c", "trap : TERM; sleep 1000 & echo $!; wait; wait $!"])  # ends as its child does
    client.create("rude", ["sh", "-c", f"({IGNORES_TERM}) & {IGNORES_TERM}"])
    client.create("stopped", ["sh", "-c", "echo $$; kill -STOP $$"])
    eventually(lambda: all(text(client, id) for id in ("polite", "group", "stopped")), "they run")
    eventually(lambda: len(text(client, "rude").split()) == 2, "both ignore TERM")
    pids = [int(pid) for id in ("polite", "group", "rude", "stopped") for pid in text(client, id).split()]
    watch = client.watch()
    assert next(watch) is None
    for id in ("polite", "group", "stopped"):
        assert client.delete(id, wait=PATIENCE)
    assert not client.delete("rude", grace=600)
    client.delete("rude", grace=0.3)
    assert client.delete("rude", grace=600, wait=PATIENCE), "the shortest grace counts"
    assert not any(map(runs, pids))
    assert client.list() == []
    assert client.get("rude") is None
    assert client.delete("rude"), "gone is gone"
    seen: list[holdfast.reconciler.DriverEvent] = []
    while [each.kind for each in seen].count("deleted") < 4:
        if (event := next(watch)) is not None:
            seen.append(event)
    watch.close()
    ends = {each.id: each.message for each in seen if each.kind == "status" and each.reason in ("Exited", "Killed")}
    assert ends == {
        "polite": "exit code 0",
        "group": "exit code 143",
        "stopped": "ended by signal 15, as was asked for",
        "rude": "ended by signal 9, as was asked for",
    }
    orders = [each.message for each in seen if (each.id, each.reason) == ("rude", "Ending")]
    assert orders == ["told to end within 600 s", "told to end within 0.3 s"]


@pytest.mark.parametrize("how", ["deleted", "ended"])
def test_a_daemon_that_left_its_session_and_its_environment_ends_with_the_sandbox(
    client: ProcessDriver, how: str
) -> None:
    """No descendant can leave its supervisor."""
    client.create("a", ["python3", "-c", LEAVES % ("time.sleep(1000)" if how == "deleted" else "")])
    eventually(lambda: text(client, "a"), "it has daemonised")
    stray = int(text(client, "a"))
    if how == "deleted":
        assert runs(stray)
        assert client.delete("a", wait=PATIENCE)
    else:
        assert reaches(client, "a", "Exited").details["exit_code"] == 0
    assert not runs(stray)


def test_deleting_only_a_certain_run_spares_the_next_one_of_that_id(client: ProcessDriver) -> None:
    first = client.create("a", ["sleep", "1000"]).details["run"]
    assert client.delete("a", wait=PATIENCE, run=first)
    second = client.create("a", ["sleep", "1000"]).details["run"]
    with pytest.raises(holdfast.DriverError, match="another run") as refused:
        client.delete("a", run=first)
    assert refused.value.status == 409
    assert reaches(client, "a", "Started").details["run"] == second != first


def test_the_number_of_sandboxes_is_bounded(start: Callable[..., Daemon]) -> None:
    client = start("--limit", "2").client()
    client.create("a", ["true"])
    client.create("b", ["true"])
    with pytest.raises(holdfast.DriverError, match="2 sandboxes") as refused:
        client.create("c", ["true"])
    assert refused.value.status == 429
    client.delete("a", wait=PATIENCE)
    client.create("c", ["true"])


def test_a_folder_that_somebody_removed_is_a_sandbox_that_is_gone(client: ProcessDriver, daemon: Daemon) -> None:
    client.create("a", ["sh", "-c", "echo $$; exec sleep 1000"])
    eventually(lambda: text(client, "a"), "it runs")
    pid, supervisor = int(text(client, "a")), daemon.supervisor("a")
    for id in ("ended", "again"):
        client.create(id, ["true"])
    before = [reaches(client, id, "Exited").details["run"] for id in ("ended", "again")]
    eventually(lambda: not runs(daemon.supervisor("ended")), "nobody is there any more who would tell")
    assert len(client.list()) == 3
    for folder in (daemon.box("a"), daemon.box("again"), daemon.box("ended")):
        for each in folder.iterdir():
            each.rmdir() if each.is_dir() else each.unlink()
        folder.rmdir()
    assert client.create("again", ["true"]).details["run"] not in before, "it is made, and not only said to be there"
    assert client.delete("again", wait=PATIENCE)
    eventually(lambda: not client.list(), "it is noticed, though nobody asks for them")
    assert (state(client, "a"), state(client, "ended")) == ("gone", "gone")
    eventually(lambda: not runs(pid) and not runs(supervisor), "its processes end")


async def test_a_place_that_does_not_even_let_us_in_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a machine that is off: nobody refuses."""
    monkeypatch.setattr("holdfast.driver.dial_async.asyncio.open_unix_connection", lambda _: asyncio.sleep(60))
    with pytest.raises(holdfast.DriverError, match=r"at unix:/x did not answer within 0\.01 s"):
        await holdfast.reconciler.AsyncProcessDriver("unix:/x", timeout=0.01).list()


async def test_the_async_client_does_the_same(start: Callable[..., Daemon]) -> None:
    daemon = start()
    driver = holdfast.reconciler.AsyncProcessDriver(daemon.address, timeout=PATIENCE)
    watch = driver.watch()
    assert await anext(watch) is None
    made = await driver.create("a", ["sh", "-c", "echo hello; exec sleep 1000"], limits={"open_files": 99})
    assert made.details["limits"] == {"open_files": 99}
    seen: list[holdfast.reconciler.DriverEvent] = []
    async with asyncio.timeout(PATIENCE):
        while not seen or seen[-1].reason != "Started":
            if (event := await anext(watch)) is not None:
                seen.append(event)
        assert {(each.kind, each.id) for each in seen} == {("status", "a")}
        assert [each.id for each in await driver.list()] == ["a"]
        pieces = driver.log("a", follow=True)
        assert await anext(pieces) == b"hello\n"
        assert await driver.get("nobody") is None
        assert await driver.get("no such/id") is None
        assert await driver.delete("a", wait=PATIENCE)
        assert [each async for each in pieces] == []
        while event is None or event.kind != "deleted":
            event = await anext(watch)
    await watch.aclose()
    with pytest.raises(holdfast.DriverError) as refused:
        await driver.create("no such/id", ["true"])
    assert refused.value.status == 400
    daemon.end()
    with pytest.raises(holdfast.DriverError, match="cannot be reached") as refused:
        await driver.list()
    assert refused.value.status is None


def test_a_client_that_gets_no_answer_says_so_in_time(daemon: Daemon) -> None:
    os.kill(daemon.process.pid, signal.SIGSTOP)
    with pytest.raises(holdfast.DriverError, match=r"did not answer within 0\.2 s") as refused:
        daemon.client(timeout=0.2).list()
    assert refused.value.status is None
    os.kill(daemon.process.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [((None,), {}), (("tcp:1",), {}), (("http://",), {}), (("http://x/path",), {}), (("unix:",), {}),
     (("unix:/x",), {"timeout": 0}), (("unix:/x",), {"timeout": math.inf}),
     (("unix:/x",), {"token": "a\r\nb: c"})],
)  # fmt: skip
def test_a_client_called_wrongly_says_so(
    arguments: tuple[str | None], options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_DRIVER", raising=False)
    with pytest.raises(ValueError, match=r"address|timeout|token"):
        ProcessDriver(*arguments, **options)  # type: ignore[arg-type]


def test_a_command_line_in_one_piece_is_not_taken_for_its_letters() -> None:
    with pytest.raises(TypeError, match=r"""a list of strings; for a shell command: \["sh", "-c", 'sleep 1'\]"""):
        ProcessDriver("unix:/nowhere").create("a", "sleep 1")
