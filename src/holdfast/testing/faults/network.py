"""Faults of the network between clients and a server."""

from collections.abc import Callable
from functools import partial

from holdfast.testing.faults.fault import Fault
from holdfast.testing.proxy import Proxy


def network(proxy: Proxy, *, delay: float = 0.2) -> list[Fault]:
    """Every fault of the proxy."""
    begins: dict[str, Callable[[], None]] = {
        "cut": proxy.cut,
        "stall": proxy.stall,
        "stall_to_server": partial(proxy.stall, "to_server"),
        "stall_to_client": partial(proxy.stall, "to_client"),
        "drop_to_server": partial(proxy.drop, "to_server"),
        "drop_to_client": partial(proxy.drop, "to_client"),
        "half_open": proxy.half_open,
        "delay": partial(proxy.delay, delay),
        "reset": proxy.reset,
    }
    return [Fault(kind, proxy, begin, proxy.heal) for kind, begin in begins.items()]
