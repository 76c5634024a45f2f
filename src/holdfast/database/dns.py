"""Host names are resolved within a time limit: libpq would wait for the resolver without one."""

from __future__ import annotations

import socket
import threading

from holdfast.runtime.clock import now


def addresses(host: str, port: str, deadline: float) -> list[str]:
    """Every address of ``host``, in the resolver's order. OSError when it has none, or none in time.

    The resolver runs in a thread, which cannot be stopped: it is left behind when it is late.
    """
    answer: list[list[str] | OSError] = []

    def resolve() -> None:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answer.append(list(dict.fromkeys(str(address[0]) for *_, address in entries)))
        except OSError as error:
            answer.append(error)

    thread = threading.Thread(target=resolve, name="holdfast-resolver", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - now()))
    if not answer:
        raise TimeoutError(f"the name {host!r} could not be resolved in time")
    if isinstance(answer[0], OSError):
        raise OSError(f"the name {host!r} could not be resolved: {answer[0].strerror or answer[0]}")
    return answer[0]


def is_name(host: str) -> bool:
    """Whether it needs a resolver: the folder of a socket and an address do not."""
    if not host or host[0] in "/@":
        return False
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
            return False
        except OSError:
            continue
    return True
