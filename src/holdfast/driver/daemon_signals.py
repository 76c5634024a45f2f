"""For daemons, the driver and the gateway: stop on signals, and recognise loopback addresses."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
from collections.abc import Callable, Iterable

ECHO = 0.2
"""Seconds in which a repeated signal is ignored: timeout(1) signals the process and then its group."""


def stop_on_signals(numbers: Iterable[signal.Signals], on_first: Callable[[], None] | None = None) -> asyncio.Event:
    """An event that the first of ``numbers`` sets, after ``on_first`` was called. A second signal ends the process at
    once, with exit code 1."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    received = (0, 0.0)

    def handle(number: int) -> None:
        nonlocal received
        if not stop.is_set():
            received = (number, loop.time())
            if on_first is not None:
                on_first()
            stop.set()
        elif number != received[0] or loop.time() - received[1] > ECHO:
            os._exit(1)

    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    return stop


def is_loopback(host: str) -> bool:
    """Whether a server on this host is reachable from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
