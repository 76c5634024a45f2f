"""Keeps what runs true to what is in the folders: the same look at a sandbox, whatever the occasion.

The folders are the truth; here is only what was last seen there. A look may come from a request, from a supervisor that
rings, from one that has ended, from the start of the driver or from its clock, and each brings a sandbox one step on:
start it if it never was, order its end if it is to go, remove it when it is gone, write down its loss if its supervisor
was killed. So a driver that is killed anywhere is continued by the next one. A folder that was damaged is told as such,
and harms no other.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.driver import store, strays
from holdfast.driver.box import Box
from holdfast.driver.events import Events
from holdfast.driver.spec import describe
from holdfast.driver.store import Damaged, Owned, Store

TICK, SOON = 1.0, 0.02
PATIENCE = 5.0
"""Seconds after the grace in which a supervisor must have ended its sandbox; then it is ended itself."""


class Full(Exception):
    """There are as many sandboxes as there may be."""


class Taken(Exception):
    """There is another sandbox of that id."""


class Runs:
    """``open_files``: as many as a sandbox may have, unless its spec says otherwise; else as many as the driver."""

    def __init__(
        self, folder: Path, most: int, say: Callable[[Mapping[str, Any]], None], open_files: int | None = None
    ) -> None:
        self._store, self._most, self._say, self._open_files = Store(folder), most, say, open_files
        self._boxes: dict[str, Box] = {}
        self._removals: set[asyncio.Task[None]] = set()
        self._clock: asyncio.Task[None] | None = None
        self._ending = False
        self.events = Events()

    async def open(self) -> None:
        """Adopt what is there."""
        await asyncio.to_thread(self._store.remove_leftovers)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._bury)
        for name in self._store.names():
            self._boxes[name] = Box.found(self._store.folder(name))
            self._visit(self._boxes[name])
        self._clock = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """The sandboxes go on."""
        if self._clock:
            self._clock.cancel()
        for box in self._boxes.values():
            box.deafen()
        await asyncio.gather(*self._removals)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def list(self) -> list[dict[str, Any]]:
        return [box.told for box in self._boxes.values()]

    def get(self, id: str) -> Box | None:
        return self._boxes.get(id)

    def create(self, id: str, spec: Mapping[str, Any]) -> tuple[Box, bool]:
        """And whether it is new. The same again is no mistake; Taken when it is not the same."""
        folder = self._store.folder(id)
        if id not in self._boxes and folder.is_dir():  # made when the disk failed us, and nobody was told
            self._boxes[id] = Box.found(folder)
        if (known := self._boxes.get(id)) is not None:
            self.look(known)  # somebody may have removed its folder
        if (box := self._boxes.get(id)) is not None:
            if box.facts.damage:
                raise Taken(f"there is a sandbox {id!r} whose folder is damaged ({box.facts.damage}): delete it first")
            if box.facts.deleting is not None:
                raise Taken(f"sandbox {id!r} is being deleted")
            if {name: box.facts.spec.get(name) for name in spec} != spec:
                raise Taken(f"there is a sandbox {id!r} with another spec")
            return box, False
        if len(self._boxes) >= self._most:
            raise Full(f"there are {self._most} sandboxes, and no more are allowed")
        self._store.make(id, spec)
        box = self._boxes[id] = Box(folder, store.facts(folder))
        self.look(box)
        return box, True

    def delete(self, box: Box, grace: float | None) -> None:
        """Asked for on the disk first, so that no crash forgets it. The shortest grace asked for counts."""
        known = box.facts.deleting
        wanted = box.facts.spec["grace"] if grace is None else grace
        if known is None or wanted < known["grace"]:
            store.mark_deleting(box.folder, wanted)
        self.look(box)

    async def end_all(self) -> None:
        """End what runs, and keep the sandboxes with their logs and exit codes."""
        self._ending = True
        for box in list(self._boxes.values()):
            self._visit(box)
        while any(box.life is not None or box.child is not None for box in self._boxes.values()):  # noqa: ASYNC110
            await asyncio.sleep(SOON)

    def look(self, box: Box) -> None:
        """See what is there, and bring it one step on."""
        if box.gone.is_set():
            return
        try:
            self._step(box)
        except Damaged as damage:
            self._set_aside(box, str(damage))
        except FileNotFoundError as missing:
            if box.folder.exists():
                self._set_aside(box, f"{Path(missing.filename).name} is missing")
            else:
                strays.kill(box.run)  # somebody has removed the folder: its supervisor ends with it
                self._forget(box)

    def _visit(self, box: Box) -> None:
        """Look where nobody waits for the answer: one that cannot be looked at is told, and the others go on."""
        try:
            self.look(box)
        except Exception as error:
            box.told = box.told or describe(box.facts)
            message = f"{type(error).__name__}: {error}"
            self._say({"kind": "platform", "id": box.id, "reason": "Trouble", "message": message})

    def _step(self, box: Box) -> None:
        alive = store.supervised(box.folder)  # before the files: a supervisor that is gone has written all it will
        if alive:
            box.listen(lambda: self._visit(box))
        elif box.child is None:
            box.deafen()
        trouble = box.facts.trouble
        box.facts = store.facts(box.folder, None if box.facts.damage else box.facts.spec)
        box.facts.trouble = trouble if box.facts.started is None else ""
        if alive:
            self._hasten(box)
        elif box.child is None:
            self._settle(box)
        if not box.gone.is_set():
            self._tell(box)

    def _set_aside(self, box: Box, why: str) -> None:
        """Nobody can tell what it is to be, so that nothing is done for it but what a delete asks for."""
        box.facts = store.damaged(box.folder, why, box.facts.spec)
        if box.facts.deleting is not None:
            if store.supervised(box.folder, missing=False):
                self._hasten(box)
            elif not strays.kill(box.run):
                self._remove(box)
                return
        self._tell(box)

    def _settle(self, box: Box) -> None:
        """There is no supervisor, and none is on its way."""
        facts = box.facts
        if facts.deleting is None and facts.exit is not None:
            return
        if facts.deleting is None and facts.started is None:
            if not self._ending:
                box.start(self._open_files)
                if box.child is not None:
                    box.listen(lambda: self._visit(box))
            return
        with Owned(box.folder) as lock:
            if not lock.taken:
                return
            if facts.exit is None and facts.started is not None:
                if strays.kill(box.run):
                    return  # the clock looks again whether they are gone
                if facts.deleting is None:
                    self._lost(box)
            if facts.deleting is not None:
                self._remove(box)

    def _bury(self) -> None:
        """Supervisors that this driver started, as they end."""
        for box in list(self._boxes.values()):
            if box.bury():
                self._visit(box)

    def _hasten(self, box: Box) -> None:
        """It has a supervisor: has it been told, and does it do what it was told?"""
        deleting = box.facts.deleting
        grace = deleting["grace"] if deleting else box.facts.spec["grace"] if self._ending else None
        if grace is not None and (box.ordered is None or grace < box.ordered) and box.order(grace):
            self._publish("platform", box.id, reason="Ending", message=f"told to end within {grace:g} s")
        if box.end_by is not None and time.monotonic() > box.end_by + PATIENCE and box.facts.started:
            strays.kill_supervisor(box.facts.started["supervisor"], lambda: store.supervised(box.folder))

    def _lost(self, box: Box) -> None:
        end = {"exit_code": None, "signal": None, "problem": None, "ended": False, "lost": True}
        store.write(box.folder / "exit.json", {**end, "finished_at": time.time()})
        box.facts = store.facts(box.folder, box.facts.spec)

    def _remove(self, box: Box) -> None:
        left = self._store.take_away(box.id)
        self._forget(box)
        removal = asyncio.create_task(asyncio.to_thread(store.remove, left))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    def _forget(self, box: Box) -> None:
        box.deafen()
        del self._boxes[box.id]
        box.gone.set()
        self._publish("deleted", box.id)

    def _tell(self, box: Box) -> None:
        before, box.told = box.told, describe(box.facts)
        if before != box.told:
            ready = box.told["conditions"][0]
            self._publish("status", box.id, reason=ready["reason"], message=ready["message"], sandbox=box.told)

    def _publish(self, kind: str, id: str, **more: Any) -> None:
        self._say(self.events.add(kind, id, **more))

    async def _tick(self) -> None:
        """The net under everything that should have been heard of."""
        while True:
            await asyncio.sleep(TICK)
            for box in list(self._boxes.values()):
                if not self._is_well(box):
                    self._visit(box)

    def _is_well(self, box: Box) -> bool:
        """Then there is nothing to look at but its lock; or, when it has ended, that nobody has removed it. Where that
        cannot be seen now, a whole look says why."""
        facts = box.facts
        if facts.deleting is not None or facts.damage:
            return False
        try:
            if facts.exit is not None:
                return box.folder.exists()
            return facts.running and store.supervised(box.folder, missing=False)
        except OSError:
            return False
