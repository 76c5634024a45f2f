"""What PostgreSQL servers and poolers share: a reserved port, a child process that cannot outlive us, waiting."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.testing import child_watchdog
from holdfast.testing.server_user import server_user

HOST = "127.0.0.1"
LIMIT = 60.0
"""Seconds after which an event that has not happened is taken as never to happen."""


def until(condition: Callable[[], bool], *, what: str, timeout: float = LIMIT) -> None:
    """Wait until `condition()` is true. Raises TimeoutError that names `what`."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:g} s")
        time.sleep(0.005)


def reserve_port() -> socket.socket:
    """A bound socket. While it is open no other process gets its port, but a server may still listen on it."""
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((HOST, 0))
    return reservation


def launch(command: list[str], port: socket.socket, *, log: Path, folder: Path | None) -> subprocess.Popen[bytes]:
    """Start `command` as the server user below a watchdog, and return the watchdog's process.

    When this process ends, in whatever way, the watchdog ends the server and removes `folder`.
    """
    user = server_user()
    watchdog = [sys.executable, "-I", "-S", child_watchdog.__file__, str(os.getpid()), str(folder or "")]
    if sys.platform != "linux":  # elsewhere a second process cannot listen on a port that is bound
        port.close()
    with log.open("ab") as output:
        return subprocess.Popen(
            [*watchdog, *user.prefix, *command],
            cwd="/",
            env=user.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
