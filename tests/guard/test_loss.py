"""A guarded process that loses its lease is gone before the TTL ends, whatever its hooks do; a paused one for good."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast.testing import Postgres, Proxy
from tests.children import NONE, eventually, query, rows
from tests.conftest import migrated
from tests.guard.instances import ASYNC, GUARDED, HEARTBEAT, TTL, Instance, ends_at, stand_still
from tests.raw import trials

KILLED = -signal.SIGKILL
NUMBERS = itertools.count(1)
"""A key is used once: its expired lease is just being purged, maybe, and a guard does not wait for that."""


@contextmanager
def instances(url: str, folder: Path, *flags: str) -> Iterator[list[Instance]]:
    """In both flavours, each with a hook that hangs and a key of its own."""
    with ExitStack() as stack:
        found = [
            stack.enter_context(Instance(url, f"key {next(NUMBERS)}", folder, "hang", *flags, program=program))
            for program in (GUARDED, GUARDED, ASYNC)
        ]
        for each in found:
            each.expect("works")
        yield found


def ended_in_time(found: list[Instance], truth: Callable[[str], float]) -> None:
    """Each was told to end, hung, and was ended before its TTL was over."""
    for each in found:
        ended = each.worked_until()
        assert each.process.returncode == KILLED
        assert ended < truth(each.key), f"{each.key}: {ended - truth(each.key):.3f} s late"
        assert f"guard '{each.key}' is lost" in each.said()


@pytest.mark.timeout(600)
def test_the_database_is_stopped(tmp_path: Path) -> None:
    with Postgres.create() as server:
        url = migrated(server.database())
        for _ in range(trials(1)):
            with instances(url, tmp_path) as found:
                server.stop("immediate")
                for each in found:
                    each.wait()
                server.start()
                ended_in_time(found, lambda key: ends_at(url, key))


@pytest.mark.timeout(600)
def test_the_network_is_cut(postgres_url: str, tmp_path: Path) -> None:
    """Nobody is told: what was asked is never answered."""
    for _ in range(trials(1)):
        with Proxy(postgres_url) as way, instances(way.url, tmp_path) as found:
            way.stall()
            ended_in_time(found, lambda key: ends_at(postgres_url, key))


def steal(found: list[Instance], url: str, thief: holdfast.Client) -> dict[str, float]:
    """Take it from each; when its TTL ended. It stands still for that moment, and so does its heartbeat."""
    latest = {}
    for each in found:
        stand_still(each.pid)
        latest[each.key] = ends_at(url, each.key)
        assert thief.leases.force_release(each.key, actor="thief", reason="because")
        each.signal(signal.SIGCONT)
    return latest


@pytest.mark.timeout(600)
def test_the_lease_is_stolen(either: str, tmp_path: Path) -> None:
    for _ in range(trials(1)):
        with instances(either, tmp_path) as found, holdfast.Client(either) as thief:
            ended_in_time(found, steal(found, either, thief).__getitem__)


def test_a_heartbeat_that_cannot_say_whose_lease_was_taken_is_no_proof(
    either: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beat is renewed, so the database answers; but one of its leases is gone, and which one is not to be had."""
    monkeypatch.setenv("HOLDFAST_FAILPOINTS", "before:beat_leases=error")
    with instances(either, tmp_path) as found:
        monkeypatch.delenv("HOLDFAST_FAILPOINTS")
        with holdfast.Client(either) as thief:
            latest = steal(found, either, thief)
            for each in found:
                assert each.worked_until() < latest[each.key]


@pytest.mark.timeout(600)
def test_paused_and_resumed_after_the_ttl_it_executes_nothing(either: str, tmp_path: Path) -> None:
    """It would have written to its file at once: three threads of it do nothing else."""
    for _ in range(trials(1)):
        with ExitStack() as stack:
            found = [stack.enter_context(Instance(either, f"key {number}", tmp_path)) for number in range(6)]
            for each in found:
                each.expect("works")
            for each in found:
                stand_still(each.pid)
            client = stack.enter_context(holdfast.Client(either))
            for each in found:
                stack.enter_context(client.lease(each.key, timeout=60))
            before = [each.work() for each in found]
            assert all(len(work) > len(b"began") for work in before)
            for each in found:
                each.signal(signal.SIGCONT)
            assert [each.wait() for each in found] == [KILLED] * len(found)
            assert [each.work() for each in found] == before


FIRST = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
CONTAINED = f"""
import os, sys
os.execvp("unshare", [*{FIRST!r}, sys.executable, "-u", "-c", {GUARDED!r}, *sys.argv[1:]])
"""


def heartbeat(url: str, key: str) -> None:
    latest = ends_at(url, key)
    eventually(lambda: ends_at(url, key) > latest, "a heartbeat")


@pytest.mark.timeout(600)
def test_the_first_process_of_a_container_executes_nothing_either(postgres_url: str, tmp_path: Path) -> None:
    """From within it is deaf to SIGKILL: another signal ends it, by a handler that nothing but the kernel calls. Each
    thread gets its own, from the first heartbeat of its life on: three of them do nothing but write to a file.
    On PostgreSQL, where one that is stopped in the middle of a heartbeat keeps nobody else from asking."""
    if shutil.which("unshare") is None or subprocess.run([*FIRST, "true"], check=False).returncode:
        pytest.skip("this system does not let us make a namespace")
    for _ in range(trials(1)):
        with ExitStack() as stack:
            keys = [f"key {next(NUMBERS)}" for _ in range(3)]
            outside = [stack.enter_context(Instance(postgres_url, key, tmp_path, program=CONTAINED)) for key in keys]
            for each in outside:
                each.expect("works")
            inside = [int(Path(f"/proc/{each.pid}/task/{each.pid}/children").read_text()) for each in outside]
            for pid, key in zip(inside, keys, strict=True):
                assert Path(f"/proc/{pid}/ns/pid").readlink() != Path("/proc/self/ns/pid").readlink()
                for _ in range(2):  # the one that is under way may have begun before the threads
                    heartbeat(postgres_url, key)
            for pid in inside:
                stand_still(pid)
            client = stack.enter_context(holdfast.Client(postgres_url))
            for key in keys:
                stack.enter_context(client.lease(key, timeout=60))
            before = [each.work() for each in outside]
            for pid in inside:
                os.kill(pid, signal.SIGCONT)
            assert [each.wait() for each in outside] == [63] * len(outside)
            assert [each.work() for each in outside] == before


def test_a_short_outage_ends_a_strict_one_alone(postgres_url: str, tmp_path: Path) -> None:
    with (
        Proxy(postgres_url) as way,
        Instance(way.url, "strict", tmp_path, "strict", "tidy", ttl=60) as strict,
        Instance(way.url, "async", tmp_path, "strict", ttl=60, program=ASYNC) as on_a_loop,
        Instance(way.url, "patient", tmp_path, ttl=60) as patient,
    ):
        for each in (strict, on_a_loop, patient):
            each.expect("works")
        latest = ends_at(postgres_url, "patient")
        eventually(lambda: ends_at(postgres_url, "patient") > latest, "its heartbeat has a session")
        way.reset()
        assert strict.wait() == 70
        assert on_a_loop.wait() == 70
        way.heal()
        latest = ends_at(postgres_url, "patient")
        eventually(lambda: ends_at(postgres_url, "patient") > latest, "the others go on")
        said = strict.said()
        assert "is lost" in said
        assert said.endswith("tidy"), "there was time to put things in order"
        patient.say("end")
        patient.expect("done")
        assert patient.wait() == 0


@pytest.mark.parametrize("program", [GUARDED, ASYNC], ids=["sync", "async"])
def test_it_is_released_on_a_normal_exit_on_term_and_on_an_exception(either: str, tmp_path: Path, program: str) -> None:
    with ExitStack() as stack:
        ends = ("normal", "term", "raise")
        normal, term, raising = (
            stack.enter_context(Instance(either, key, tmp_path, program=program, ttl=300, heartbeat=100))
            for key in ends
        )
        for each in (normal, term, raising):
            each.expect("works")
        normal.say("end")
        term.signal(signal.SIGTERM)
        if program is ASYNC:
            term.say("end")  # a thread of it waits for that; the other one may be gone already
        raising.say("raise")
        assert (normal.wait(), term.wait()) == (0, 128 + signal.SIGTERM)
        assert raising.wait() == (1 if program is GUARDED else 0)
    eventually(lambda: rows(either) == NONE, "nobody has to wait for 300 s")


@pytest.mark.skipif(not Path("/proc/self/timers").exists(), reason="the kernel does not show its timers")
def test_a_release_that_nobody_answers_does_not_end_it(postgres_url: str, tmp_path: Path) -> None:
    """The block is over: what comes after it is not the timer's to end, however long the database takes. A TERM
    meanwhile still lets the hooks run."""
    with (
        Proxy(postgres_url) as way,
        Instance(way.url, "patient", tmp_path, ttl=2.0) as patient,
        Instance(way.url, "told", tmp_path, "tidy", ttl=2.0) as told,
    ):
        for each in (patient, told):
            each.expect("works")
        way.stall()
        for each in (patient, told):
            each.say("end")
        eventually(lambda: "ClockID" not in Path(f"/proc/{told.pid}/timers").read_text(), "its block is over")
        told.signal(signal.SIGTERM)
        assert told.wait() == 128 + signal.SIGTERM
        told.expect("tidy")
        patient.expect("done")


NESTED = GUARDED.replace("with client.guard", "outer = client.guard('outer')\nwith outer, client.guard")


def test_of_two_guards_the_one_that_is_lost_ends_it_with_its_code(sqlite_url: str, tmp_path: Path) -> None:
    with (
        Instance(sqlite_url, "key", tmp_path, program=NESTED, ttl=60, heartbeat=0.2) as instance,
        holdfast.Client(sqlite_url) as thief,
    ):
        instance.expect("works")
        assert thief.leases.force_release("key", actor="thief", reason="because")
        assert instance.wait() == 70
        assert [each.name for each in thief.leases.list()] == [], "the other one is given back"


FORKING = GUARDED.replace(
    "    begin()",
    """
    pid = os.fork()
    if pid == 0:
        assert grant.lost
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    grant.check()
    begin()
""",
)


def test_a_fork_that_leaves_the_block_takes_nothing_with_it(sqlite_url: str, tmp_path: Path) -> None:
    with Instance(sqlite_url, "key", tmp_path, program=FORKING) as instance:
        instance.expect("works")
        latest = ends_at(sqlite_url, "key")
        eventually(lambda: ends_at(sqlite_url, "key") > latest, "the parent is renewed, and lives")
        instance.signal(signal.SIGSTOP)
        with holdfast.Client(sqlite_url) as client, client.lease("key", timeout=30):
            eventually(lambda: instance.process.poll() == KILLED, "the timer is the parent's still")


def test_a_process_that_handles_the_signals_itself_is_ended_all_the_same(sqlite_url: str, tmp_path: Path) -> None:
    """One that ignores TERM, handles ALRM and never comes back from its own loop."""
    deaf = "import signal; [signal.signal(n, lambda *_: None) for n in (signal.SIGTERM, signal.SIGALRM)]; begin()"
    program = GUARDED.replace("begin()\n    line", f"{deaf}\n    line")
    with Instance(sqlite_url, "key", tmp_path, program=program) as instance, holdfast.Client(sqlite_url) as thief:
        instance.expect("works")
        latest = ends_at(sqlite_url, "key") + HEARTBEAT
        assert thief.leases.force_release("key", actor="thief", reason="because")
        assert instance.worked_until() < latest
        assert instance.process.returncode == KILLED


def test_a_thread_may_hold_it_and_the_process_ends_with_it(sqlite_url: str, tmp_path: Path) -> None:
    body = GUARDED.partition("with client.guard")
    program = (
        body[0]
        + "def hold():\n    "
        + ("with client.guard" + body[2]).replace("\n", "\n    ")
        + "\nthread = threading.Thread(target=hold)\nthread.start()\nthread.join()\n"
    )
    with Instance(sqlite_url, "key", tmp_path, program=program) as instance, holdfast.Client(sqlite_url) as thief:
        instance.expect("works")
        assert thief.leases.force_release("key", actor="thief", reason="because")
        assert instance.wait() < 0


def test_the_guard_outlives_a_busy_interpreter_and_many_heartbeats(sqlite_url: str, tmp_path: Path) -> None:
    """The timer is put off by each of them."""
    with Instance(sqlite_url, "key", tmp_path, ttl=TTL, heartbeat=0.1) as instance:
        instance.expect("works")
        begun = ends_at(sqlite_url, "key")
        eventually(lambda: ends_at(sqlite_url, "key") > begun + TTL, "it has lived for longer than a TTL")
        assert query(sqlite_url, "select count(*) from holdfast_lease") == [(1,)]
        instance.say("end")
        assert instance.wait() == 0
