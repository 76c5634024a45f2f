"""How processes end and divide: fork, exit, kill, a loop closed without a word."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

import holdfast
from holdfast.testing import Proxy
from tests.children import ENDS, NONE, PATIENCE, Child, eventually, rows

TTL = 1.0

_FORK = """
import gc, os, sys, holdfast
from holdfast.runtime import forks
from tests.children import kept
forks.PATIENCE = 60
client = holdfast.Client(sys.argv[1])
grant = client.lease("a", ttl=60, renew_every=0.2).acquire()
term = client.lease("term", ttl=600, failover="session").acquire()  # would be lost with the parent's session
client.leases.list()
child = os.fork()
if child == 0:
    try:
        assert grant.lost and grant.remaining() == 0
        try:
            grant.check()
        except holdfast.LeaseLost as error:
            assert "parent" in str(error)
        assert grant.release() is False
        assert client.lease("a", ttl=60).try_acquire() is None
        with client.lease("b", ttl=60) as own:
            assert not own.lost and own.fence > grant.fence
        client.close()
        del client, grant, term
        gc.collect()
        print("child: content")
        sys.exit(0)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            print("child:", repr(error))
        raise
print("parent: held")
os.waitpid(child, 0)
print("parent: waited")
input()
kept(grant)
term.check()
grant.renew()
print("parent: kept")
client.close()
"""


def test_the_parent_keeps_its_lease_through_the_childs_use_close_and_exit(either: str) -> None:
    """The child says nothing on the parent's connections, not even goodbye."""
    with Child(_FORK, either) as parent:
        assert {parent.line(), parent.line()} == {"parent: held", "child: content"}
        parent.expect("parent: waited")
        with holdfast.Client(either) as other:
            assert other.lease("a", ttl=60).try_acquire() is None
        parent.say("go on")
        parent.expect("parent: kept")
        assert parent.wait() == 0
    assert rows(either) == NONE


_PROTECTS = """
import os, sqlite3, sys, holdfast, psycopg
from holdfast.runtime import forks
forks.PATIENCE = 60
def connect():
    if sys.argv[1].startswith("sqlite"):
        return sqlite3.connect(sys.argv[1].removeprefix("sqlite:///"), isolation_level=None)
    return psycopg.connect(sys.argv[1], autocommit=True)
def write(grant, who, at, protects):
    connection = connect()
    try:
        if protects:
            connection.execute("begin")
            connection.execute(f"insert into work values ('{who}')")
            grant.protect(connection, at=at)
            connection.execute("commit")
        else:
            with grant.transaction(connection, at=at):
                connection.execute(f"insert into work values ('{who}')")
    finally:
        connection.close()
def writes(grant, who):
    for at in ("start", "commit"):
        for protects in (False, True):
            yield lambda: write(grant, who, at, protects)
connect().execute("create table work (who text)")
client = holdfast.Client(sys.argv[1])
grant = client.lease("a", ttl=600).acquire()
if (child := os.fork()) == 0:
    for attempt in writes(grant, "child"):
        try:
            attempt()
            print("written", flush=True)
        except holdfast.LeaseLost as error:
            assert "parent process" in str(error)
            print("LeaseLost", flush=True)
    os._exit(0)
os.waitpid(child, 0)
for attempt in writes(grant, "parent"):
    attempt()
print(connect().execute("select who, count(*) from work group by 1").fetchall(), flush=True)
client.close()
"""


def test_a_child_cannot_commit_under_the_grant_of_its_parent(either: str) -> None:
    """It has the token, so the database would let it."""
    with Child(_PROTECTS, either) as parent:
        assert [parent.line() for _ in range(4)] == ["LeaseLost"] * 4
        parent.expect("[('parent', 4)]")
        assert parent.wait() == 0


_THREADS = """
import os, signal, sys, threading, time, holdfast
from holdfast.runtime import forks
def give_up(*_):
    raise TimeoutError
signal.signal(signal.SIGALRM, give_up)
forks.PATIENCE = 60  # seconds that a fork waits for threads to leave SQLite: after that the child does without the file
client = holdfast.Client(sys.argv[1])
grant = client.lease("a", ttl=600).acquire()
client.leases.list()  # a fork while a thread imports a module is Python's to survive
def work():
    while True:
        client.leases.list()
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
hung = 0
for _ in range(int(sys.argv[2])):
    time.sleep(0.002)
    child = os.fork()
    if child == 0:
        assert [each.fence for each in client.leases.list()] == [grant.fence]
        assert client.lease("a").adopt(grant.token).fence == grant.fence
        os._exit(0)
    signal.alarm(60)
    try:
        ended = os.waitpid(child, 0)
    except TimeoutError:
        hung = 1
        os.kill(child, 9)
        break
    signal.alarm(0)
    assert ended[1] == 0, ended
print("hung:", hung)
os._exit(0)
"""


def test_a_child_forked_while_other_threads_are_in_a_call_does_not_wait_for_them(postgres_url: str) -> None:
    """Those threads are not in the child, and whatever they held nobody there will ever let go."""
    with Proxy(postgres_url, delay=0.02) as link, Child(_THREADS, link.url, "4") as parent:  # in a call nearly always
        parent.expect("hung: 0")


def test_a_child_forked_while_other_threads_are_inside_sqlite_does_not_wait_for_them(sqlite_url: str) -> None:
    """SQLite's own mutexes, too, would stay locked for ever: without care a child in thirty hung."""
    with Child(_THREADS, sqlite_url, "100") as parent:
        parent.expect("hung: 0")


_LOOKED = """
import os, sys, time, holdfast
client = holdfast.Client(sys.argv[1])
client.leases.list()
told, tell = os.pipe()
heard, say = os.pipe()
child = os.fork()
if child == 0:
    own = holdfast.Client(sys.argv[1])
    own.lease("a", ttl=600).acquire()
    os.write(tell, b"x")
    os.read(heard, 1)
    own.lease("b", ttl=600).acquire()
    os.write(tell, b"x")
    time.sleep(600)
os.read(told, 1)
while client._engine._dispatcher.sessions:  # it is closed when it has been idle for a while
    time.sleep(0.01)
os.write(say, b"x")
os.read(told, 1)
assert client.lease("a").try_acquire() is None
assert client.lease("b").try_acquire() is None
os.kill(child, 9)
print("both know")
"""


def test_a_child_does_not_lose_the_file_that_its_parent_had_open(sqlite_url: str) -> None:
    """It would inherit the belief that the file is locked; its parent, alone with it, takes the log away at the end."""
    with Child(_LOOKED, sqlite_url) as parent:
        parent.expect("both know")


_GONE = """
import os, sys, threading, holdfast
folder = sys.argv[1].removeprefix("sqlite:///") + ".other"
os.mkdir(folder)
gone, well = holdfast.Client(f"sqlite:///{folder}/app.db"), holdfast.Client(sys.argv[1])
grants = [client.lease("a", ttl=600, renew_every=0.1).acquire() for client in (gone, well)]
os.rename(folder, folder + ".away")  # nothing can be opened there any more
for _ in range(2):
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    told = []
    asking = threading.Thread(target=lambda: told.append(well.leases.get("a").fence), daemon=True)
    asking.start()
    asking.join(60)
    assert told == [grants[1].fence], "another thread waits for the one that forked"
try:
    gone.leases.list()
except holdfast.EngineError as error:
    assert "cannot open" in str(error), error
os.rename(folder + ".away", folder)
assert gone.leases.get("a").fence == grants[0].fence
for client, grant in ((gone, grants[0]), (well, grants[1])):
    before = client.leases.get("a").expires_at
    while client.leases.get("a").expires_at == before:
        pass
    grant.check()
    client.close()
print("content")
"""


def test_a_file_that_is_away_during_a_fork_holds_up_no_other_and_goes_on_when_it_is_back(sqlite_url: str) -> None:
    with Child(_GONE, sqlite_url) as child:
        assert child.line() == "content"
        assert child.wait() == 0


_INSIDE = """
import os, sys, holdfast
from holdfast.runtime import forks
client = holdfast.Client(sys.argv[1])
client.leases.list()
client._engine._dispatcher.sessions[0].set_down = lambda deadline: False  # somebody writes, and does not come out
child = os.fork()
if child == 0:
    try:
        holdfast.Client(sys.argv[1]).leases.list()
    except holdfast.EngineError as error:
        print("fork" in str(error), flush=True)
    os._exit(0)
os.waitpid(child, 0)
assert client.leases.list() == []
"""


def test_a_child_forked_in_the_middle_of_a_write_does_without_the_file(sqlite_url: str) -> None:
    with Child(_INSIDE, sqlite_url) as parent:
        parent.expect("True")
        assert parent.wait() == 0


_POOL = """
import multiprocessing, sys, holdfast
from holdfast.runtime import forks
forks.PATIENCE = 60
client = holdfast.Client(sys.argv[1])

def work(number):
    assert grant.lost
    with client.lease(f"part-{number}", ttl=60) as own:
        return own.fence

with client.lease("a", ttl=60) as grant:
    context = multiprocessing.get_context("fork")
    with context.Pool(3) as pool:
        fences = pool.map(work, range(12))
    assert len(set(fences)) == 12 and min(fences) > grant.fence
    grant.renew()
    print("kept")
"""


def test_a_multiprocessing_pool_uses_the_client_of_its_parent(either: str) -> None:
    with Child(_POOL, either) as parent:
        parent.expect("kept")
        assert parent.wait() == 0
    eventually(lambda: rows(either)["lease"] == 0, "the workers have released theirs")


_ORPHAN = """
import os, sys, holdfast
client = holdfast.Client(sys.argv[1])
grant = client.lease("a", ttl=float(sys.argv[2]), failover=sys.argv[3]).acquire()
if os.fork() == 0:
    print("child", os.getpid())
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("either", "ttl", "failover"),
    [("postgres", TTL, "ttl"), ("postgres", 600, "session"), ("sqlite", 600, "session")],
    indirect=["either"],
)
def test_a_killed_parents_lease_is_freed_although_its_child_lives(either: str, ttl: float, failover: str) -> None:
    """The child inherited the sockets and the kernel's locks, but must not keep them alive: with failover="session" the
    lease ends with the parent, long before its TTL."""
    with Child(_ORPHAN, either, ttl, failover) as parent, holdfast.Client(either) as other:
        child = int(parent.line().split()[1])
        parent.kill()
        with other.lease("a", ttl=60, timeout=PATIENCE):
            os.kill(child, 0)  # it lives: no ProcessLookupError


_EXIT = """
import os, signal, sys, holdfast
client = holdfast.Client(sys.argv[1])
grant = client.lease("a", ttl=60).acquire()
other = client.lease("b", ttl=50).acquire()
print("held")
{end}
"""


@pytest.mark.parametrize(
    ("either", "end"), [("sqlite", "normally"), ("postgres", "sys.exit"), ("sqlite", "exception")], indirect=["either"]
)
def test_exit_without_close_releases_at_once(either: str, end: str) -> None:
    last_line, status = ENDS[end]
    with Child(_EXIT.format(end=last_line), either) as child:
        child.expect("held")
        assert child.wait() == status
    assert rows(either) == NONE


_WORKER = """
import multiprocessing, os, sys, threading, holdfast
from multiprocessing.util import Finalize
mine, theirs = os.pipe()
def end():
    print("ending")
    os.read(mine, 1)
def work(threads):
    os.close(theirs)
    holdfast.Client(sys.argv[1]).lease("a", ttl=60).acquire()
    Finalize(None, end, exitpriority=-11)
    for _ in range(threads):
        threading.Thread(target=os.read, args=(mine, 1), daemon=True).start()
worker = multiprocessing.get_context("fork").Process(target=work, args=[int(sys.argv[2])])
worker.start()
os.close(mine)
sys.stdin.readline()
os.close(theirs)
worker.join()
"""


@pytest.mark.parametrize("threads", [0, 1])
def test_exit_of_a_process_of_multiprocessing_releases_at_once_what_nobody_works_under(
    either: str, threads: int
) -> None:
    """It ends without the exit functions of its parent, while its threads may be at work: their lease expires."""
    with Child(_WORKER, either, threads) as child:
        child.expect("ending")
        assert rows(either)["lease"] == threads
        child.say("go on")
        assert child.wait() == 0


def test_exit_of_an_async_program_without_close_releases_at_once(either: str) -> None:
    program = """
    import asyncio, sys, holdfast
    async def main():
        client = holdfast.AsyncClient(sys.argv[1])
        await client.lease("a", ttl=60).acquire()
        print("held")
    asyncio.run(main())
    """
    with Child(program, either) as child:
        child.expect("held")
        assert child.wait() == 0
    assert rows(either) == NONE


@pytest.mark.parametrize(
    ("either", "number"), [("sqlite", signal.SIGTERM), ("postgres", signal.SIGKILL)], indirect=["either"]
)
def test_a_process_ended_by_a_signal_is_freed_by_its_ttl(either: str, number: signal.Signals) -> None:
    with Child(_EXIT.format(end="signal.pause()").replace("60", str(TTL)), either) as child:
        child.expect("held")
        child.signal(number)
        assert child.wait() == -number
        with holdfast.Client(either) as other:
            other.lease("a", ttl=60, timeout=PATIENCE).acquire().release()


def test_an_event_loop_closed_without_close_frees_its_leases_within_the_ttl(either: str) -> None:
    """The process lives on, and so does its keeper, which must not renew for nobody."""
    clients = []

    async def forget() -> None:
        client = holdfast.AsyncClient(either)
        clients.append(client)
        await client.lease("a", ttl=TTL).acquire()

    asyncio.run(forget())
    with holdfast.Client(either) as other:
        other.lease("a", ttl=60, timeout=PATIENCE).acquire().release()


_REGISTERS = """
import os, sys, holdfast
from holdfast.database.engine import Resource
client = holdfast.Client(sys.argv[1])
client.leases.list()
child = os.fork()
if child == 0:
    client._engine.register(Resource(stop=lambda: print("stopped", flush=True)))
    client.leases.list()
    client.close()
    os._exit(0)
os.waitpid(child, 0)
"""


def test_what_a_child_registers_before_its_first_call_is_ended_with_its_client(either: str) -> None:
    """As an elector does: its work is stopped before its lease is released."""
    with Child(_REGISTERS, either) as parent:
        parent.expect("stopped")
        assert parent.wait() == 0
