"""The process driver beside a replica that was given none: started, used when one is there already, ended with us.

Its sandboxes go on without it, and the next driver on the same folder has them again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import holdfast
from holdfast.gateway.logs import say

_START_WITHIN = 30.0
"""Seconds: on a busy machine it takes long until a program says its first word."""
_END_WITHIN = 5.0
_LOOK_EVERY = 1.0
_AGAIN_IN = 0.2
_NEVER = 2
"""How a driver ends that cannot run as it was called: another one could not, either."""

# The kernel ends it when we are gone, however we went: nobody else would.
_CHILD = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15);"
    "os.getppid() == int(sys.argv.pop(1)) or sys.exit(1);"
    "from holdfast.cli import main; main()"
)


class Beside:
    """One folder, one driver, whichever of the replicas on this machine has started it."""

    def __init__(self, folder: str, *, end_sandboxes: bool) -> None:
        self.folder = Path(folder).absolute()
        self.address = f"unix:{self.folder / 'driver.sock'}"
        self._options = ["--end-sandboxes"] if end_sandboxes else []
        self._process: asyncio.subprocess.Process | None = None
        self._telling: asyncio.Task[None] | None = None
        self._last_words = "it said nothing"

    async def ensure(self) -> None:
        """One answers. DriverError when none can be had."""
        try:
            async with asyncio.timeout(_START_WITHIN):
                while not await self._answers():
                    if self._process is None or self._process.returncode is not None:
                        await self._start()
        except TimeoutError:
            raise self._hopeless() from None

    async def keep(self) -> None:
        """Start another whenever there is none any more, be it ours or that of a replica that has ended."""
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            if not await self._answers():
                say("driver.away", address=self.address)
                await self.ensure()

    async def close(self) -> None:
        """End it, if it is ours."""
        if self._process is None or self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_END_WITHIN):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._telling is not None:
            await self._telling
        say("driver.ended", pid=self._process.pid)

    async def _answers(self) -> bool:
        try:
            await holdfast.AsyncProcessDriver(self.address, timeout=5.0).list()
        except holdfast.DriverError:
            return False
        return True

    async def _start(self) -> None:
        """Ours, unless another one has the folder a moment before."""
        command = [sys.executable, "-c", _CHILD, str(os.getpid()), "driver", "--folder", str(self.folder), "--json"]
        self._process = process = await asyncio.create_subprocess_exec(
            *command, *self._options, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        self._telling = asyncio.create_task(self._tell(process.stderr))
        if await process.stdout.readline():
            say("driver.started", pid=process.pid, address=self.address)
        else:
            code = await process.wait()
            await self._telling
            say("driver.refused", logging.WARNING, code=code, folder=str(self.folder))
            if code == _NEVER:
                raise self._hopeless()
            await asyncio.sleep(_AGAIN_IN)

    def _hopeless(self) -> holdfast.DriverError:
        return holdfast.DriverError(f"no driver could be started on {self.folder}: {self._last_words}")

    async def _tell(self, said: asyncio.StreamReader) -> None:
        """What it tells is in our log, too, as one event: its own words are in the fields."""
        while line := await said.readline():
            try:
                fields = {name: value for name, value in json.loads(line).items() if name != "at"}
            except (ValueError, AttributeError):
                self._last_words = re.sub("^(holdfast|Error): ", "", line.decode(errors="replace").strip())
                fields = {"message": self._last_words}
            say("driver.said", fields=fields)
