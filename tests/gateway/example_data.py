"""Fills a database with something for every panel of the page: healthy, partly failed, or with hostile names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import holdfast
from tests.children import PATIENCE, eventually

HOSTILE = "<img src=x onerror=alert(1)>\"'&{{7*7}}"
"""As a name: an element, both quotes, an entity, a template."""


class Refusing:
    """A sink that refuses every event."""

    def publish(self, events: Any) -> None:
        raise ValueError(f"refused {HOSTILE}")


@contextmanager
def filled_database(url: str, *, mark: str = "") -> Iterator[holdfast.Client]:
    """Leases, a leader, a lock with a waiter, slots, operations of every status, a review, a relay with a parked event,
    sandboxes, agents and sessions. ``mark`` is in every name and text."""
    with holdfast.Client(url) as client, holdfast.Client(url) as other, ExitStack() as stack:
        for name in ("nightly-import", "invoices", "search-index"):
            stack.enter_context(client.lease(f"{name}{mark}", holder=f"worker-{len(name)}{mark}"))
        _leader(client, stack, mark)
        _locks(client, other, url, stack, mark)
        pool = client.slots("default", 8)
        for number in (1, 2, 3):
            stack.callback(pool.claim(owner=f"session-{number}{mark}").release)
        _operations(client, mark)
        _records(client, mark)
        yield client


def _leader(client: holdfast.Client, stack: ExitStack, mark: str) -> None:
    leading, over = threading.Event(), threading.Event()

    def work(term: Any) -> None:
        leading.set()
        over.wait()

    elector = client.elector("gateway:leader", holder=f"replica-a{mark}")
    thread = threading.Thread(target=elector.run, args=(work,))
    thread.start()
    stack.callback(thread.join)
    stack.callback(over.set)
    stack.callback(elector.stop)
    assert leading.wait(PATIENCE)


def _locks(client: holdfast.Client, other: holdfast.Client, url: str, stack: ExitStack, mark: str) -> None:
    stack.enter_context(client.lock(("agent", 9)))
    grant = client.lock(f"report{mark}").acquire()
    waiter = threading.Thread(target=lambda: other.lock(f"report{mark}", timeout=600).acquire().release())
    waiter.start()
    stack.callback(waiter.join)
    stack.callback(grant.release)
    with holdfast.Client(url) as onlooker:  # the holder itself knows the name at once
        eventually(lambda: _seen(onlooker, f"report{mark}") == [False, True], "one holds it and one waits, by its name")


def _seen(client: holdfast.Client, name: str) -> list[bool]:
    """Whether each session holds the lock; its name is stored a moment after it was acquired."""
    return sorted(each.granted for each in client.locks.list() if each.name == name)


def _operations(client: holdfast.Client, mark: str) -> None:
    client.operation(f"load parcels{mark}").run(lambda: 7)
    client.operation(f"load rivers{mark}").run(lambda: 8)
    for _ in range(3):
        try:
            client.operation(f"publish tiles{mark}", retry=holdfast.Retry(attempts=2)).run(_fail)
        except (RuntimeError, holdfast.OperationFailed):
            continue
    client.operations.register("unpublish", rollback=_die)
    with suppress(KeyboardInterrupt):
        client.operation(f"publish map{mark}", rollback="unpublish").run(_die)
    with suppress(holdfast.SinkDown):
        client.relay(f"catalogue{mark}", Refusing(), tries=1).step()


def _die() -> None:
    raise KeyboardInterrupt


def _fail() -> None:
    raise RuntimeError(f"the bucket is read-only {HOSTILE}")


def _records(client: holdfast.Client, mark: str) -> None:
    create = holdfast.MustCreate()
    for number, phase in enumerate(("Ready", "Ready", "Provisioning", "Error")):
        told = f"exited with 1{mark}" if phase == "Error" else ""
        ready = {"type": "Ready", "status": phase == "Ready", "reason": "", "message": told}
        status = {"phase": phase, "conditions": [ready]}
        payload = {"spec": {"command": ["sleep", mark]}, "status": status, "token": "tell-nobody"}
        client.objects.put_if("@sandbox", f"sb-{number}", payload, create, name=f"web-{number}{mark}")
    for number, state in enumerate(("idle", "working", f"odd{mark}")):
        payload = {"state": state, "tool": f"Bash{mark}", "token": "tell-nobody"}
        client.objects.put_if("@agent", f"agent-{number}", payload, create, name=f"agent-{number}{mark}")
    for number in (1, 2, 3):
        payload = {"state": "ACTIVE", "pool": "default", "slot": number, "token": "tell-nobody"}
        client.objects.put_if("@session", f"session-{number}", payload, create)
