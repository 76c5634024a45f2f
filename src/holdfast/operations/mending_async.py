"""What is done to an operation from outside: what a dead owner left is mended, and a key is given free again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from holdfast.errors import HoldfastError, OperationFailed, PolicyDenied
from holdfast.operations.calling_async import call
from holdfast.operations.decide import Prior, in_progress, mended, told
from holdfast.operations.external_async import AsyncExternal
from holdfast.operations.pointer import effective
from holdfast.operations.running_async import AsyncRunning


class AsyncMending(AsyncExternal):
    """Under the lease of the operation, as whoever runs it. Somebody else who has that is not disturbed."""

    async def recover(self, permit: Callable[[], None]) -> str | None:
        """What became of one that a dead owner left: "finished" or "rolled back"; None when it is not left any more.
        ``permit`` raises where it may not be rolled back."""
        try:
            prior = await self._take_over()
            if prior is None or prior.status != "partial":
                return None
            op = await self._outside(prior)
            if prior.effect_started:
                if not await self._claimed(op, prior):
                    return None
                if await self._mended(op, prior, permit):
                    return "finished"
            await self._end(op, "rollback", {"attempt": prior.attempt, "name": self.plan.handler}, prior.failed)
            return "rolled back"
        finally:
            await self.let_go()

    async def roll_back(self, actor: str, reason: str, expected: str | None) -> None:
        """Undo it, once, whatever became of it; or what is there to ``expected``, the end of its chain."""
        try:
            prior = await self._taken_over()
            if expected is not None and prior.pointer != expected:
                raise self._overtaken()
            if not effective(prior):
                raise LookupError(f"operation {self.plan.key.label!r} leaves nothing to undo: it is {prior.status}")
            if self.plan.rollback is None:
                raise self._refusal(prior)
            op = await self._outside(prior)
            if prior.status == "success":  # which nobody runs again
                await call(self.plan.rollback, await self.dead(prior, self._asked_at))
            else:
                self.plan = self.plan._replace(verify=None)
                if not await self._claimed(op, prior):
                    raise self._overtaken()
                await self._mended(op, prior, lambda: None)
            said = {"name": self.plan.handler, "actor": actor, "reason": reason}
            await self._end(op, "rollback", said, prior.failed)
        finally:
            await self.let_go()

    async def _claimed(self, op: AsyncRunning, prior: Prior) -> bool:
        """Before anything of the user's is called: a transaction does not ask for the lease, and what a batch or a
        transaction left has another than whoever runs it. From here on they find it under way, or cannot commit; False
        when they were faster."""
        op.began = True
        return await self._write(op, "partial", error=prior.error) == "done"

    async def _mended(self, op: AsyncRunning, prior: Prior, permit: Callable[[], None]) -> bool:
        """True when a probe says that it is done; else it is rolled back, for what is not done may be so in part."""
        try:
            if self.plan.verify is not None:
                done = await self.probe(self.plan.verify, prior, self._asked_at)
                if done is not None:
                    await self.succeed(op, done.result)
                    return True
            if self.plan.rollback is not None:
                permit()
                await call(self.plan.rollback, await self.dead(prior, self._asked_at))
        except Exception as error:
            if self._grant is not None:  # else it is written down already, or refused
                denied = isinstance(error, PolicyDenied)
                await self._close(op, "partial", error=prior.error if denied else json.dumps(told(error)))
            raise
        return False

    async def reset(self, actor: str, reason: str) -> None:
        """Let it be run as if it were new; all that happened to it stays in the log."""
        try:
            prior = await self._taken_over()
            op = await self._outside(prior)
            await self._end(op, "reset", {"actor": actor, "reason": reason}, 0)
        finally:
            await self.let_go()

    async def _taken_over(self) -> Prior:
        prior = await self._take_over()
        if prior is None:
            raise in_progress(self.plan.key)
        return prior

    async def _take_over(self) -> Prior | None:
        """Under its lease, which whoever asks lets go of, as it is now; None when somebody is at it."""
        self._grant = await self._lease.try_acquire()
        if self._grant is None or not await self._undivided():
            return None
        prior = await self._look()
        if prior.status is None or prior.alive:
            return None
        self.prior = prior
        self.plan = self.plan._replace(fingerprint=prior.fingerprint)
        return prior

    async def _outside(self, prior: Prior) -> AsyncRunning:
        """The operation as it stands; nothing that follows is a new attempt."""
        op = AsyncRunning(self.plan.key, prior, self._asked_at, attempt=prior.attempt, fence=self.held.fence)
        op.note("lock_acquired", {**self._lock(), "outside": True})
        return op

    async def _end(
        self, op: AsyncRunning, kind: Literal["rollback", "reset"], detail: dict[str, Any], failures: int
    ) -> None:
        op.note(kind, detail)
        op.began = False
        await self._close(op, "failure", error=json.dumps(mended(kind, detail)), failures=failures)

    def _overtaken(self) -> HoldfastError:
        """A transaction does not ask for the lease, and may have committed since it was looked at."""
        return in_progress(self.plan.key, why="it has gone on meanwhile: look again")

    def _refusal(self, prior: Prior) -> OperationFailed:
        key, handler = self.plan.key, self.plan.handler
        why = "nothing is registered to undo it: it was made without the name of a rollback"
        if handler is not None:
            why = (
                f"its rollback {handler!r} is not registered here: client.operations.register({handler!r}, rollback=…)"
            )
        message = f"operation {key.label!r}: {why}"
        return OperationFailed(message, key=key.digest, label=key.label, status=prior.status or "failure", error=None)
