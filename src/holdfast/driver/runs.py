"""Keeps what runs true to what is in the folders: the same look at a sandbox, whatever the occasion.

The folders are the truth; here is only what was last seen there. A look may come from a request, from a supervisor that
rings, from one that has ended, from the start of the driver or from its clock, and each brings a sandbox one step on:
start it if it never was, order its end if it is to go, remove it when it is gone, write down its loss if its supervisor
was killed. So a driver that is killed anywhere is continued by the next one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.driver import store, strays
from holdfast.driver.events import Events
from holdfast.driver.spec import Facts, describe
from holdfast.driver.store import Owned, Store

SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
TICK, SOON = 1.0, 0.02
PATIENCE = 5.0
"""Seconds after the grace in which a supervisor must have ended its sandbox; then it is ended itself."""


class Full(Exception):
    """There are as many sandboxes as there may be."""


class Taken(Exception):
    """There is another sandbox of that id."""


@dataclass
class Box:
    folder: Path
    facts: Facts
    told: dict[str, Any] = field(default_factory=dict)
    life: int | None = None
    child: subprocess.Popen[bytes] | None = None
    """Its supervisor, if this driver started it."""
    retry_at: float = 0.0
    ordered: float | None = None
    end_by: float | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return str(self.facts.spec["id"])


class Runs:
    def __init__(self, folder: Path, most: int, say: Callable[[Mapping[str, Any]], None]) -> None:
        self._store, self._most, self._say = Store(folder), most, say
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
            folder = self._store.folder(name)
            try:
                self._boxes[name] = Box(folder, store.facts(folder))
            except (OSError, ValueError) as error:
                self._say({"kind": "platform", "id": name, "reason": "Unreadable", "message": str(error)})
                continue
            self.look(self._boxes[name])
        self._clock = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """The sandboxes go on."""
        if self._clock:
            self._clock.cancel()
        for box in self._boxes.values():
            self._unwatch(box)
        await asyncio.gather(*self._removals)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def list(self) -> list[dict[str, Any]]:
        return [box.told for box in self._boxes.values()]

    def get(self, id: str) -> Box | None:
        return self._boxes.get(id)

    def create(self, id: str, spec: Mapping[str, Any]) -> tuple[Box, bool]:
        """And whether it is new. The same again is no mistake; Taken when it is not the same."""
        folder = self._store.folder(id)
        if id not in self._boxes and folder.exists():  # made when the disk failed us, and nobody was told
            self._boxes[id] = Box(folder, store.facts(folder))
        if (box := self._boxes.get(id)) is not None:
            if box.facts.deleting is not None:
                raise Taken(f"sandbox {id!r} is being deleted")
            if {name: box.facts.spec[name] for name in spec} != spec:
                raise Taken(f"there is a sandbox {id!r} with another spec")
            self.look(box)
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
            store.write(box.folder / "deleting", {"grace": wanted})
        self.look(box)

    async def end_all(self) -> None:
        """End what runs, and keep the sandboxes with their logs and exit codes."""
        self._ending = True
        for box in list(self._boxes.values()):
            self.look(box)
        while any(box.life is not None or box.child is not None for box in self._boxes.values()):  # noqa: ASYNC110
            await asyncio.sleep(SOON)

    def look(self, box: Box) -> None:
        """See what is there, and bring it one step on."""
        if box.gone.is_set():
            return
        try:
            self._step(box)
        except FileNotFoundError:
            if (box.folder / "spec.json").exists():
                raise
            strays.kill(box.facts.spec["run"])  # somebody has removed the folder: its supervisor ends with it
            self._forget(box)

    def _step(self, box: Box) -> None:
        alive = store.supervised(box.folder)  # before the files: a supervisor that is gone has written all it will
        if alive:
            self._watch(box)
        elif box.child is None:
            self._unwatch(box)
        trouble = box.facts.trouble
        box.facts = store.facts(box.folder, box.facts.spec)
        box.facts.trouble = trouble if box.facts.started is None else ""
        if alive:
            self._hasten(box)
        elif box.child is None:
            self._settle(box)
        if not box.gone.is_set():
            self._tell(box)

    def _settle(self, box: Box) -> None:
        """There is no supervisor, and none is on its way."""
        facts = box.facts
        if facts.deleting is None and facts.exit is not None:
            return
        if facts.deleting is None and facts.started is None:
            if not self._ending:
                self._start(box)
            return
        with Owned(box.folder) as lock:
            if not lock.taken:
                return
            if facts.exit is None and facts.started is not None:
                if strays.kill(facts.spec["run"]):
                    return  # the clock looks again whether they are gone
                self._lost(box)
            if facts.deleting is not None:
                self._remove(box)

    def _start(self, box: Box) -> None:
        """It decides under the lock whether it is the one to run the program, so that one too many does no harm."""
        if time.monotonic() < box.retry_at:
            return
        box.retry_at = time.monotonic() + TICK
        command = [sys.executable, "-I", "-S", SUPERVISOR, str(box.folder), str(box.facts.spec["run"])]
        try:
            with (box.folder / "supervisor.err").open("wb") as errors:
                box.child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True
                )
            self._watch(box)
        except OSError as error:
            box.facts.trouble = f"its supervisor cannot be started: {error.strerror}"

    def _bury(self) -> None:
        """Supervisors that this driver started, as they end."""
        for box in list(self._boxes.values()):
            if box.child is not None and box.child.poll() is not None:
                if box.child.returncode:
                    box.facts.trouble = f"its supervisor ended with {box.child.returncode}"
                box.child = None
                self.look(box)

    def _hasten(self, box: Box) -> None:
        """It has a supervisor: has it been told, and does it do what it was told?"""
        deleting = box.facts.deleting
        grace = deleting["grace"] if deleting else box.facts.spec["grace"] if self._ending else None
        if grace is not None and (box.ordered is None or grace < box.ordered):
            self._order(box, grace)
        if box.end_by is not None and time.monotonic() > box.end_by + PATIENCE and box.facts.started:
            strays.kill_supervisor(box.facts.started["supervisor"], lambda: store.supervised(box.folder))

    def _order(self, box: Box, grace: float) -> None:
        try:
            descriptor = os.open(box.folder / "orders", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # not yet there, or just gone: the next look knows
            return
        try:
            os.write(descriptor, b"end %f\n" % grace)
        except OSError:
            return
        finally:
            os.close(descriptor)
        box.ordered, end_by = grace, time.monotonic() + grace
        box.end_by = end_by if box.end_by is None else min(box.end_by, end_by)
        self._publish("platform", box.id, reason="Ending", message=f"told to end within {grace:g} s")

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
        self._unwatch(box)
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

    def _watch(self, box: Box) -> None:
        """Hear it when the supervisor rings or dies. It opens `life` before it takes the lock: whoever sees the lock
        taken can be sure to be told of its end."""
        if box.life is None:
            box.life = os.open(box.folder / "life", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            asyncio.get_running_loop().add_reader(box.life, self._rung, box)

    def _rung(self, box: Box) -> None:
        assert box.life is not None
        try:
            ended = not os.read(box.life, 4096)
        except BlockingIOError:
            return
        if ended:
            self._unwatch(box)
        self.look(box)

    def _unwatch(self, box: Box) -> None:
        if box.life is not None:
            asyncio.get_running_loop().remove_reader(box.life)
            os.close(box.life)
            box.life = None

    async def _tick(self) -> None:
        """The net under everything that should have been heard of."""
        while True:
            await asyncio.sleep(TICK)
            for box in list(self._boxes.values()):
                if box.facts.exit is not None and box.facts.deleting is None:
                    continue
                try:
                    if not (box.facts.running and box.facts.deleting is None and store.supervised(box.folder)):
                        self.look(box)
                except FileNotFoundError:
                    self.look(box)
                except OSError as error:
                    self._say({"kind": "platform", "id": box.id, "reason": "Trouble", "message": str(error)})
