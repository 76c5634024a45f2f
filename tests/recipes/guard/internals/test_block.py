"""Inside the guard's block nothing frees its lease, and a guard that is refused, lost or left leaves nothing behind."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing.standstill import Standstill
from tests.children import NONE, PATIENCE, eventually, rows
from tests.recipes.guard.instances import GUARDED, LONG, Instance, begun, ends_at, seconds_late

Connect = Callable[..., Any]
TIMERS = Path("/proc/self/timers")


def timers() -> int:
    return TIMERS.read_text().count("ClockID:")


def test_neither_a_release_nor_a_close_inside_the_block_frees_the_lease(connect: Connect, either: str) -> None:
    client, other = connect(either), connect(either)
    with client.guard("key", **LONG) as grant:
        for free in (grant.release, client.close):
            with pytest.raises(RuntimeError, match="block"):
                free()
        with pytest.raises(RuntimeError, match="block"), grant:
            grant.check()
        grant.check()
        assert grant.renew()
        assert other.lease("key").try_acquire() is None
        with other.lease("work"):
            pass
    assert other.leases.list() == []
    client.close()


def test_a_guard_left_with_a_transaction_open_that_it_protects_is_free_when_that_ends(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be given back before; and a process that goes on must not renew it for ever."""
    monkeypatch.setattr("holdfast.lease.grant._RELEASE_PATIENCE", 0.1)
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as connection:
        with client.guard("key", ttl=600, renew_every=0.1) as grant:
            grant.protect(connection)
        connection.rollback()
        eventually(lambda: client.leases.list() == [], "it is free")


def test_a_fork_may_close_its_client_inside_the_block(sqlite_url: str, tmp_path: Path) -> None:
    """There nothing is guarded, and nothing of the parent's is freed."""
    program = GUARDED.replace(
        "    begin()",
        """
    pid = os.fork()
    if pid == 0:
        client.close()
        os._exit(0 if not grant.release() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    grant.check()
    begin()
""",
    )
    with Instance(sqlite_url, "key", tmp_path, program=program, **LONG) as instance:
        instance.expect("works")
        instance.say("end")
        instance.expect("done")
        assert instance.wait() == 0


def test_a_process_that_ends_while_a_thread_is_in_the_block_does_not_free_it(
    sqlite_url: str, tmp_path: Path, standstill: Standstill
) -> None:
    """The thread goes on while the hooks run: the lease expires, and the kernel's timer is still armed."""
    body = GUARDED.partition("with client.guard")
    held = ("with client.guard" + body[2]).replace("\n", "\n    ").replace("sys.stdin.readline()", "hang()")
    program = (
        f"{body[0]}def hold():\n    {held}\nthreading.Thread(target=hold, daemon=True).start()\nsys.stdin.readline()\n"
    )
    numbers = itertools.count(1)

    def begin() -> Instance:
        return Instance(sqlite_url, f"key {next(numbers)}", tmp_path, "hang", program=program)

    with ExitStack() as stack, holdfast.Client(sqlite_url) as client:
        instance = begun(stack, begin)
        instance.say("end")
        with client.lease(instance.key, timeout=PATIENCE):
            assert instance.wait() == -signal.SIGKILL
        assert instance.work().startswith(b"began")
        [record] = [each for each in client.leases.history(instance.key) if each.outcome == "expired"]
        assert seconds_late(instance, record.ended_at.timestamp(), standstill) <= 0


@pytest.mark.skipif(not TIMERS.exists(), reason="the kernel does not show its timers")
def test_no_guard_leaves_a_timer_or_a_handler_behind(connect: Connect, either: str, tmp_path: Path) -> None:
    client, other = connect(either), connect(either)
    before = timers(), signal.getsignal(signal.SIGTERM)
    closed = connect(either)
    closed.close()
    with other.lease("key"):
        for _ in range(3):
            for attempt in (client.guard("key", **LONG), closed.guard("key", **LONG)):
                with pytest.raises(SystemExit), attempt:
                    pytest.fail("nothing runs")
    guard = client.guard("key", **LONG)
    for _ in range(2):
        with guard:
            assert timers() == before[0] + 1
    with pytest.raises(ZeroDivisionError), guard:
        _ = 1 / 0
    assert (timers(), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.skipif(not TIMERS.exists(), reason="the kernel does not show its timers")
def test_one_that_is_entered_twice_at_once_keeps_its_timer(sqlite_url: str) -> None:
    """The second, in another thread, comes when the first is granted and not in its block yet."""
    before, late = timers(), []
    with holdfast.Client(sqlite_url) as client:
        guard: Any = client.guard("key", **LONG)
        arm = guard._arm

        def enter() -> None:
            with pytest.raises(RuntimeError, match="entered already"), guard:
                pytest.fail("not twice")
            late.append("refused")

        def overtaken(grant: Any) -> None:
            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()
            arm(grant)

        guard._arm = overtaken
        with guard:
            assert (late, timers()) == (["refused"], before + 1)
    assert timers() == before


def test_a_heartbeat_that_comes_as_the_block_is_left_arms_nothing(sqlite_url: str) -> None:
    """It was under way when the lease was released, and comes back when the guard has stood down."""
    with holdfast.Client(sqlite_url) as client:
        guard: Any = client.guard("key", **LONG)
        with guard as grant:
            pass
        guard._on_beat(None, False)
        guard._on_beat(holdfast.LeaseLost("late"), True)
        assert (guard.token, guard._kill_timer) == (None, None)
        guard._lock.acquire()
        late = threading.Thread(target=guard._on_beat, args=(None, False))
        late.start()
        guard._lock.release()
        late.join()
        with guard as again:
            assert again.fence > grant.fence, "and it can be entered again"
    assert rows(sqlite_url) == NONE


@pytest.mark.parametrize("lost", [True, False])
def test_a_heartbeat_that_fails_before_the_gate_closes_it(sqlite_url: str, lost: bool) -> None:
    """Between the grant and the block, in the keeper's thread: nothing is entered, and nothing is wiped any more."""
    with holdfast.Client(sqlite_url) as client:
        client.lease("other", ttl=60, auto_renew=False).acquire()
        guard: Any = client.guard("key", wipe_on_start=True, **LONG)
        arm = guard._arm

        def late(grant: Any) -> None:
            guard._on_beat(holdfast.LeaseLost("stolen"), lost)
            arm(grant)

        guard._arm = late
        if lost:
            with pytest.raises(SystemExit) as ended, guard:
                pytest.fail("nothing runs")
            assert ended.value.code == 69
            assert [each.name for each in client.leases.list()] == ["other"]
        else:
            with guard:
                assert [each.name for each in client.leases.list()] == ["key"]


def test_a_refused_guard_frees_nothing_of_the_others(either: str) -> None:
    with holdfast.Client(either) as client, client.guard("key", **LONG):
        latest = ends_at(either, "key")
        with holdfast.Client(either) as other, pytest.raises(SystemExit), other.guard("key", **LONG):
            pytest.fail("nothing runs")
        assert ends_at(either, "key") >= latest
        assert os.getpid() > 0
    eventually(lambda: rows(either) == NONE, "nothing is left")
