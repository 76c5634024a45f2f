"""The processes of one PostgreSQL server: start, stop, crash, freeze.

A server is started directly, not by pg_ctl, which looks only every 100 ms whether it is ready. Between the server and
this process stands `watcher.py`, which takes the server down when this process dies in whatever way.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from holdfast.testing import watcher
from holdfast.testing.account import account
from holdfast.testing.binaries import Binaries

HOST = "127.0.0.1"
_PATIENCE = 60.0
_PORT_TAKEN = "could not create any TCP/IP sockets"
_SHUTDOWN = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}


def until(condition: Callable[[], bool], *, what: str, timeout: float = _PATIENCE) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:g} s")
        time.sleep(0.005)


def launch(command: list[str], port: socket.socket, *, log: Path, removed: Path | None) -> subprocess.Popen[bytes]:
    """Start it behind the watcher: it is gone when this process is, however that ends, and `removed` with it."""
    watching = [sys.executable, "-I", "-S", watcher.__file__, str(os.getpid()), str(removed or "")]
    if sys.platform != "linux":  # elsewhere a port that is bound cannot be listened on by somebody else
        port.close()
    with log.open("ab") as written:
        return subprocess.Popen(
            [*watching, *account().prefix, *command],
            cwd="/",
            env=account().environment(),
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            start_new_session=True,
        )


class Server:
    """A data folder below `folder`, and the server that runs on it or does not."""

    def __init__(self, binaries: Binaries, folder: Path, *, temporary: bool) -> None:
        self.binaries = binaries
        self.folder = folder
        self.data = folder / "data"
        self.environment: dict[str, str] = {}
        """What the server finds in its environment besides ours, from its next start on."""
        self._temporary = temporary
        self._watcher: subprocess.Popen[bytes] | None = None
        self._started_before = False
        self._reservation = reserve_port()
        self.port: int = self._reservation.getsockname()[1]
        """The TCP port on 127.0.0.1, the same for the whole life of the server: it is kept while the server is down."""

    @property
    def running(self) -> bool:
        """Whether any process of the server lives; a paused one counts."""
        return self._watcher is not None and self._watcher.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the postmaster."""
        lines = self._lock_file()
        if not self.running or not lines:
            raise RuntimeError(f"{self} is not running")
        return int(lines[0])

    def log(self, lines: int = 50) -> str:
        """The end of what the server wrote."""
        try:
            return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def start(self) -> None:
        """Start the server and wait until it takes connections. Harmless when it runs."""
        while not self.running:
            self.forget_crash()
            self._launch()
            until(lambda: self._ready() or not self.running, what=f"{self} is ready")
            if self.running:
                self._started_before = True
            elif _PORT_TAKEN in self.log(5) and not self._started_before:
                self._reservation.close()
                self._reservation = reserve_port()
                self.port = self._reservation.getsockname()[1]
            else:
                raise RuntimeError(f"{self} did not start. It said:\n{self.log()}")

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Shut the server down and wait until its last process is gone. Harmless when it is down."""
        if mode not in _SHUTDOWN:
            raise ValueError(f"mode={mode!r}: must be one of {', '.join(_SHUTDOWN)}")
        if self.running:
            self.resume()
            watcher.tell([self.pid], _SHUTDOWN[mode])
            self._wait_for_end()

    def restart(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop and start, on the same port."""
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """Crash: SIGKILL to every process of the server at once."""
        if self._watcher is not None and self.running:
            until(self._killed, what=f"{self} is killed")
            self.forget_crash()

    def pause(self) -> None:
        """Freeze every process of the server. Connections stay open and new ones are taken, but nobody answers."""
        until(self._frozen, what=f"{self} is frozen")

    def resume(self) -> None:
        """Let a paused server go on. Harmless when it is not paused."""
        if self._watcher is not None and self.running:
            watcher.tell(list(watcher.family(self._watcher.pid)), signal.SIGCONT)

    def forget_crash(self) -> None:
        """Remove what a killed server left: its lock file, and the piece of shared memory that the kernel keeps."""
        if not self.running and len(leftover := self._lock_file()) > 6:
            ctypes.CDLL(None).shmctl(int(leftover[6].split()[1]), 0, None)
        if not self.running:
            (self.data / "postmaster.pid").unlink(missing_ok=True)

    def _launch(self) -> None:
        surroundings = ["env", *(f"{name}={value}" for name, value in self.environment.items())]
        server = [*surroundings, str(self.binaries.folder / "postgres"), "-D", str(self.data)]
        network = ["-c", f"listen_addresses={HOST}", "-c", f"port={self.port}"]
        removed = self.folder if self._temporary else None
        self._watcher = launch([*server, *network], self._reservation, log=self.folder / "log", removed=removed)

    def _ready(self) -> bool:
        lines = self._lock_file()
        return len(lines) > 7 and lines[7].strip() == "ready"

    def _lock_file(self) -> list[str]:
        try:
            return (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return []

    def _frozen(self) -> bool:
        """Freeze what is not frozen yet; the postmaster first, so that nothing new appears behind our back."""
        if self._watcher is None or not self.running:
            raise RuntimeError(f"{self} is not running")
        states = watcher.family(self._watcher.pid)
        watcher.tell([pid for pid, state in states.items() if state not in "Tt"], signal.SIGSTOP)
        return all(state in "Tt" for state in states.values())

    def _killed(self) -> bool:
        """Kill what there is; a server just being started may appear only after the first look."""
        assert self._watcher is not None
        watcher.tell(list(watcher.family(self._watcher.pid)), signal.SIGKILL)
        return not self.running

    def _wait_for_end(self) -> None:
        assert self._watcher is not None
        try:
            self._watcher.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self} did not end within {_PATIENCE:g} s. It said:\n{self.log()}") from None

    def _end(self) -> None:
        """Be down in whatever way is fastest, and let go of the port."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self.stop("immediate" if self._temporary else "fast")
        self.kill()
        self.forget_crash()
        self._reservation.close()


def reserve_port() -> socket.socket:
    """A port nobody else is given as long as the socket is open, bound so that PostgreSQL may still listen on it."""
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((HOST, 0))
    return reservation
