"""A guarded process that loses its lease ends before the TTL does, even if hooks hang; paused, it never continues."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.lease.trust import margin
from holdfast.runtime.kill_timer import KillTimer
from holdfast.testing import Postgres, Proxy
from holdfast.testing.standstill import Standstill
from tests.children import NONE, PATIENCE, eventually, query, rows
from tests.conftest import migrated
from tests.raw_session import trials
from tests.recipes.guard.instances import (
    ASYNC,
    GUARDED,
    LONG,
    PAIRS,
    TTL,
    Instance,
    begun,
    ends_at,
    halt,
    halted,
    seconds_late,
    state,
)

KILLED = -signal.SIGKILL
NUMBERS = itertools.count(1)
"""Each key is used once: its expired lease may still be being purged, and a guard would be refused."""


@contextmanager
def instances(url: str, folder: Path, **terms: Any) -> Iterator[list[Instance]]:
    """In both flavours, each with a hook that hangs and a key of its own."""

    def begin(program: str) -> Instance:
        return Instance(url, f"key {next(NUMBERS)}", folder, "hang", program=program, **terms)

    with ExitStack() as stack:
        yield [begun(stack, partial(begin, program)) for program in (GUARDED, ASYNC)]


@pytest.fixture
def ended_in_time(standstill: Standstill) -> Callable[[list[Instance], Callable[[str], float]], None]:
    """Each hung on its way out, and was ended before its TTL was over; but for the time for which all stood still."""

    def check(guarded: list[Instance], truth: Callable[[str], float]) -> None:
        for instance in guarded:
            instance.wait()
            late = seconds_late(instance, truth(instance.key), standstill)
            assert instance.process.returncode == KILLED
            assert late < 0, f"{instance.key}: {late:.3f} s late"

    return check


@pytest.mark.realtime
@pytest.mark.timeout(600)
def test_the_database_is_stopped(tmp_path: Path, ended_in_time: Callable[..., None]) -> None:
    with Postgres.create() as server:
        url = migrated(server.database())
        for _ in range(trials(1)):
            with instances(url, tmp_path) as guarded:
                server.stop("immediate")
                for instance in guarded:
                    instance.wait()
                server.start()
                ended_in_time(guarded, lambda key: ends_at(url, key))


@pytest.mark.timeout(600)
def test_the_network_is_cut(postgres_url: str, tmp_path: Path, ended_in_time: Callable[..., None]) -> None:
    """No call is ever answered, and no error reported."""
    for _ in range(trials(1)):
        with Proxy(postgres_url) as way, instances(way.url, tmp_path) as guarded:
            way.stall()
            ended_in_time(guarded, lambda key: ends_at(postgres_url, key))


def steal(instance: Instance, thief: holdfast.Client) -> float | None:
    """Take its lease; when its TTL would have ended, or None if it was lost before. It stands still for that moment,
    and so does its heartbeat."""
    halt(instance.url, instance.pid)
    latest = ends_at(instance.url, instance.key)
    taken = thief.leases.force_release(instance.key, actor="thief", reason="because")
    instance.signal(signal.SIGCONT)
    return latest if taken else None


@pytest.mark.timeout(600)
def test_the_lease_is_stolen(postgres_url: str, tmp_path: Path) -> None:
    """With a TTL of ten minutes: it is the theft that ends them, and not the time."""
    terms = LONG | {"renew_every": 0.2}
    for _ in range(trials(1)):
        with instances(postgres_url, tmp_path, **terms) as guarded, holdfast.Client(postgres_url) as thief:
            for instance in guarded:
                assert steal(instance, thief)
            for instance in guarded:
                assert instance.wait() == KILLED


@pytest.mark.timeout(600)
def test_a_heartbeat_that_cannot_say_whose_lease_was_taken_is_no_proof(
    postgres_url: str, tmp_path: Path, standstill: Standstill
) -> None:
    """The beat is renewed, so the database answers; but one of its leases is gone, and which one is not to be had."""
    unsaid = "import os; os.environ['HOLDFAST_FAILPOINTS'] = 'before:beat_leases=error'\n" + ASYNC

    def begin() -> Instance:
        return Instance(postgres_url, f"key {next(NUMBERS)}", tmp_path, "hang", program=unsaid)

    with ExitStack() as stack:
        thief = stack.enter_context(holdfast.Client(postgres_url))
        for _ in range(5):
            instance = begun(stack, begin)
            if (latest := steal(instance, thief)) is not None:
                break
        assert latest is not None
        assert seconds_late(instance, latest, standstill) < 0


@pytest.mark.timeout(600)
def test_paused_and_resumed_after_the_ttl_it_executes_nothing(postgres_url: str, tmp_path: Path) -> None:
    """It would have written to its file at once: three threads of it do nothing else."""

    def begin() -> Instance:
        return Instance(postgres_url, f"key {next(NUMBERS)}", tmp_path)

    for _ in range(trials(1)):
        with ExitStack() as stack:
            guarded = [halted(stack, begin, lambda instance: instance.pid) for _ in range(2)]
            client = stack.enter_context(holdfast.Client(postgres_url))
            for instance in guarded:
                stack.enter_context(client.lease(instance.key, timeout=PATIENCE))
            for instance in guarded:
                eventually(lambda of=instance: state(of.pid) == "Z", "its timer has expired")  # type: ignore[misc]
            before = [instance.work() for instance in guarded]
            for instance in guarded:
                instance.signal(signal.SIGCONT)
            assert [instance.wait() for instance in guarded] == [KILLED] * len(guarded)
            assert [instance.work() for instance in guarded] == before


FIRST = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
CONTAINED = f"""
import os, sys
os.execvp("unshare", [*{FIRST!r}, sys.executable, "-u", "-c", {GUARDED!r}, *sys.argv[1:]])
"""


def inside(instance: Instance) -> int:
    """The pid of the first process in there, when each of its threads has a timer."""
    pid = int(Path(f"/proc/{instance.pid}/task/{instance.pid}/children").read_text())
    assert Path(f"/proc/{pid}/ns/pid").readlink() != Path("/proc/self/ns/pid").readlink()
    for _ in range(2):  # the one that is under way may have begun before the threads
        heartbeat(instance)
    return pid


FATAL = signal.SIGRTMAX - 1


def is_signalled(pid: int) -> bool:
    """Whether the fatal signal is pending in each thread of a process that is stopped. A timer is late on a CPU that
    stood still, and the lease may have been taken over on another one meanwhile."""
    texts = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    pending = [int(line.split()[1], 16) for text in texts for line in text.splitlines() if line.startswith("SigPnd:")]
    return all(signals >> (FATAL - 1) & 1 for signals in pending)


def heartbeat(instance: Instance) -> None:
    latest = ends_at(instance.url, instance.key)
    eventually(lambda: ends_at(instance.url, instance.key) > latest, "a heartbeat")


@pytest.mark.timeout(600)
def test_the_first_process_of_a_container_executes_nothing_either(postgres_url: str, tmp_path: Path) -> None:
    """From within it is deaf to SIGKILL: another signal ends it, by a handler that nothing but the kernel calls. Each
    thread gets its own, from the first heartbeat of its life on: three of them do nothing but write to a file.
    On PostgreSQL, where one that is stopped in the middle of a heartbeat does not block others."""
    if shutil.which("unshare") is None or subprocess.run([*FIRST, "true"], check=False).returncode:
        pytest.skip("this system does not let us make a namespace")

    def begin() -> Instance:
        return Instance(postgres_url, f"key {next(NUMBERS)}", tmp_path, program=CONTAINED, renew_every=0.2)

    for _ in range(trials(1)):
        pids: list[int] = []

        def which(instance: Instance, pids: list[int] = pids) -> int:
            pids.append(inside(instance))
            return pids[-1]

        with ExitStack() as stack:
            outside = halted(stack, begin, which)
            client = stack.enter_context(holdfast.Client(postgres_url))
            stack.enter_context(client.lease(outside.key, timeout=PATIENCE))
            first = pids[-1]
            eventually(lambda of=first: is_signalled(of), "its timers have expired")  # type: ignore[misc]
            before = outside.work()
            os.kill(first, signal.SIGCONT)
            assert outside.wait() == FATAL
            assert outside.work() == before


def test_a_short_outage_ends_a_strict_one_alone(postgres_url: str, tmp_path: Path) -> None:
    with (
        Proxy(postgres_url) as way,
        Instance(way.url, "strict", tmp_path, "strict", "tidy", ttl=600) as strict,
        Instance(way.url, "async", tmp_path, "strict", ttl=600, program=ASYNC) as on_a_loop,
        Instance(way.url, "patient", tmp_path, ttl=600) as patient,
    ):
        for instance in (strict, on_a_loop, patient):
            instance.expect("works")
        latest = ends_at(postgres_url, "patient")
        eventually(lambda: ends_at(postgres_url, "patient") > latest, "its heartbeat has a session")
        way.reset()
        assert strict.wait() == 70
        assert on_a_loop.wait() == 70
        way.heal()
        latest = ends_at(postgres_url, "patient")
        eventually(lambda: ends_at(postgres_url, "patient") > latest, "the others go on")
        output = strict.said()
        assert "guard 'strict' is lost" in output
        assert output.endswith("tidy"), "there was time to put things in order"
        assert "guard 'async' is lost" in on_a_loop.said()
        patient.say("end")
        patient.expect("done")
        assert patient.wait() == 0


@pytest.mark.parametrize(("engine", "program"), PAIRS, ids=["sqlite-sync", "postgres-async"])
def test_it_is_released_on_a_normal_exit_on_term_and_on_an_exception(
    request: pytest.FixtureRequest, tmp_path: Path, engine: str, program: str
) -> None:
    url = request.getfixturevalue(f"{engine}_url")
    with ExitStack() as stack:
        ends = ("normal", "term", "raise")
        normal, term, raising = (
            stack.enter_context(Instance(url, key, tmp_path, program=program, ttl=300, renew_every=100)) for key in ends
        )
        for instance in (normal, term, raising):
            instance.expect("works")
        normal.say("end")
        term.signal(signal.SIGTERM)
        if program is ASYNC:
            term.say("end")  # a thread of it waits for that; the other one may be gone already
        raising.say("raise")
        assert (normal.wait(), term.wait()) == (0, 128 + signal.SIGTERM)
        assert raising.wait() == (1 if program is GUARDED else 0)
    eventually(lambda: rows(url) == NONE, "no successor has to wait for 300 s")


@pytest.mark.skipif(not Path("/proc/self/timers").exists(), reason="the kernel does not show its timers")
def test_a_release_that_nobody_answers_does_not_end_it(postgres_url: str, tmp_path: Path) -> None:
    """The block is over: what comes after it is not the timer's to end, however long the database takes. A TERM
    meanwhile still lets the hooks run."""
    program = "import holdfast.recipes.guard as guard; guard._RELEASE_TIMEOUT = 600.0\n" + GUARDED
    with (
        Proxy(postgres_url) as way,
        Instance(way.url, "patient", tmp_path, program=program, **LONG) as patient,
        Instance(way.url, "told", tmp_path, "tidy", program=program, **LONG) as terminated,
    ):
        for instance in (patient, terminated):
            instance.expect("works")
        way.stall()
        for instance in (patient, terminated):
            instance.say("end")
        for instance in (patient, terminated):
            disarmed(instance)
        terminated.signal(signal.SIGTERM)
        terminated.expect("tidy")
        way.heal()
        assert terminated.wait() == 128 + signal.SIGTERM
        patient.expect("done")
        assert patient.wait() == 0


SHORT_RELEASE = """
import holdfast.recipes.guard as guard
guard._RELEASE_TIMEOUT = 0.2
guard.GuardGrant.release.__kwdefaults__["timeout"] = 600.0
"""


def test_a_release_that_nobody_answers_is_not_waited_for_any_longer_than_a_goodbye(
    postgres_url: str, tmp_path: Path
) -> None:
    """Here a release has ten minutes otherwise."""
    with (
        Proxy(postgres_url) as way,
        Instance(way.url, "key", tmp_path, program=SHORT_RELEASE + GUARDED, **LONG) as instance,
    ):
        instance.expect("works")
        way.stall()
        instance.say("end")
        instance.expect("done")
        way.heal()
        assert instance.wait() == 0


def disarmed(instance: Instance) -> None:
    timers = Path(f"/proc/{instance.pid}/timers")
    eventually(lambda: "ClockID" not in timers.read_text(), "its block is over")


NESTED = "import holdfast.recipes.guard as guard; guard.margin = lambda ttl: 60.0\n" + GUARDED.replace(
    "with client.guard", "outer = client.guard('outer', ttl=600, renew_every=100)\nwith outer, client.guard"
)
"""With a minute to end in order before the kernel does it."""


def test_of_two_guards_the_one_that_is_lost_ends_it_with_its_code(sqlite_url: str, tmp_path: Path) -> None:
    with (
        Instance(sqlite_url, "key", tmp_path, program=NESTED, ttl=600, renew_every=0.2) as instance,
        holdfast.Client(sqlite_url) as thief,
    ):
        instance.expect("works")
        assert thief.leases.force_release("key", actor="thief", reason="because")
        assert instance.wait() == 70
        assert "guard 'key' is lost" in instance.said()
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

    def begin() -> Instance:
        return Instance(sqlite_url, f"key {next(NUMBERS)}", tmp_path, program=FORKING, renew_every=0.2)

    def renewed(instance: Instance) -> int:
        heartbeat(instance)  # of the parent, which lives
        return instance.pid

    with ExitStack() as stack, holdfast.Client(sqlite_url) as client:
        instance = halted(stack, begin, renewed)
        with client.lease(instance.key, timeout=PATIENCE):
            before = instance.work()
            instance.signal(signal.SIGCONT)
            eventually(lambda: instance.process.poll() == KILLED, "the timer is the parent's still")
            assert instance.work() == before


def test_a_process_that_handles_the_signals_itself_is_ended_all_the_same(sqlite_url: str, tmp_path: Path) -> None:
    """One that ignores TERM, handles ALRM and never comes back from its own loop: by the kernel, which has ten minutes
    otherwise."""
    deaf = "import signal; [signal.signal(n, lambda *_: None) for n in (signal.SIGTERM, signal.SIGALRM)]; begin()"
    program = GUARDED.replace("begin()\n    line", f"{deaf}\n    line")
    with (
        Instance(sqlite_url, "key", tmp_path, program=program, ttl=600, renew_every=0.2) as instance,
        holdfast.Client(sqlite_url) as thief,
    ):
        instance.expect("works")
        assert thief.leases.force_release("key", actor="thief", reason="because")
        assert instance.wait() == KILLED


def test_a_thread_may_hold_it_and_the_process_ends_with_it(sqlite_url: str, tmp_path: Path) -> None:
    body = GUARDED.partition("with client.guard")
    program = (
        body[0]
        + "def hold():\n    "
        + ("with client.guard" + body[2]).replace("\n", "\n    ")
        + "\nthread = threading.Thread(target=hold)\nthread.start()\nthread.join()\n"
    )
    with (
        Instance(sqlite_url, "key", tmp_path, program=program, ttl=600, renew_every=0.2) as instance,
        holdfast.Client(sqlite_url) as thief,
    ):
        instance.expect("works")
        assert thief.leases.force_release("key", actor="thief", reason="because")
        assert instance.wait() < 0


def test_each_heartbeat_puts_the_timer_off(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a moment between the end of its trust and that of its TTL."""
    moments: list[tuple[float, float, float]] = []
    arm = KillTimer.ends_at

    def armed(self: KillTimer, when: float) -> None:
        if when < math.inf:
            trusted_until = guard._grant._trusted_until
            moments.append((trusted_until, when, trusted_until + margin(600)))
        arm(self, when)

    monkeypatch.setattr(KillTimer, "ends_at", armed)
    with holdfast.Client(sqlite_url) as client:
        guard: Any = client.guard("key", ttl=600, renew_every=0.05)
        with guard as grant:
            eventually(lambda: len(moments) > 3, "three heartbeats")
            until = grant._trusted_until
            eventually(lambda: moments[-1][0] > until, "the next one")
    assert moments == sorted(moments)
    for end_of_trust, when, end_of_ttl in moments:
        assert end_of_trust < when < end_of_ttl


@pytest.mark.realtime
def test_the_guard_outlives_a_busy_interpreter_and_many_heartbeats(sqlite_url: str, tmp_path: Path) -> None:
    """The timer of the kernel's is put off by each of them."""
    with Instance(sqlite_url, "key", tmp_path, ttl=TTL, renew_every=0.1) as instance:
        instance.expect("works")
        begun = ends_at(sqlite_url, "key")
        eventually(lambda: ends_at(sqlite_url, "key") > begun + TTL, "it has lived for longer than a TTL")
        assert query(sqlite_url, "select count(*) from holdfast_lease") == [(1,)]
        instance.say("end")
        assert instance.wait() == 0
