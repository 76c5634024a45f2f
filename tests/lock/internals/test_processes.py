"""How processes end and divide while they hold locks: exit, kill, fork, signals."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import pytest

import holdfast
from holdfast.testing.standstill import Standstill
from tests.children import ENDS, HANG, OURS, PATIENCE, Child, eventually, query
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
        send = child.signal if work.startswith("client") else child.signal_anywhere
        send(signal.SIGTERM)
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


_TURNS = """
import os, sys, threading, time, holdfast
from holdfast.database.url import parse
from holdfast.lock import file_locks
from holdfast.lock.executor_async import open_wire
from holdfast.lock.terms import number
from tests.lock.looks import core

url, history, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
client = holdfast.Client(url)
lock = client.lock("a", timeout=600)
client.lock("warm").acquire().release()
events = os.open(history, os.O_WRONLY | os.O_APPEND)
if not seconds:
    file_locks.PAUSED = 600.0  # else a process that the machine does not run for a moment is overtaken
    queue, byte = open_wire(parse(url), 1.0)._queue, number(lock._target.key)

def wait_for_rival():
    while not queue.has_waiters(byte):
        time.sleep(0.001)
    swept = threading.Event()
    core(client).post(lambda: (core(client).sweep(), swept.set()))
    swept.wait()

print("ready", flush=True)
sys.stdin.readline()
while True:
    os.write(events, b"asks %d\\n" % os.getpid())
    with lock:
        os.write(events, b"has %d\\n" % os.getpid())
        time.sleep(seconds) if seconds else wait_for_rival()
"""


class Rivals:
    """Processes that take one lock, release it and ask again at once. ``seconds``: how long each holds it. 0: until
    another one waits for it, and the sweep has noticed that."""

    def __init__(self, url: str, history: Path, count: int, seconds: float) -> None:
        self._history = history
        history.touch()
        self._children = [Child(_TURNS, url, history, seconds) for _ in range(count)]

    def __enter__(self) -> Self:
        for child in self._children:
            child.expect("ready")
        for child in self._children:
            child.say("go")
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.__exit__(None, None, None)

    def turns(self) -> list[int]:
        """How often each has had the lock."""
        counts = Counter(pid for verb, pid in self._events() if verb == "has")
        return [counts[child.pid] for child in self._children]

    def most_overtaken(self) -> int:
        """How often others have had the lock while one of them waited for it, at most."""
        most, waiting = 0, Counter[int]()
        for verb, pid in self._events():
            if verb == "asks":
                waiting[pid] = 0
            else:
                most = max(most, waiting.pop(pid))
                waiting.update(list(waiting))
        return max(most, *waiting.values(), 0)

    def _events(self) -> list[tuple[str, int]]:
        lines = [line.split() for line in self._history.read_text().splitlines()]
        return [(verb, int(pid)) for verb, pid in lines]


def test_of_two_processes_that_ask_again_at_once_none_is_starved(sqlite_url: str, tmp_path: Path) -> None:
    """The kernel has no queue: without ours, a waiter that polls is overtaken a hundred times."""
    with Rivals(sqlite_url, tmp_path / "history", 2, 0.0) as rivals:
        eventually(lambda: min(rivals.turns()) >= 10 or rivals.most_overtaken() > 3, "each has had its turns", HANG)
        assert rivals.most_overtaken() <= 3, rivals.turns()


@pytest.mark.realtime
def test_of_three_processes_that_work_under_a_lock_none_is_starved(sqlite_url: str, tmp_path: Path) -> None:
    """With the real pauses: a process lets others go ahead once a sweep, which is six turns here, and does not wait for
    one that the machine has not run for a moment. How many turns that is, only a real clock decides."""
    with Rivals(sqlite_url, tmp_path / "history", 3, 0.1) as rivals:
        eventually(lambda: min(rivals.turns()) >= 20 or rivals.most_overtaken() >= 100, "each has had its turns", HANG)
        assert rivals.most_overtaken() < 100, rivals.turns()
