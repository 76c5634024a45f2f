"""holdfast.file_lock: read, change and replace a file between processes, and lose nobody's change."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import holdfast
from holdfast.runtime.atomic_write import replace
from tests import interrupts
from tests.children import PATIENCE, Child, eventually

COUNT = """
import json, sys, holdfast
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[2])):
    with holdfast.file_lock(sys.argv[1], timeout=600) as file:
        found = json.loads(file.read_text(default="{}"))
        found[sys.argv[3]] = found.get(sys.argv[3], 0) + 1
        found["all"] = found.get("all", 0) + 1
        file.write_text(json.dumps(found))
print("done", flush=True)
"""
HOLD = """
import sys, holdfast
grant = holdfast.file_lock(sys.argv[1]).acquire()
print("held", flush=True)
sys.stdin.readline()
grant.write_text("first")
grant.release()
print("released", flush=True)
sys.stdin.readline()
"""


def test_writers_in_several_processes_lose_nobodys_change_and_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    each, names = 25, ["a", "b", "c"]
    children = [Child(COUNT, path, each, name) for name in names]
    with children[0], children[1], children[2]:
        for child in children:
            child.expect("ready")
        for child in children:
            child.say("go")
        eventually(path.exists, "somebody has written")
        for _ in range(500):
            json.loads(path.read_text())
        for child in children:
            child.expect("done")
    assert json.loads(path.read_text()) == {"all": each * len(names), **dict.fromkeys(names, each)}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["settings.json", "settings.json.lock"]


def test_the_second_writer_waits_and_then_reads_what_the_first_wrote(tmp_path: Path) -> None:
    path = tmp_path / "settings"
    path.write_text("before")
    with Child(HOLD, path) as child:
        child.expect("held")
        lock = holdfast.file_lock(path, timeout=PATIENCE)
        assert lock.try_acquire() is None
        with lock.or_skip() as nothing:
            assert nothing is None
        with pytest.raises(holdfast.NotAcquired, match="settings is locked by another holder"):
            lock.acquire(timeout=0)
        with pytest.raises(holdfast.AcquireTimeout, match=r"waited 0\.1 s"):
            lock.acquire(timeout=0.05)
        child.say("write")
        with lock as file:
            assert file.read_text() == "first"


def test_the_kernel_frees_it_when_its_process_is_killed(tmp_path: Path) -> None:
    with Child(HOLD, tmp_path / "settings") as child:
        child.expect("held")
        child.kill()
        holdfast.file_lock(tmp_path / "settings", timeout=PATIENCE).acquire().release()


def test_an_exception_in_the_block_frees_it_and_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "settings"
    path.write_text("before")
    with pytest.raises(KeyError), holdfast.file_lock(path) as file:
        json.loads(json.dumps({}))["port"]
    assert path.read_text() == "before"
    with pytest.raises(holdfast.LockLost, match="was released"):
        file.write_text("late")
    with holdfast.file_lock(path, timeout=0):
        pass


def test_locking_it_twice_in_one_thread_is_an_error_at_once_and_the_first_stays(tmp_path: Path) -> None:
    path = tmp_path / "settings"
    with holdfast.file_lock(path, timeout=None):
        with pytest.raises(holdfast.LockReentered):
            holdfast.file_lock(path, timeout=None).acquire()
        assert holdfast.file_lock(path).try_acquire() is None
    grant = holdfast.file_lock(path).acquire()
    del grant  # nobody can release it any more
    with holdfast.file_lock(path, timeout=0):
        pass


def test_another_thread_waits_and_any_thread_may_release(tmp_path: Path) -> None:
    path = tmp_path / "settings"
    grant = holdfast.file_lock(path).acquire()
    waiting: list[bool] = []

    def wait() -> None:
        with holdfast.file_lock(path, timeout=PATIENCE):
            waiting.append(grant.release())

    thread = threading.Thread(target=wait)
    thread.start()
    releaser = threading.Thread(target=grant.release)
    releaser.start()
    thread.join(PATIENCE)
    releaser.join(PATIENCE)
    assert waiting == [False], "it was released before, by a thread that did not acquire it"


@pytest.mark.parametrize("where", ["in another thread", "in a signal handler"])
def test_of_two_releases_at_the_same_time_one_unlocks_and_answers_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The second comes while the first unlocks. A second unlock would close a descriptor that is closed already: its
    number may belong to another file by then."""
    grant = holdfast.file_lock(tmp_path / "settings").acquire()
    unlock, unlocks, second = grant._lock.release, list[bool](), list[bool]()

    def overtaken(force: bool = False) -> None:
        unlocks.append(force)
        if len(unlocks) == 1:
            if where == "in a signal handler":
                second.append(grant.release())
            else:
                with ThreadPoolExecutor(1) as pool:
                    second.append(pool.submit(grant.release).result(PATIENCE))
        unlock(force)

    with monkeypatch.context() as patch:
        patch.setattr(grant._lock, "release", overtaken)
        assert grant.release() is True
    assert (second, unlocks) == ([False], [True])
    with holdfast.file_lock(tmp_path / "settings", timeout=0):
        assert grant.release() is False


def test_a_release_that_the_system_refuses_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grant = holdfast.file_lock(tmp_path / "settings").acquire()

    def refuse(force: bool = False) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(grant._lock, "release", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            grant.release()
    grant.check()
    with pytest.raises(holdfast.LockReentered):
        holdfast.file_lock(tmp_path / "settings", timeout=0).acquire()
    assert (grant.release(), grant.release()) == (True, False)


def test_a_release_leaves_the_grant_of_the_next_holder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is acquired as soon as the file is unlocked, before the release has ended."""
    lock = holdfast.file_lock(tmp_path / "settings")
    grant = lock.acquire()
    unlock = grant._lock.release
    with ThreadPoolExecutor(1) as pool:

        def unlock_and_lose(force: bool = False) -> None:
            unlock(force=force)
            grants.append(pool.submit(lock.acquire).result(PATIENCE))

        grants: list[Any] = []
        monkeypatch.setattr(grant._lock, "release", unlock_and_lose)
        assert grant.release() is True
        with pytest.raises(holdfast.LockReentered):
            pool.submit(lock.acquire).result(PATIENCE)
        assert grants[0].release() is True


def test_a_block_that_has_released_its_own_leaves_the_next_one_alone(tmp_path: Path) -> None:
    """One handle in two threads: the second is inside when the first, which is done already, leaves its block."""
    lock = holdfast.file_lock(tmp_path / "settings", timeout=PATIENCE)
    inside, left = threading.Event(), threading.Event()

    def second() -> None:
        with lock as file:
            inside.set()
            assert left.wait(PATIENCE)
            file.write_text("second")

    thread = threading.Thread(target=second)
    with lock as first:
        assert first.release() is True
        thread.start()
        assert inside.wait(PATIENCE)
    assert lock.try_acquire() is None
    left.set()
    thread.join(PATIENCE)
    assert (tmp_path / "settings").read_text() == "second"


async def test_on_an_event_loop_waiting_blocks_nobody(tmp_path: Path) -> None:
    lock = holdfast.file_lock(tmp_path / "settings", timeout=PATIENCE)
    order: list[str] = []

    async def change(name: str, release: asyncio.Event) -> None:
        async with lock as file:
            order.append(name)
            await release.wait()
            file.write_text(file.read_text(default="") + name)

    first, second = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(change("1", first))]
    while not order:  # noqa: ASYNC110
        await asyncio.sleep(0)
    tasks.append(asyncio.create_task(change("2", second)))
    tasks.append(asyncio.create_task(change("3", second)))
    await asyncio.sleep(0.03)
    tasks.pop().cancel()
    assert order == ["1"]
    first.set()
    second.set()
    await asyncio.gather(*tasks)
    assert (tmp_path / "settings").read_text() == "12"
    async with lock:
        with pytest.raises(holdfast.LockReentered):
            async with lock:
                pass
        with pytest.raises(TimeoutError):  # a task that the block awaits is another one
            await asyncio.wait_for(asyncio.create_task(change("4", first)), 0.05)


def test_permissions_stay_and_links_stay_links(tmp_path: Path) -> None:
    secret, link = tmp_path / "secret", tmp_path / "link"
    secret.write_text("one")
    secret.chmod(0o640)
    link.symlink_to(secret)
    if os.geteuid() == 0:
        os.chown(secret, 12345, 23456)
    with holdfast.file_lock(link) as file:
        assert holdfast.file_lock(secret).try_acquire() is None, "both names mean one file"
        file.write_text("two")
    about = secret.stat()
    assert (secret.read_text(), stat.S_IMODE(about.st_mode), link.is_symlink()) == ("two", 0o640, True)
    if os.geteuid() == 0:
        assert (about.st_uid, about.st_gid) == (12345, 23456)


def test_whoever_may_write_to_the_file_may_lock_it_whoever_came_first(tmp_path: Path) -> None:
    settings = tmp_path / "settings"
    settings.touch()
    settings.chmod(0o660)
    if os.geteuid() == 0:
        os.chown(settings, 12345, 23456)
    with holdfast.file_lock(settings):
        about, beside = settings.stat(), (tmp_path / "settings.lock").stat()
    assert (beside.st_mode, beside.st_uid, beside.st_gid) == (about.st_mode, about.st_uid, about.st_gid)


def test_a_new_file_is_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace(tmp_path / "new", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings"
    path.write_text("before")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with holdfast.file_lock(path) as file, pytest.raises(OSError, match="No space left"):
        file.write_text("after")
    assert path.read_text() == "before"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["settings", "settings.lock"]


def test_what_a_writer_left_that_was_killed_in_the_midst_is_removed_by_the_next(tmp_path: Path) -> None:
    """And nothing of anybody else's, whatever is in the name."""
    path, others = tmp_path / "a[b]*.json", [".a[b]*.json.orig", ".abx.json.0123456789ab.holdfast"]
    path.write_text("before")
    for name in others:
        (tmp_path / name).write_text("mine")
    program = """
    import os, sys, holdfast
    os.fsync = lambda _: os.kill(os.getpid(), 9)
    holdfast.file_lock(sys.argv[1]).acquire().write_text("half")
    """
    with Child(program, path) as child:
        assert child.wait() == -9
    assert path.read_text() == "before"
    assert len(list(tmp_path.iterdir())) == len(others) + 3, "it was killed in the midst"
    with holdfast.file_lock(path) as file:
        file.write_text("after")
    assert path.read_text() == "after"
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, f"{path.name}.lock", *others}


def test_threads_that_share_a_grant_write_one_after_the_other(tmp_path: Path) -> None:
    texts = [str(number) * 100_000 for number in range(8)]
    with holdfast.file_lock(tmp_path / "settings") as file, ThreadPoolExecutor(8) as pool:
        list(pool.map(file.write_text, texts))
        assert file.read_text() in texts
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["settings", "settings.lock"]


class Interrupt(interrupts.Interrupt):
    def spares(self, code: CodeType, place: int) -> bool:
        """Where nothing that is written in Python can be safe, and where the interpreter does not look."""
        return interrupts.returns(code, place) or (code.co_name in ("__exit__", "release") and place < 4)


@pytest.mark.parametrize("how", ["with", "or_skip", "acquire"])
def test_interrupted_anywhere_it_is_free_although_its_handle_lives_on(tmp_path: Path, how: str) -> None:
    """In a thread of its own: an interrupt at the end of an except block leaves that exception current for good."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_interrupted_anywhere, tmp_path, how).result()


def _interrupted_anywhere(tmp_path: Path, how: str) -> None:
    lock, at = holdfast.file_lock(tmp_path / "settings", timeout=0), 0

    def attempt() -> None:
        if how == "acquire":
            lock.acquire().release()
        else:
            with lock if how == "with" else lock.or_skip():
                pass

    with ThreadPoolExecutor(1) as pool:
        while True:
            interrupt = Interrupt(at, "holdfast/lock/file_lock.py")
            with suppress(KeyboardInterrupt), interrupt:
                attempt()
            if not interrupt.raised:
                break
            grant = pool.submit(holdfast.file_lock(tmp_path / "settings").try_acquire).result()
            assert grant is not None, interrupt.where
            grant.release()
            at += 1
    assert at > 100, f"only {at} instructions: what has been interrupted?"


def test_a_missing_file_is_told_unless_there_is_a_default(tmp_path: Path) -> None:
    with holdfast.file_lock(tmp_path / "settings") as file:
        assert (file.read_text(default="{}"), file.read_bytes(default=b"")) == ("{}", b"")
        with pytest.raises(FileNotFoundError):
            file.read_text()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_owns_nothing_and_harms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "settings"
    program = """
    import gc, os, sys, holdfast
    grant = holdfast.file_lock(sys.argv[1]).acquire()
    child = os.fork()
    if not child:
        try:
            grant.check()
        except holdfast.LockLost:
            released = grant.release()
            del grant
            gc.collect()
            os._exit(10 if not released and holdfast.file_lock(sys.argv[1]).try_acquire() is None else 11)
        os._exit(12)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os.fork()  # this one lives on when its parent is killed
    sys.stdin.readline()
    """
    with Child(program, path) as parent:
        parent.expect("10")
        assert holdfast.file_lock(path).try_acquire() is None
        parent.kill()
        eventually(lambda: (grant := holdfast.file_lock(path).try_acquire()) and grant.release(), "it is free")


def test_a_folder_that_is_missing_is_told_and_not_made(tmp_path: Path) -> None:
    lock = holdfast.file_lock(tmp_path / "etc" / "settings")
    for attempt in (lock.acquire, lock.try_acquire):
        with pytest.raises(FileNotFoundError, match="etc"):
            attempt()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_file_to_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    for path in (tmp_path / "folder", ""):
        with pytest.raises(IsADirectoryError, match="it is a folder"):
            holdfast.file_lock(path).acquire()
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """Nor a device: whoever writes to /dev/null must not put a file there."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="would be replaced by a plain file"):
        holdfast.file_lock(tmp_path / "pipe").acquire()
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_without_the_package_it_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['filelock'] = None\nimport holdfast\nholdfast.file_lock(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "x"], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith("needs the files extra: pip install 'holdfast[files]'")


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon"])
def test_a_bad_timeout_is_refused(tmp_path: Path, timeout: float) -> None:
    with pytest.raises((ValueError, TypeError), match="timeout must be"):
        holdfast.file_lock(tmp_path / "x", timeout=timeout)
