"""How processes end and divide while they hold locks: exit, kill, fork, signals."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import holdfast
from holdfast.testing.standstill import Standstill
from tests.children import ENDS, OURS, PATIENCE, Child, eventually, query
from tests.lock.looks import advisory, core

_HOLD = """
import os, signal, sys, holdfast
client = holdfast.Client(sys.argv[1])
grants = [client.lock("a").acquire(), client.lock(("agent", 7)).acquire()]
print("held")
{end}
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_killed_frees_its_locks_at_once(either: str, number: signal.Signals) -> None:
    with Child(_HOLD.format(end="signal.pause()"), either) as child, holdfast.Client(either) as other:
        child.expect("held")
        assert other.lock("a").try_acquire() is None
        child.signal(number)
        child.wait()
        for name in ("a", ("agent", 7)):
            other.lock(name).acquire(timeout=PATIENCE).release()


_FAMILY = """
import os, signal, sys, holdfast, psycopg
for number in range(5):
    if os.fork() == 0:
        client = holdfast.Client(sys.argv[1])
        grant = client.lock(f"a{number}").acquire()
        os.write(1, f"{number} {os.getpid()}\\n".encode())  # in one piece: print() would mix with that of the others
        signal.pause()
signal.pause()
"""


@pytest.mark.realtime
def test_a_kill_frees_in_milliseconds(either: str, standstill: Standstill) -> None:
    """The quickest of a few: no heartbeat, keepalive or expiry comes into it."""
    with (
        holdfast.Client(either) as other,
        ThreadPoolExecutor(5) as pool,
        Child(_FAMILY, either) as family,
    ):
        pids = {int(number): int(pid) for number, pid in (family.line().split() for _ in range(5))}
        other.lock("warm").acquire().release()

        def wait(number: int) -> float:
            with other.lock(f"a{number}", timeout=PATIENCE):
                return time.monotonic()

        waiting = [pool.submit(wait, number) for number in range(5)]
        waits = core(other).pool.waits
        eventually(lambda: len(waits) == 5 and all(each.opened for each in waits), "all in line")
        taken = []
        for number, waiter in enumerate(waiting):
            began = time.monotonic()
            os.kill(pids[number], signal.SIGKILL)
            taken.append(waiter.result(PATIENCE) - began - standstill.seconds(since=began))
        assert min(taken) < 0.1, taken


@pytest.mark.parametrize(("end", "status"), ENDS.values(), ids=ENDS)
def test_exit_without_close_frees_its_locks(either: str, end: str, status: int) -> None:
    with Child(_HOLD.format(end=end), either) as child:
        child.expect("held")
        assert child.wait() == status
    with holdfast.Client(either) as other:
        other.lock("a").acquire(timeout=PATIENCE).release()


def test_exit_of_an_async_program_without_close_frees_its_locks(either: str) -> None:
    program = """
    import asyncio, sys, holdfast
    async def main():
        client = holdfast.AsyncClient(sys.argv[1])
        await client.lock("a").acquire()
        print("held")
    asyncio.run(main())
    """
    with Child(program, either) as child:
        child.expect("held")
        assert child.wait() == 0
    with holdfast.Client(either) as other:
        other.lock("a").acquire(timeout=PATIENCE).release()


def test_a_killed_waiter_does_not_stand_in_the_way(postgres_url: str) -> None:
    program = """
    import sys, holdfast
    client = holdfast.Client(sys.argv[1])
    print("waiting")
    client.lock("a").acquire(timeout=600)
    """
    with holdfast.Client(postgres_url) as holder:
        held = holder.lock("a").acquire()
        with Child(program, postgres_url) as child:
            child.expect("waiting")
            eventually(lambda: len(advisory(postgres_url)) == 2, "it stands in line")
            child.kill()
            held.release()
            holder.lock("a").acquire(timeout=PATIENCE).release()
            eventually(lambda: advisory(postgres_url) == [], "nothing is left of it")


_FORK = """
import gc, os, sys, threading, holdfast
client = holdfast.Client(sys.argv[1])
grant = client.lock("a").acquire()
child = os.fork()
if child == 0:
    try:
        assert grant.lost
        try:
            grant.check()
        except holdfast.LockLost as error:
            assert "parent" in str(error)
        assert grant.release() is False
        assert client.lock("a").try_acquire() is None
        with client.lock("b") as own:
            assert not own.lost
        try:
            client.lock("a").acquire(timeout=0.1)
        except holdfast.AcquireTimeout:
            pass
        client.close()
        del client, grant
        gc.collect()
        print("child: content")
        sys.exit(0)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            print("child:", repr(error))
        raise
print("parent: held")
os.waitpid(child, 0)
input()
grant.check()
with client.lock("b", timeout=60):
    print("parent: kept", grant.release())
client.close()
"""


def test_the_parent_keeps_its_lock_through_the_childs_use_close_and_exit(either: str) -> None:
    with Child(_FORK, either) as parent, holdfast.Client(either) as other:
        assert {parent.line(), parent.line()} == {"parent: held", "child: content"}
        assert other.lock("a").try_acquire() is None
        parent.say("go on")
        parent.expect("parent: kept True")
        assert parent.wait() == 0
        other.lock("a").acquire(timeout=PATIENCE)


_ORPHAN = """
import os, sys, holdfast
client = holdfast.Client(sys.argv[1])
grant = client.lock("a").acquire()
if os.fork() == 0:
    print("child", os.getpid())
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""


def test_a_killed_parents_lock_is_freed_although_its_child_lives(either: str) -> None:
    with Child(_ORPHAN, either) as parent, holdfast.Client(either) as other:
        child = int(parent.line().split()[1])
        parent.kill()
        other.lock("a").acquire(timeout=PATIENCE).release()
        os.kill(child, 0)  # it lives: no ProcessLookupError


_BUSY_FORK = """
import os, sys, threading, time, holdfast
from holdfast.runtime import forks
forks.PATIENCE = 60  # seconds that a fork waits for threads to leave SQLite: after that the child does without the file
client = holdfast.Client(sys.argv[1])
def work(number):
    while True:
        with client.lock(f"w{number % 2}", timeout=60):
            pass
for number in range(4):
    threading.Thread(target=work, args=(number,), daemon=True).start()
kept = client.lock("kept").acquire()
for number in range(20):
    time.sleep(0.004)
    child = os.fork()
    if child == 0:
        client.lock(f"child {number}").acquire(timeout=60).release()
        assert client.lock("kept").try_acquire() is None
        os._exit(0)
    until = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
        time.sleep(0.005)
    if ended[1] or not ended[0]:
        print("child", number, ended)
        os._exit(1)
kept.check()
print("kept", kept.release())
os._exit(0)
"""


def test_a_child_forked_while_threads_lock_and_unlock_locks_as_well(either: str) -> None:
    with Child(_BUSY_FORK, either) as parent:
        parent.expect("kept True")


_HANDLER = """
import signal, sys, threading, time, holdfast
client = holdfast.Client(sys.argv[1])
other = client.lock("other").acquire()
over = False
def leave(*_):
    global over
    over = True  # where it interrupts a __del__, Python drops the SystemExit
    try:
        with client.lock("from the handler", timeout=600):
            pass
        print("handled", other.release())
    except holdfast.HoldfastError as error:
        print("told", type(error).__name__)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
def watch():
    while not client._locks.executor.pool.entries.keys() - known:
        time.sleep(0.001)
    print("ready")
known = set(client._locks.executor.pool.entries)
threading.Thread(target=watch, daemon=True).start()
{work}
"""


@pytest.mark.parametrize(
    "work",
    ["while not over:\n    with client.lock('a'): pass", "client.lock('held elsewhere').acquire(timeout=600)"],
    ids=["locking", "waiting"],
)
def test_a_signal_handler_that_locks_does_not_wait_for_the_thread_it_interrupts(either: str, work: str) -> None:
    with (
        holdfast.Client(either) as holder,
        holder.lock("held elsewhere"),
        Child(_HANDLER.format(work=work), either) as child,
    ):
        child.expect("ready")
        child.signal(signal.SIGTERM)
        assert child.line().startswith(("handled", "told"))
        assert child.wait() == 0
        holder.lock("other").acquire(timeout=PATIENCE)


_UNINTERRUPTED = """
import os, signal, sys, threading, time, holdfast
client = holdfast.Client(sys.argv[1])
client.lock("warm").acquire().release()
def leave(*_):
    print("handled")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
main = threading.main_thread()
def interrupt():
    def state():
        return open(f"/proc/self/task/{os.getpid()}/stat").read().rpartition(")")[2].split()[0]
    while sys._current_frames()[main.ident].f_code.co_name != "wait" or state() != "S":
        time.sleep(0.001)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=interrupt, daemon=True).start()
client.lock("held elsewhere").acquire(timeout=600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_signal_that_does_not_interrupt_the_wait_is_handled_during_it(either: str) -> None:
    """One that comes just before the wait does not, nor one that the kernel delivers to another thread."""
    with (
        holdfast.Client(either) as holder,
        holder.lock("held elsewhere"),
        Child(_UNINTERRUPTED, either) as child,
    ):
        child.expect("handled")
        assert child.wait() == 0


_CTRL_C = """
import sys, threading, time, holdfast
client = holdfast.Client(sys.argv[1])
client.lock("warm").acquire().release()
def follow():
    client.lock("a").acquire(timeout=600)
    print("follower has it")
def stand_behind():
    until(lambda: waiters() == 1)
    threading.Thread(target=follow).start()
    until(lambda: waiters() == 2)
    print("waiting")
def waiters():
    return sum(len(entry.queue) for entry in list(client._locks.executor.pool.entries.values()))
def until(condition):
    while not condition():
        time.sleep(0.005)
try:
    threading.Thread(target=stand_behind).start()
    client.lock("a").acquire(timeout=600)
except KeyboardInterrupt:
    print("interrupted")
sys.stdin.read()
"""


def test_ctrl_c_ends_a_wait_at_once_and_whoever_stands_behind_goes_on(either: str) -> None:
    with holdfast.Client(either) as holder:
        held = holder.lock("a").acquire()
        with Child(_CTRL_C, either) as child:
            child.expect("waiting")
            child.signal(signal.SIGINT)
            child.expect("interrupted")
            held.release()
            child.expect("follower has it")


_CTRL_C_ASYNC = """
import asyncio, sys, holdfast
async def main():
    async with holdfast.AsyncClient(sys.argv[1]) as client:
        async with client.lock("mine"):
            await client.lock("warm").try_acquire()
            waiting = asyncio.create_task(client.lock("a").acquire(timeout=600))
            while not client._locks.executor.pool.counts().waiting:
                await asyncio.sleep(0.005)
            print("waiting", flush=True)
            await waiting
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.read()
"""


def test_ctrl_c_in_asyncio_ends_a_wait_and_leaves_no_lock(either: str) -> None:
    with holdfast.Client(either) as holder:
        held = holder.lock("a").acquire()
        with Child(_CTRL_C_ASYNC, either) as child:
            child.expect("waiting")
            child.signal(signal.SIGINT)
            child.expect("interrupted")
            held.release()
            for name in ("a", "mine"):
                holder.lock(name).acquire(timeout=PATIENCE).release()


@pytest.mark.parametrize("known", [True, False])
def test_an_event_loop_closed_without_close_frees_its_locks(either: str, known: bool) -> None:
    """The process lives on, and so may the client, which somebody still knows. What nobody knows any more is locked as
    long as the loop is there."""
    clients = []
    with holdfast.Client(either) as other:

        async def forget() -> None:
            client = holdfast.AsyncClient(either)
            await client.lock("a").acquire()
            if known:
                clients.append(client)
            del client
            await asyncio.sleep(0)
            gc.collect()
            assert other.lock("a").try_acquire() is None

        asyncio.run(forget())
        gc.collect()
        other.lock("a").acquire(timeout=PATIENCE).release()


def test_sessions_of_threads_are_bounded_while_many_wait(postgres_url: str) -> None:
    asked = f"select count(*) from pg_stat_activity where {OURS}"
    program = """
    import sys, threading, holdfast
    client = holdfast.Client(sys.argv[1], lock_sessions=2, lock_overflow=1)
    def wait(number):
        client.lock(f"k{number}").acquire(timeout=600).release()
    threads = [threading.Thread(target=wait, args=(number,)) for number in range(12)]
    [thread.start() for thread in threads]
    print("waiting")
    [thread.join() for thread in threads]
    print("everybody had it")
    """
    with holdfast.Client(postgres_url) as holder:
        held = [holder.lock(f"k{number}").acquire() for number in range(12)]
        before = query(postgres_url, asked)[0][0]
        with Child(program, postgres_url) as child:
            child.expect("waiting")
            eventually(lambda: query(postgres_url, asked)[0][0] == before + 3, "as many as there may be")
            most = max(query(postgres_url, asked)[0][0] for _ in range(30))
            assert most == before + 3
            assert [grant.release() for grant in held] == [True] * 12
            child.expect("everybody had it")
