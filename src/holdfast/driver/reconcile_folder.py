"""Reconciles processes with the folders of sandboxes, in steps that any event may trigger.

The folders are the truth; this object has only what was last read from them. A request, a supervisor that reports or
ends, the start of the driver and its timer all call ``reconcile`` for a sandbox. Each call does the next step: start a
sandbox that never was, order the end of one that is to be deleted, remove one that has ended, record the loss of one
whose supervisor was killed. So the next driver continues after a kill at any point. A damaged folder is reported, and
affects no other sandbox.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.driver import orphans, store
from holdfast.driver.events import Events
from holdfast.driver.orphans import Subreaper
from holdfast.driver.sandbox import SUPERVISOR, Sandbox
from holdfast.driver.spec import describe
from holdfast.driver.store import Damaged, SandboxStore, SupervisorLock

TICK, POLL_EVERY = 1.0, 0.02
KILL_AFTER = 5.0
"""Seconds after the grace until a supervisor that has not ended its sandbox is killed."""


class TooManySandboxes(Exception):
    pass


class IdTaken(Exception):
    """By another sandbox."""


class FolderReconciler:
    """``open_files``: the limit for sandboxes whose spec has none; None: that of the driver. ``subreaper``: of a
    process that starts no other children than supervisors."""

    def __init__(
        self, folder: Path, limit: int, log: Callable[[Mapping[str, Any]], None], open_files: int | None = None,
        subreaper: Subreaper | None = None,
    ) -> None:  # fmt: skip
        self._store, self._limit, self._log, self._open_files = SandboxStore(folder), limit, log, open_files
        self._subreaper = subreaper
        self._sandboxes: dict[str, Sandbox] = {}
        self._removals: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Task[None] | None = None
        self._ending = False
        self.events = Events()

    async def open(self) -> None:
        """Load all sandboxes from disk, and start the timer."""
        await asyncio.to_thread(self._store.remove_leftovers)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap_supervisors)
        for name in self._store.names():
            self._sandboxes[name] = Sandbox.load(self._store.folder(name))
            self._try_reconcile(self._sandboxes[name])
        self._timer = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Stop reconciling. Sandboxes keep running."""
        if self._timer:
            self._timer.cancel()
        for sandbox in self._sandboxes.values():
            sandbox.unsubscribe()
        await asyncio.gather(*self._removals)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def list(self) -> list[dict[str, Any]]:
        return [sandbox.description for sandbox in self._sandboxes.values()]

    def get(self, id: str) -> Sandbox | None:
        return self._sandboxes.get(id)

    def create(self, id: str, spec: Mapping[str, Any]) -> tuple[Sandbox, bool]:
        """The sandbox, and whether it is new. Raises IdTaken when there is one with another spec, TooManySandboxes
        beyond the limit, and OSError."""
        folder = self._store.folder(id)
        if id not in self._sandboxes and folder.is_dir():  # made before a disk error, and not acknowledged
            self._sandboxes[id] = Sandbox.load(folder)
        if (existing := self._sandboxes.get(id)) is not None:
            self.reconcile(existing)  # its folder may have been removed by hand
        if (sandbox := self._sandboxes.get(id)) is not None:
            if sandbox.facts.damage:
                raise IdTaken(
                    f"there is a sandbox {id!r} whose folder is damaged ({sandbox.facts.damage}): delete it first"
                )
            if sandbox.facts.deleting is not None:
                raise IdTaken(f"sandbox {id!r} is being deleted")
            if {name: sandbox.facts.spec.get(name) for name in spec} != spec:
                raise IdTaken(f"there is a sandbox {id!r} with another spec")
            return sandbox, False
        if len(self._sandboxes) >= self._limit:
            raise TooManySandboxes(f"there are {self._limit} sandboxes, and no more are allowed")
        self._store.create(id, spec)
        sandbox = self._sandboxes[id] = Sandbox(folder, store.read_facts(folder))
        self.reconcile(sandbox)
        return sandbox, True

    def delete(self, sandbox: Sandbox, grace: float | None) -> None:
        """Record the deletion on disk first, so that no crash forgets it. The shortest grace of all requests counts."""
        deleting = sandbox.facts.deleting
        grace = sandbox.facts.spec["grace"] if grace is None else grace
        if deleting is None or grace < deleting["grace"]:
            store.mark_deleting(sandbox.folder, grace)
        self.reconcile(sandbox)

    async def end_all(self) -> None:
        """End all processes, and keep the folders with their logs and exit codes."""
        self._ending = True
        for sandbox in list(self._sandboxes.values()):
            self._try_reconcile(sandbox)
        while any(sandbox.life is not None or sandbox.child is not None for sandbox in self._sandboxes.values()):  # noqa: ASYNC110
            await asyncio.sleep(POLL_EVERY)

    def reconcile(self, sandbox: Sandbox) -> None:
        """Read the folder of a sandbox, and do the next step."""
        if sandbox.removed.is_set():
            return
        try:
            self._step(sandbox)
        except Damaged as damage:
            self._handle_damage(sandbox, str(damage))
        except FileNotFoundError as missing:
            if sandbox.folder.exists():
                self._handle_damage(sandbox, f"{Path(missing.filename).name} is missing")
            else:
                orphans.kill(sandbox.run)  # the folder was removed by hand: its supervisor ends with it
                self._remove(sandbox)

    def _try_reconcile(self, sandbox: Sandbox) -> None:
        """Reconcile without a request to answer: an error is logged, and the other sandboxes continue."""
        try:
            self.reconcile(sandbox)
        except Exception as error:
            sandbox.description = sandbox.description or describe(sandbox.facts)
            message = f"{type(error).__name__}: {error}"
            self._log({"kind": "platform", "id": sandbox.id, "reason": "Trouble", "message": message})

    def _step(self, sandbox: Sandbox) -> None:
        # Checked before the files are read: a supervisor that has ended writes no more.
        is_supervised = store.has_supervisor(sandbox.folder)
        if is_supervised:
            sandbox.subscribe(lambda: self._try_reconcile(sandbox))
        elif sandbox.child is None:
            sandbox.unsubscribe()
        trouble = sandbox.facts.trouble
        sandbox.facts = store.read_facts(sandbox.folder, None if sandbox.facts.damage else sandbox.facts.spec)
        sandbox.facts.trouble = trouble if sandbox.facts.started is None else ""
        if is_supervised or sandbox.child is not None:  # perhaps with another lock, which its program has moved
            self._enforce_end(sandbox)
        else:
            self._handle_unsupervised(sandbox)
        if not sandbox.removed.is_set():
            self._publish_change(sandbox)

    def _handle_damage(self, sandbox: Sandbox, damage: str) -> None:
        """Report a damaged folder. Nothing is done for it but to delete it on request."""
        sandbox.facts = store.damaged(sandbox.folder, damage, sandbox.facts.spec)
        if sandbox.facts.deleting is not None:
            if store.has_supervisor(sandbox.folder, missing=False):
                self._enforce_end(sandbox)
            elif not orphans.kill(sandbox.run) and not self._kill_adopted():
                self._remove(sandbox)
                return
        self._publish_change(sandbox)

    def _handle_unsupervised(self, sandbox: Sandbox) -> None:
        """There is no supervisor, and none is being started: start one, or record and clean up its end."""
        facts = sandbox.facts
        if facts.deleting is None and facts.exit is not None:
            return
        if facts.deleting is None and facts.started is None:
            if not self._ending:
                sandbox.start(self._open_files)
                if sandbox.child is not None:
                    sandbox.subscribe(lambda: self._try_reconcile(sandbox))
            return
        with SupervisorLock(sandbox.folder) as lock:
            if not lock.is_acquired:
                return
            if facts.exit is None and facts.started is not None:
                if orphans.kill(sandbox.run) or self._kill_adopted():
                    return  # the timer checks again whether they are gone
                if facts.deleting is None:
                    self._record_loss(sandbox)
            if facts.deleting is not None and not self._kill_adopted():
                self._remove(sandbox)

    def _reap_supervisors(self) -> None:
        """On SIGCHLD: reconcile the sandboxes whose supervisors have ended. One that was killed leaves us its orphans,
        and their end is what no supervisor explains."""
        ended = [sandbox for sandbox in self._sandboxes.values() if sandbox.reap_supervisor()]
        if not ended or any(sandbox.facts.trouble for sandbox in ended):
            self._kill_adopted()
        for sandbox in ended:
            self._try_reconcile(sandbox)

    def _kill_adopted(self) -> bool:
        """Whether processes are left whose supervisor was killed; of which sandbox they were is unknown."""
        if self._subreaper is None:
            return False
        return self._subreaper.kill_adopted(
            {sandbox.child.pid for sandbox in self._sandboxes.values() if sandbox.child is not None}
        )

    def _enforce_end(self, sandbox: Sandbox) -> None:
        """Order the supervisor to end a sandbox that has to end, and kill a supervisor that does not obey."""
        deleting = sandbox.facts.deleting
        grace = deleting["grace"] if deleting else sandbox.facts.spec["grace"] if self._ending else None
        if (
            grace is not None
            and (sandbox.ordered_grace is None or grace < sandbox.ordered_grace)
            and sandbox.order_end(grace)
        ):
            self._publish("platform", sandbox.id, reason="Ending", message=f"told to end within {grace:g} s")
        if sandbox.end_by is not None and time.monotonic() > sandbox.end_by + KILL_AFTER:
            orphans.kill_supervisor(SUPERVISOR, sandbox.run or str(sandbox.folder))

    def _record_loss(self, sandbox: Sandbox) -> None:
        end = {"exit_code": None, "signal": None, "problem": None, "ended": False, "lost": True}
        store.write(sandbox.folder / "exit.json", {**end, "finished_at": time.time()})
        sandbox.facts = store.read_facts(sandbox.folder, sandbox.facts.spec)

    def _remove(self, sandbox: Sandbox) -> None:
        """Move its folders to the trash, so that its id is free at once; delete the trash in a thread. OSError when
        they cannot be moved."""
        trash = self._store.move_to_trash(sandbox.id)
        self._forget(sandbox)
        for path in trash:
            removal = asyncio.create_task(asyncio.to_thread(store.remove, path))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)

    def _forget(self, sandbox: Sandbox) -> None:
        sandbox.unsubscribe()
        del self._sandboxes[sandbox.id]
        sandbox.removed.set()
        self._publish("deleted", sandbox.id)

    def _publish_change(self, sandbox: Sandbox) -> None:
        before, sandbox.description = sandbox.description, describe(sandbox.facts)
        if before != sandbox.description:
            ready = sandbox.description["conditions"][0]
            self._publish(
                "status", sandbox.id, reason=ready["reason"], message=ready["message"], sandbox=sandbox.description
            )

    def _publish(self, kind: str, id: str, **more: Any) -> None:
        self._log(self.events.add(kind, id, **more))

    async def _tick(self) -> None:
        """Reconcile what an event should have triggered and did not."""
        while True:
            await asyncio.sleep(TICK)
            for sandbox in list(self._sandboxes.values()):
                if not self._is_unchanged(sandbox):
                    self._try_reconcile(sandbox)

    def _is_unchanged(self, sandbox: Sandbox) -> bool:
        """A cheap check: a running sandbox has its supervisor, an ended one its folder. False also when that cannot be
        read: reconciling reports why."""
        facts = sandbox.facts
        if facts.deleting is not None or facts.damage:
            return False
        try:
            if facts.exit is not None:
                return sandbox.folder.exists()
            return facts.running and store.has_supervisor(sandbox.folder, missing=False)
        except OSError:
            return False
