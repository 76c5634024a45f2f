"""A signal handler or a finalizer uses locks of the same client while its thread is anywhere in a call for a lock.

It gets its lock or an error that says why not. It never waits for its own thread, and the call goes on afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

import pytest

import holdfast
from tests import interrupts
from tests.children import PATIENCE, eventually
from tests.lock.internals.test_interrupts import SPARED, STRIDE
from tests.lock.looks import is_idle


class Handler(interrupts.Interrupt):
    """Calls ``handle`` before instruction number ``at`` of holdfast, as a signal would."""

    def __init__(self, at: int, handle: Callable[[], None]) -> None:
        super().__init__(at, "/src/holdfast/", without=SPARED)
        self.handle = handle

    def _before_instruction(self, frame: FrameType, place: int) -> None:
        if not self.raised:
            self.left -= 1
            if self.left < 0:
                self.raised = True
                self.where = interrupts.stack(frame)
                self.handle()


class Rival:
    """What a handler may do. ``errors``: those that say why it could not."""

    def __init__(self, client: holdfast.Client) -> None:
        self.client = client
        self.grants: list[holdfast.LockGrant] = []
        self.errors: list[holdfast.Unreachable] = []

    def lock(self) -> None:
        self._call(lambda: self.client.lock("handler").acquire(timeout=PATIENCE).release())

    def release(self) -> None:
        """If it raises, the lock is released after the call that was interrupted."""
        self._call(self.grants.pop().release)

    def forget(self) -> None:
        """The garbage collector ends a block."""
        self.grants.pop()._stays_locked = False

    def _call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except holdfast.Unreachable as error:
            self.errors.append(error)


@pytest.mark.parametrize("what", ["lock", "release", "forget"])
def test_a_handler_may_use_locks_wherever_its_thread_is(either: str, what: str) -> None:
    with holdfast.Client(either) as client, holdfast.Client(either) as other:
        client.lock("a").acquire().release()
        rival, at = Rival(client), 0
        while True:
            eventually(lambda: is_idle(client), "a session is free")
            rival.grants = [client.lock("handler").acquire(timeout=PATIENCE)] if what != "lock" else []
            handler = Handler(at, getattr(rival, what))
            with handler:
                grant = client.lock("a").acquire(timeout=PATIENCE)
                assert grant.release() is True, handler.where
            if not handler.raised:
                assert at > 400
                break
            for name in ("a", "handler"):
                try:
                    other.lock(name).acquire(timeout=PATIENCE).release()
                except holdfast.AcquireTimeout as error:
                    raise AssertionError(f"at {at}, {handler.where}: {name} is still locked") from error
            at += STRIDE
        assert all("signal handler" in str(error) for error in rival.errors)
