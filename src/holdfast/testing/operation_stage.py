"""What the contract of operations is played with: effects that are counted in a list, as something outside of the
database, somebody else who is at it, and somebody who dies."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import holdfast

Connect = Callable[..., Any]

LONG = 60.0
RESULTS: list[Any] = [
    None, {}, [], 0, 0.0, False, True, "", "text", b"", b"\x00\xff", -1, 2**100, 0.1, "é \u0000 \ud800 \U0001f600",
    [1, [None, "a"], 1.0], {"b": 1, "a": {"": [1.0, 1]}}, bytes(range(256)) * 1000, "x" * 1_000_000,
]  # fmt: skip
WRONG: list[Any] = [object(), (1, 2), {1: 2}, {"a": {1, 2}}, float("nan"), [float("inf")], bytearray(b"x")]


def name() -> str:
    return f"op-{secrets.token_hex(6)}"


class Effects(list[Any]):
    """What was done, in order."""

    def do(self, result: Any = None, error: Exception | None = None) -> Callable[[], Any]:
        def function() -> Any:
            self.append(result)
            if error is not None:
                raise error
            return result

        return function


@contextmanager
def running(url: str, key: Any, **options: Any) -> Iterator[Callable[[], Future[Any]]]:
    """Somebody else is at it, until the block calls what it is given, or ends."""
    begun, go_on = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert go_on.wait(10 * LONG)  # for as long as the block takes
        return "theirs"

    with holdfast.Client(url) as other, ThreadPoolExecutor(1) as pool:
        result = pool.submit(lambda: other.operation(key, **options).run(work))
        try:
            assert begun.wait(LONG), result.result()

            def finish() -> Future[Any]:
                go_on.set()
                return result

            yield finish
        finally:
            go_on.set()


def gives_up(run: Callable[[], Any], *, after: float) -> None:
    """``run`` finds the operation locked, and raises OperationInProgress when it has waited for ``after`` seconds.

    A wait of less than a second gives the database one second to answer. On a machine that stands still for longer it
    ends with an EngineError, which says nothing of the lock: ``run`` is called again.
    """
    until = time.monotonic() + LONG
    while True:
        try:
            with pytest.raises(holdfast.OperationInProgress, match=r"waited \d+\.\d s") as refused:
                run()
        except holdfast.EngineError:
            assert time.monotonic() < until, "the database never answers"
        else:
            waited = re.findall(r"waited (\d+\.\d) s", str(refused.value))
            assert float(waited[0]) >= after, refused.value
            return


def leave_half_done(url: str, key: Any, note: Any = None, **options: Any) -> None:
    """As a process that dies leaves it: nothing is said any more, and its lease is gone."""

    def work(op: Any) -> None:
        if note is not None:
            op.checkpoint("noted", note)
        raise KeyboardInterrupt

    with holdfast.Client(url) as dies, pytest.raises(KeyboardInterrupt):
        dies.operation(key, **options).run(work)


def interrupted() -> None:
    raise KeyboardInterrupt
