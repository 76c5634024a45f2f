"""What a driver and a replica need as daemons: to be told to end, and to know whether others can reach them."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
from collections.abc import Callable, Iterable

ECHO = 0.2
"""Seconds in which the same signal is heard once: timeout(1) and others send theirs to the process and to its group."""


def told_to_end(numbers: Iterable[signal.Signals], first: Callable[[], None] | None = None) -> asyncio.Event:
    """Set by any of ``numbers``, for the running loop; ``first`` is called then. Told twice, the process ends at once,
    with 1."""
    told, loop = asyncio.Event(), asyncio.get_running_loop()
    heard = (0, 0.0)

    def end(number: int) -> None:
        nonlocal heard
        if not told.is_set():
            heard = (number, loop.time())
            if first is not None:
                first()
            told.set()
        elif number != heard[0] or loop.time() - heard[1] > ECHO:
            os._exit(1)

    for number in numbers:
        loop.add_signal_handler(number, end, number)
    return told


def is_loopback(host: str) -> bool:
    """Whether whoever listens there is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
