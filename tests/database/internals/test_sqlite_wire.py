"""The SQLite session: fair between processes, bounded in time, and a fence that survives a crash of the machine."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.database import file_turns as kernel
from holdfast.database import sqlite as wire
from holdfast.database.file_turns import WriteTurn
from holdfast.database.sqlite import boot_id
from holdfast.database.sqlite_async import AsyncSqliteSession
from holdfast.database.statements import migrations
from holdfast.database.url import parse
from holdfast.errors import Refused, Unreachable
from holdfast.lock.file_locks import FileLockWire
from holdfast.lock.pool import Entry, LockRequest
from holdfast.runtime import forks
from holdfast.testing.server import until
from tests.children import Child
from tests.conftest import migrated
from tests.database.internals.test_statements import declared_calls
from tests.raw_session import Raw

LONG = 60.0
IN_A_WRITE = """
import sys
from holdfast.runtime.clock import now
from tests.raw_session import Raw
raw = Raw(sys.argv[1])
def stay():
    print("writing", flush=True)
    sys.stdin.readline()
raw.session._write(stay, now() + 600)
"""
WAITING = """
import sys
from tests.raw_session import Raw
raw = Raw(sys.argv[1])
print("waiting", flush=True)
try:
    raw.call("purge", timeout=600.0)
except KeyboardInterrupt:
    print("heard", flush=True)
"""
WRITER = """
import mmap, os, select, sys
from tests.raw_session import Raw
url, tally, place = sys.argv[1], sys.argv[2], int(sys.argv[3])
with open(tally, "r+b") as file:
    turns = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
raw = Raw(url)
print("ready", flush=True)
sys.stdin.readline()
overtaken = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    before = sum(turns)
    raw.release(str(place), raw.acquire(str(place))["token"])
    overtaken = max(overtaken, sum(turns) - before)
    turns[place] += 1
    if turns[place] == 400:
        print("enough", flush=True)
print(overtaken, flush=True)
os._exit(0)  # the memory is still in use
"""


@pytest.fixture
def raw(sqlite_url: str) -> Iterator[Raw]:
    made = Raw(migrated(sqlite_url))
    made.call("hello", boot=boot_id() or "")
    yield made
    made.close()


def test_the_file_is_in_wal_mode(raw: Raw) -> None:
    with closing(sqlite3.connect(raw.database.target)) as connection:
        assert connection.execute("pragma journal_mode").fetchone() == ("wal",)


def test_a_commit_waits_for_the_disk_but_for_what_ends_with_the_machine(raw: Raw) -> None:
    """A version, an operation's claim or the fence of a new boot that was told must not be lost; a lease may be."""

    def waited() -> bool:
        [[level]] = raw.session._connection.execute("pragma synchronous")
        return bool(level == 2)

    given: dict[str, Any] = {"type": "box", "id": "b-1", "body": "1", "expected": -1}
    given |= dict.fromkeys(("raw", "name", "labels", "lease", "lease_token"))
    for durable in ("object_put", "hello"):
        raw.acquire(durable)
        assert not waited()
        raw.call(durable, **(given if durable == "object_put" else {"boot": "another"}))
        assert waited(), durable
    raw.acquire("again")
    raw.session.set_down(time.monotonic() + LONG)  # and after a fork
    raw.session.pick_up()
    raw.call("object_put", **given)
    assert waited()
    raw.session.boot = None  # where one boot is not told from the next, fences are all there is
    raw.acquire("unknown")
    assert waited()
    volatile = {name for name, each in declared_calls().items() if each.volatile}
    assert {name.partition("_")[0] for name in volatile - {"operation_look"}} == {
        "lease", "guard", "elector", "gate", "operation", "relay", "beat", "slot", "lock", "purge",
    }  # fmt: skip


def test_after_a_fork_a_reader_waits_for_whoever_has_the_file_to_itself(raw: Raw) -> None:
    """As one has for a moment who opens it first or closes it last."""
    assert raw.session.set_down(time.monotonic() + LONG)
    other = sqlite3.connect(raw.database.target, isolation_level=None, check_same_thread=False)
    other.execute("pragma locking_mode = exclusive")
    other.execute("pragma user_version = 1")
    leaves = threading.Timer(0.2, other.close)
    leaves.start()
    raw.session.pick_up()
    assert raw.call("lease_list", name=None) == []
    leaves.join()


@pytest.mark.realtime
def test_of_four_processes_that_write_all_the_time_none_is_left_behind(raw: Raw, tmp_path: Path) -> None:
    """With SQLite's own busy handler one of them was starved: a thousand others went before it, and here a hundred do.
    Counted in turns, but a process that the machine does not run is overtaken by all that it runs."""
    (tally := tmp_path / "turns").write_bytes(bytes(4 * 8))
    with ExitStack() as stack:
        writers = [stack.enter_context(Child(WRITER, raw.url, tally, place)) for place in range(4)]
        for step in ("ready", "enough"):  # whoever has done enough goes on until all have
            for each in writers:
                each.expect(step)
            for each in writers:
                each.say("go")
        overtaken = [int(each.line()) for each in writers]
    assert max(overtaken) < 600, overtaken


def test_a_process_stopped_inside_a_write_is_named_in_bounded_time(raw: Raw) -> None:
    with Child(IN_A_WRITE, raw.url) as stopped:
        stopped.expect("writing")
        stopped.signal(signal.SIGSTOP)
        with pytest.raises(Unreachable, match="is one stopped in the middle of a write"):
            raw.call("purge", timeout=0.3)
        assert raw.call("lease_list", name=None) == [], "readers wait for nobody"
        stopped.signal(signal.SIGCONT)
        stopped.say("go")
        assert stopped.wait() == 0
    assert raw.acquire("x")["status"] == "acquired"


def test_a_process_killed_inside_a_write_holds_up_nobody(raw: Raw) -> None:
    with Child(IN_A_WRITE, raw.url) as killed:
        killed.expect("writing")
    assert raw.acquire("x")["status"] == "acquired"


def test_a_transaction_of_the_users_own_is_waited_for_in_bounded_time(raw: Raw) -> None:
    with closing(sqlite3.connect(raw.database.target, isolation_level=None)) as users:
        users.execute("begin immediate")
        with pytest.raises(Unreachable, match="Is a transaction open on it"):
            raw.call("purge", timeout=0.2)
        users.execute("rollback")
    assert raw.acquire("x")["status"] == "acquired"


def test_ctrl_c_is_heard_while_another_process_writes(raw: Raw) -> None:
    with Child(IN_A_WRITE, raw.url) as writing:
        writing.expect("writing")
        with Child(WAITING, raw.url) as waiting:
            waiting.expect("waiting")
            until(
                lambda: len([*Path(f"/proc/{waiting.pid}/task").iterdir()]) > 1, what="a thread stands in line for it"
            )
            waiting.signal(signal.SIGINT)
            waiting.expect("heard")
        writing.say("go")
        assert writing.wait() == 0
    assert raw.acquire("x")["status"] == "acquired"


def open_files(beside: str) -> list[Path]:
    """Of ours, in that one's folder: what else this process has may come and go."""
    folder = os.path.realpath(Path(beside).parent)
    return [each for each in Path("/proc/self/fd").iterdir() if os.path.realpath(each).startswith(folder)]


def standing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "holdfast-turn"]


def test_however_often_a_file_that_stays_locked_is_tried_one_thread_stands_for_it(raw: Raw) -> None:
    """Each try left its own, until the process had no descriptors any more."""
    with Child(IN_A_WRITE, raw.url) as stopped:
        stopped.expect("writing")
        stopped.signal(signal.SIGSTOP)
        left = []
        for _ in range(3):
            with closing(Raw(raw.url)) as another, pytest.raises(Unreachable, match="stopped in the middle"):
                another.call("purge", timeout=0.05)
            left.append((len(standing()), len(open_files(raw.database.target))))
        assert left == [(1, left[0][1])] * 3
        stopped.signal(signal.SIGCONT)
        stopped.say("go")
        assert stopped.wait() == 0
    for thread in standing():
        thread.join(LONG)
    assert raw.acquire("x")["status"] == "acquired", "and it keeps nothing for whoever gave up"
    assert len(open_files(raw.database.target)) < left[0][1]


def test_those_who_wait_in_one_process_have_their_turns_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    path, order = str(tmp_path / "turn"), list[int]()

    def wait(number: int, mine: WriteTurn) -> None:
        mine.enter(time.monotonic() + LONG)
        order.append(number)
        mine.leave()

    def waits(number: int) -> bool:
        return len(queue.waiters) == number

    first, others = WriteTurn(path), [WriteTurn(path) for _ in range(5)]
    first.enter(math.inf)
    threads = [threading.Thread(target=wait, args=each) for each in enumerate(others)]
    about = Path(path).stat()
    queue = kernel._queues.setdefault((about.st_dev, about.st_ino), kernel._TurnQueue())
    for number, thread in enumerate(threads, 1):
        thread.start()
        until(partial(waits, number), what="it waits")
    first.leave()
    for thread in [*threads, *standing()]:
        thread.join(LONG)
    assert order == [0, 1, 2, 3, 4]
    for each in (first, *others):
        each.close()


def test_a_child_forked_off_while_somebody_waits_keeps_no_turn(tmp_path: Path) -> None:
    """Else it would have it when its parent is killed in the middle of a write."""
    path = str(tmp_path / "turn")
    theirs, ours = WriteTurn(path), WriteTurn(path)
    theirs.enter(math.inf)
    with pytest.raises(Unreachable):
        ours.enter(time.monotonic())
    for each in (theirs, ours):
        forks.guard(each)
        each.fileno, each.abandon = lambda: None, each.close  # type: ignore[attr-defined]
    child = os.fork()
    if child == 0:
        os._exit(len(open_files(path)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    theirs.leave()
    for each in (theirs, ours):
        forks.forget(each)
        each.close()


def test_without_a_thread_to_wait_in_nothing_is_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ours, theirs = (WriteTurn(str(tmp_path / "turn")) for _ in range(2))
    with closing(ours), closing(theirs):
        theirs.enter(math.inf)
        monkeypatch.setattr(threading.Thread, "start", none)
        with pytest.raises(RuntimeError, match="can't start"):
            ours.enter(math.inf)
        assert len(open_files(str(tmp_path / "turn"))) == 2


@pytest.mark.parametrize(
    "by_root",
    [False, pytest.param(True, marks=pytest.mark.skipif(os.geteuid() != 0, reason="root alone may give files away"))],
)
def test_whoever_may_write_to_the_file_may_write_to_what_lies_beside_it(tmp_path: Path, by_root: bool) -> None:
    """Whatever the umask of the first who came; and root, who only looked, kept the service itself out."""
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as users:
        users.execute("create table orders (id)")
    path.chmod(0o660)
    if by_root:
        os.chown(path, 1000, 2000)
    before = os.umask(0o077)
    try:
        with closing(Raw(migrated(f"sqlite:///{path}"))) as raw:
            locks = FileLockWire(raw.database)
            keys = ((b"7",), (b"7", b"7"))
            requests = [LockRequest(key, "", waits=False, shared=False) for key in keys]
            assert all(locks.run(Entry(each.key, each), False, None) for each in requests)
            locks.wait((b"8",), shared=False)
            locks.receive()
            locks.close()
    finally:
        os.umask(before)
    beside = {each.name: each.stat() for each in tmp_path.glob("app.db.holdfast-*")}
    assert set(beside) == {f"app.db.holdfast-{kind}" for kind in ("turn", "live", "locks", "pairs", "line")}
    about = path.stat()
    for name, found in beside.items():
        assert (found.st_mode, found.st_uid, found.st_gid) == (about.st_mode, about.st_uid, about.st_gid), name


def test_a_new_boot_whose_clock_is_behind_lifts_the_fence_and_the_same_boot_does_not(raw: Raw) -> None:
    """In WAL mode the last commits may be lost with the machine, and the fences that were given out in them."""
    raw.acquire("first")
    newest = migrations("sqlite")[-1].version
    assert raw.call("hello", boot=boot_id() or "") == [{"version": newest}]
    raw.run("update holdfast.fence set last = last + 3600000000;\n")
    before = raw.acquire("a")["fence"]
    assert raw.acquire("b")["fence"] == before + 1
    assert raw.call("hello", boot="another boot") == [{"version": newest}]
    lifted = raw.acquire("c")["fence"]
    assert lifted > before + 50_000_000
    raw.call("hello", boot="another boot")
    assert raw.acquire("d")["fence"] == lifted + 1


def test_an_old_sqlite_is_refused_by_name(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "OLDEST", (99, 1, 0))
    with pytest.raises(Unreachable, match=r"is too old: holdfast needs 99\.1\.0 or newer"):
        Raw(sqlite_url)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="Does the folder exist"):
        Raw(f"sqlite:///{tmp_path / 'missing' / 'app.db'}")


def test_a_script_that_fails_half_way_leaves_nothing(raw: Raw) -> None:
    with pytest.raises(Refused):
        raw.run("insert into holdfast.fence values (2, 0, null);\n")
    with pytest.raises(Refused):
        raw.run("update holdfast.fence set last = 7;\ninsert into holdfast.missing values (1);\n")
    assert raw.acquire("x")["fence"] > 7


def test_unicode_and_nulls_arrive_whole(raw: Raw) -> None:
    name, reason = "Grüße 漢字 '\"\\ %s ?1 :name", "𝄞" * 1000
    assert raw.acquire(name, process=None)["held_by"] is None
    assert raw.done("lease_force_release", name=name, actor="é", reason=reason)
    [told] = raw.history(name)
    assert (told["name"], told["actor"], told["reason"], told["host"]) == (name, "é", reason, None)


async def test_a_cancelled_call_leaves_the_session_to_the_next(raw: Raw) -> None:
    session = await AsyncSqliteSession.open(parse(raw.url), LONG)
    raw.acquire("one")
    calls = [asyncio.ensure_future(session.call("lease_list", {"name": "one"}, LONG)) for _ in range(50)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, list) and outcome[0]["name"] == "one" for outcome in outcomes[1::2])
    assert await session.call("lease_list", {"name": "two"}, LONG) == []
    session.close()


async def test_an_open_that_is_cancelled_leaves_no_thread_however_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    before = set(threading.enumerate())
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("create table orders (id)")
        for locked in (True, False):
            other.execute("begin exclusive" if locked else "rollback")
            opening = asyncio.ensure_future(AsyncSqliteSession.open(parse(f"sqlite:///{path}"), 0.2))
            await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            for thread in set(threading.enumerate()) - before:
                if thread.name == "holdfast-sqlite":
                    await asyncio.to_thread(thread.join, LONG)
                    assert not thread.is_alive()


def test_a_renewal_that_came_too_late_by_one_statement_says_so(raw: Raw) -> None:
    """The check that it lives and the update are two statements, and the clock goes on between them."""
    grant = raw.acquire("a", solo=True)
    session, execute = raw.session, raw.session._execute

    def late(sql: str, *parameters: Any) -> Any:
        if sql.startswith("update holdfast_beat"):
            execute("update holdfast_beat set expires_at = 0")
        return execute(sql, *parameters)

    session._execute = late
    try:
        assert raw.call("lease_renew", name="a", token=grant["token"]) == [{"done": 0}]
    finally:
        session._execute = execute


def test_one_that_is_closed_while_a_fork_begins_does_not_keep_the_others_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is not set down before a fork is spoilt in the child."""
    first, closing_one, last = (wire.SqliteSession(parse(f"sqlite:///{tmp_path / name}"), LONG) for name in "abc")
    set_down = first.set_down

    def meanwhile(deadline: float) -> bool:
        closing_one.close()
        return set_down(deadline)

    monkeypatch.setattr(first, "set_down", meanwhile)
    monkeypatch.setattr(forks, "_known", lambda: [first, closing_one, last])
    child = os.fork()
    if child == 0:
        os._exit(len(forks.spoilt))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for session in (first, last):
        assert session._execute("select 1 as one") == [{"one": 1}]
        session.close()
    with pytest.raises(sqlite3.ProgrammingError):
        closing_one._execute("select 1")
