"""The process driver of a replica that was given no ``driver`` address: started, shared, and ended with the replica.

Replicas on one machine with the same folder share one driver. Sandboxes keep running without it, and the next driver on
the same folder manages them again.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

import holdfast
from holdfast.gateway.logs import WARNING, log

_START_WITHIN = 30.0
"""Seconds. On a busy machine it takes long until a new Python process prints its first line."""
_END_WITHIN = 5.0
_CHECK_EVERY = 1.0
_RETRY_AFTER = 0.2
_SECRETS = (
    "HOLDFAST_URL", "HOLDFAST_TOKENS", "HOLDFAST_TOKENS_FILE", "HOLDFAST_DRIVER_TOKEN", "HOLDFAST_KEY",
    "HOLDFAST_KEY_FILE",
)  # fmt: skip
"""Variables of the replica that the driver does not get: sandboxes can read its environment."""
_USAGE_ERROR = 2
"""The exit code of a driver whose arguments are wrong: another start would fail, too."""

# prctl(PR_SET_PDEATHSIG, SIGTERM): the kernel ends the driver when the replica is gone, even after SIGKILL.
_CHILD = (
    "import ctypes, os, resource, sys; ctypes.CDLL(None).prctl(1, 15);"
    "os.getppid() == int(sys.argv.pop(1)) or sys.exit(1);"
    "soft = int(sys.argv.pop(1)); limit = resource.RLIMIT_NOFILE; hard = resource.getrlimit(limit)[1];"
    "resource.setrlimit(limit, (soft, hard));"
    "from holdfast.cli import main; main()"
)


class DriverProcess:
    """The driver on one folder, started by this replica or by another one on this machine."""

    def __init__(self, folder: str, *, end_sandboxes: bool, open_files: int | None = None) -> None:
        self.folder = Path(folder).absolute()
        self.address = f"unix:{self.folder / 'driver.sock'}"
        self._options = ["--end-sandboxes"] if end_sandboxes else []
        self._open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if open_files is None else open_files
        self._process: asyncio.subprocess.Process | None = None
        self._log_copier: asyncio.Task[None] | None = None
        self._last_output = "it printed nothing"

    async def ensure_running(self) -> None:
        """Return once a driver answers. DriverError when none could be started."""
        try:
            async with asyncio.timeout(_START_WITHIN):
                while not await self._answers():
                    if self._process is None or self._process.returncode is not None:
                        await self._start()
                    else:  # a look that fails at once, without descriptors, must not take the event loop
                        await asyncio.sleep(_RETRY_AFTER)
        except TimeoutError:
            raise self._start_error() from None

    async def supervise(self) -> None:
        """Start a new driver whenever none answers: ours has died, or the replica that started it has ended."""
        while True:
            await asyncio.sleep(_CHECK_EVERY)
            if not await self._answers():
                log.event("driver.away", address=self.address)
                await self.ensure_running()

    async def close(self) -> None:
        """End the driver if this replica started it."""
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
        if self._log_copier is not None:
            await self._log_copier
        log.event("driver.ended", pid=self._process.pid)

    async def _answers(self) -> bool:
        try:
            await holdfast.reconciler.AsyncProcessDriver(self.address, timeout=5.0).list()
        except holdfast.DriverError:
            return False
        return True

    async def _start(self) -> None:
        """Start a driver. It refuses when another one has locked the folder a moment before."""
        command = [
            sys.executable, "-c", _CHILD, str(os.getpid()), str(self._open_files), "driver", "--folder",
            str(self.folder), "--json",
        ]  # fmt: skip
        self._process = process = await asyncio.create_subprocess_exec(
            *command, *self._options, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True,
            env={name: value for name, value in os.environ.items() if name not in _SECRETS},
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        self._log_copier = asyncio.create_task(self._copy_log(process.stderr))
        if await process.stdout.readline():
            log.event("driver.started", pid=process.pid, address=self.address)
        else:
            code = await process.wait()
            await self._log_copier
            log.event("driver.refused", WARNING, code=code, folder=str(self.folder))
            if code == _USAGE_ERROR:
                raise self._start_error()
            await asyncio.sleep(_RETRY_AFTER)

    def _start_error(self) -> holdfast.DriverError:
        return holdfast.DriverError(f"no driver could be started on {self.folder}: {self._last_output}")

    async def _copy_log(self, stderr: asyncio.StreamReader) -> None:
        """Log each line of the driver as ``driver.said``; the members of a JSON line become fields."""
        while line := await stderr.readline():
            try:
                fields = {name: value for name, value in json.loads(line).items() if name != "at"}
            except (ValueError, AttributeError):
                self._last_output = re.sub("^(holdfast|Error): ", "", line.decode(errors="replace").strip())
                fields = {"message": self._last_output}
            log.event("driver.said", fields=fields)
