"""What every engine promises of a lock, as tests. An engine is complete when they pass.

Subclass it as ``LeaseContract``, with the same two fixtures: ``url`` and ``connect``. Re-entry depends on the thread or
task that calls, and ``holdfast.testing.sync_facade`` runs every call in a new task: it is tested elsewhere.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import holdfast
from holdfast.testing.lease_contract import waiting

Connect = Callable[..., Any]

LONG = 60.0
"""A timeout that does not end during a test."""
NAMES = ["import", ("agent", 7)]


class LockContract:
    """The lock, through public names."""

    @pytest.mark.parametrize("name", NAMES, ids=str)
    def test_a_grant_says_what_it_is(self, connect: Connect, url: str, name: Any) -> None:
        grant = connect(url).lock(name).acquire()
        assert (grant.name, grant.lost, grant.check()) == (name, False, None)
        assert grant.release() is True
        assert grant.lost
        with pytest.raises(holdfast.LockLost, match="released"):
            grant.check()

    @pytest.mark.parametrize("name", NAMES, ids=str)
    def test_with_holds_it_for_the_block(self, connect: Connect, url: str, name: Any) -> None:
        client, other = connect(url), connect(url)
        with client.lock(name) as grant:
            assert other.lock(name).try_acquire() is None
            assert not grant.lost
        assert grant.lost
        assert other.lock(name).try_acquire().release() is True

    def test_one_handle_can_be_used_again(self, connect: Connect, url: str) -> None:
        lock, other = connect(url).lock("import"), connect(url)
        for _ in range(3):
            with lock:
                assert other.lock("import").try_acquire() is None
        assert other.lock("import").try_acquire() is not None

    def test_waiting_ends_with_acquire_timeout(self, connect: Connect, url: str) -> None:
        held, other = connect(url).lock("import").acquire(), connect(url)
        assert other.lock("import").try_acquire() is None, "connecting takes time, too"
        for seconds in (0.1, 1.0, 10.0, 60.0):  # a busy server may not answer within the first
            with pytest.raises(holdfast.AcquireTimeout) as refused:
                other.lock("import").acquire(timeout=seconds)
            if "has not answered" not in str(refused.value):
                break
        assert re.search(rf"'import' is held .* waited {seconds:g} s", str(refused.value))
        assert isinstance(refused.value, TimeoutError)
        assert isinstance(refused.value, holdfast.NotAcquired)
        assert refused.value.name == "import"
        with pytest.raises(holdfast.AcquireTimeout), other.lock("import", timeout=0.1):
            pass
        assert not held.lost
        assert held.release() is True
        assert other.lock("import").try_acquire() is not None, "a waiter that gave up does not block others"

    def test_without_patience_it_is_refused_at_once(self, connect: Connect, url: str) -> None:
        held = connect(url).lock("import").acquire()
        with pytest.raises(holdfast.NotAcquired) as refused:
            connect(url).lock("import").acquire(timeout=0)
        assert not isinstance(refused.value, TimeoutError)
        held.check()

    def test_or_skip_runs_the_block_either_way(self, connect: Connect, url: str) -> None:
        first, second = connect(url), connect(url)
        with first.lock("import").or_skip() as grant:
            assert grant is not None
            with second.lock("import").or_skip() as nothing:
                assert nothing is None
            grant.check()
        assert second.lock("import").try_acquire() is not None

    @pytest.mark.parametrize("how", ["with", "or_skip"])
    def test_an_exception_in_the_block_releases_and_propagates(self, connect: Connect, url: str, how: str) -> None:
        client, error = connect(url), LookupError("no such order")
        block = client.lock("import") if how == "with" else client.lock("import").or_skip()
        with pytest.raises(LookupError) as raised, block:
            raise error
        assert raised.value is error
        assert connect(url).lock("import").try_acquire() is not None

    def test_a_second_release_is_harmless(self, connect: Connect, url: str) -> None:
        client, other = connect(url), connect(url)
        grant = client.lock("import").acquire()
        assert [grant.release(), grant.release()] == [True, False]
        heir = other.lock("import").acquire()
        assert grant.release() is False
        heir.check()
        assert client.lock("import").try_acquire() is None

    def test_a_release_inside_the_block_is_the_release(self, connect: Connect, url: str) -> None:
        client, other = connect(url), connect(url)
        with client.lock("import") as grant:
            assert grant.release() is True
            heir = other.lock("import").acquire()
        heir.check()
        assert client.lock("import").try_acquire() is None

    def test_different_keys_never_wait_for_each_other(self, connect: Connect, url: str) -> None:
        """Strings and numbers are separate, and so is every namespace."""
        client, other = connect(url), connect(url)
        names: list[Any] = ["7", "agent", ("agent", 7), ("agent", 8), ("agent", -7), ("order", 7), ("7", 7)]
        held = [client.lock(name).try_acquire() for name in names]
        assert None not in held
        assert [other.lock(name).try_acquire() for name in names] == [None] * len(names)
        assert [grant.release() for grant in held] == [True] * len(names)

    def test_a_waiter_gets_it_when_another_client_releases(self, connect: Connect, url: str) -> None:
        holder, waiter = connect(url), connect(url)
        grant = holder.lock("import").acquire()
        with waiting(lambda: waiter.lock("import").acquire(timeout=LONG)) as won:
            assert grant.release() is True
        won[0].check()
        assert holder.lock("import").try_acquire() is None

    def test_a_waiter_gets_it_when_the_same_client_releases(self, connect: Connect, url: str) -> None:
        client = connect(url)
        grant = client.lock("import").acquire()
        with waiting(lambda: client.lock("import").acquire(timeout=LONG)) as won:
            assert grant.release() is True
        won[0].check()
        assert grant.lost
        assert connect(url).lock("import").try_acquire() is None

    def test_it_can_be_released_elsewhere_than_it_was_acquired(self, connect: Connect, url: str) -> None:
        client = connect(url)
        grant = client.lock("import").acquire()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(grant.release).result(LONG) is True
        assert connect(url).lock("import").try_acquire() is not None

    def test_only_one_at_a_time_and_everybody_in_the_end(self, connect: Connect, url: str) -> None:
        """A counter that nothing but the lock protects, over two clients with several threads each."""
        clients, inside, total = [connect(url), connect(url)], [0], [0]
        wrong: list[int] = []

        def work(client: Any) -> None:
            for _ in range(10):
                with client.lock(("counter", 1), timeout=LONG):
                    inside[0] += 1
                    if inside[0] != 1:
                        wrong.append(inside[0])
                    before = total[0]
                    threading.Event().wait(0.0005)
                    total[0] = before + 1
                    inside[0] -= 1

        with ThreadPoolExecutor(6) as pool:
            for future in [pool.submit(work, clients[number % 2]) for number in range(6)]:
                future.result(LONG)
        assert (total, wrong) == ([60], [])

    @pytest.mark.parametrize("name", NAMES, ids=str)
    def test_readers_share_it_and_a_writer_is_alone(self, connect: Connect, url: str, name: Any) -> None:
        client, other, writer = connect(url), connect(url), connect(url)

        def read() -> Any:
            return client.lock(name, shared=True).try_acquire()

        readers = [client.lock(name, shared=True).acquire(), other.lock(name, shared=True).acquire(timeout=0)]
        with ThreadPoolExecutor(1) as pool:
            readers.append(pool.submit(read).result(LONG))  # of the same client, but another thread or task
            while readers:
                assert writer.lock(name).try_acquire() is None
                with pytest.raises(holdfast.NotAcquired):
                    writer.lock(name).acquire(timeout=0)
                reader = readers.pop()
                reader.check()
                assert reader.release() is True
            with writer.lock(name) as alone:
                assert pool.submit(read).result(LONG) is None
                assert other.lock(name, shared=True).try_acquire() is None
                assert other.lock(name).try_acquire() is None
                alone.check()
            assert pool.submit(read).result(LONG).release() is True

    @pytest.mark.parametrize("name", NAMES, ids=str)
    def test_or_skip_skips_beside_a_reader_only_if_it_would_write(self, connect: Connect, url: str, name: Any) -> None:
        client, other, writer = connect(url), connect(url), connect(url)
        with client.lock(name, shared=True).or_skip() as first, other.lock(name, shared=True).or_skip() as second:
            assert None not in (first, second)
            with writer.lock(name).or_skip() as nothing:
                assert nothing is None
        with writer.lock(name).or_skip() as alone:
            assert alone is not None
            with other.lock(name, shared=True).or_skip() as nothing:
                assert nothing is None

    def test_a_writer_waits_for_all_readers_and_readers_for_the_writer(self, connect: Connect, url: str) -> None:
        client, other, writer = connect(url), connect(url), connect(url)
        readers = [each.lock("import", shared=True).acquire() for each in (client, other)]
        with waiting(lambda: writer.lock("import").acquire(timeout=LONG)) as written:
            assert [reader.release() for reader in readers] == [True, True]
        written[0].check()

        def read() -> Any:
            return client.lock("import", shared=True).acquire(timeout=LONG)

        with waiting(read) as first, waiting(read) as second:
            assert written[0].release() is True
        assert [grant.release() for grant in (first[0], second[0])] == [True, True]

    def test_readers_of_other_clients_do_not_overtake_a_writer_for_ever(self, connect: Connect, url: str) -> None:
        """There is always a reader that holds it: each begins before the one before it has ended."""
        readers, writer, over = [connect(url), connect(url)], connect(url), threading.Event()
        turns = [threading.Semaphore(1), threading.Semaphore(0)]

        def read(number: int) -> None:
            while turns[number].acquire(timeout=LONG) and not over.is_set():
                with readers[number].lock("import", shared=True, timeout=LONG):
                    turns[1 - number].release()
                    threading.Event().wait(0.002)

        with ThreadPoolExecutor(2) as pool:
            reading = [pool.submit(read, number) for number in (0, 1)]
            try:
                assert writer.lock("import").acquire(timeout=LONG).release() is True
            finally:
                over.set()
                for turn in turns:
                    turn.release()
            for each in reading:
                each.result(2 * LONG)

    def test_closing_the_client_frees_its_locks(self, connect: Connect, url: str) -> None:
        client, other = connect(url), connect(url)
        grants = [client.lock(name).acquire() for name in ("import", ("agent", 7))]
        client.close()
        assert [grant.lost for grant in grants] == [True, True]
        assert [grant.release() for grant in grants] == [False, False]
        for name in ("import", ("agent", 7)):
            other.lock(name).acquire(timeout=LONG)

    def test_closing_the_client_tells_whoever_waits(self, connect: Connect, url: str) -> None:
        client = connect(url)
        connect(url).lock("import").acquire()
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                client.lock("import").acquire(timeout=LONG)
            except holdfast.HoldfastError as error:
                errors.append(error)

        with waiting(wait):
            client.close()
        assert [type(error) for error in errors] == [holdfast.EngineError]
        assert "closed" in str(errors[0])

    def test_a_closed_client_locks_nothing(self, connect: Connect, url: str) -> None:
        client = connect(url)
        lock = client.lock("import")
        client.close()
        for attempt in (lock.acquire, lock.try_acquire, client.lock(("agent", 7)).acquire):
            with pytest.raises(holdfast.EngineError, match="closed"):
                attempt()
        unused = connect(url)
        unused.close()
        for name in ("import", ("agent", 7)):
            with pytest.raises(holdfast.EngineError, match="closed"):
                unused.lock(name).acquire()

    def test_a_name_that_is_none(self, connect: Connect, url: str) -> None:
        client = connect(url)
        refused: list[tuple[Any, type[Exception], str]] = [
            ("", ValueError, "1 to 200 characters"),
            ("x" * 201, ValueError, "1 to 200 characters"),
            ("tab\there", ValueError, "control characters"),
            (7, TypeError, "str or"),
            (("agent",), TypeError, "str or"),
            (("agent", 1, 2), TypeError, "str or"),
            (["agent", 7], TypeError, "str or"),
            (("agent", "7"), TypeError, "must be an int"),
            (("agent", True), TypeError, "must be an int"),
            (("agent", 2**31), ValueError, "2147483647"),
            (("agent", -(2**31) - 1), ValueError, "-2147483648"),
            (("", 7), ValueError, "namespace"),
            ((7, 7), TypeError, "namespace"),
            ((["agent"], 7), TypeError, "namespace"),
        ]
        for name, error, message in refused:
            with pytest.raises(error, match=message):
                client.lock(name)

    def test_the_first_and_the_last_number(self, connect: Connect, url: str) -> None:
        client, other = connect(url), connect(url)
        for number in (-(2**31), -1, 0, 2**31 - 1):
            with client.lock(("edge", number)):
                assert other.lock(("edge", number)).try_acquire() is None

    def test_a_timeout_that_is_none(self, connect: Connect, url: str) -> None:
        client = connect(url)
        for timeout in (-1, float("nan"), "1", True):
            with pytest.raises((ValueError, TypeError), match="timeout"):
                client.lock("import", timeout=timeout)
            with pytest.raises((ValueError, TypeError), match="timeout"):
                client.lock("import").acquire(timeout=timeout)

    def test_an_on_lost_that_is_none(self, connect: Connect, url: str) -> None:
        with pytest.raises(ValueError, match="on_lost"):
            connect(url).lock("import", on_lost="explode")
