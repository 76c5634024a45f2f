"""Clients that ask for much and read nothing."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from tests.children import PATIENCE, eventually
from tests.gateway.replicas import Replica

READERS, SANDBOXES = 40, 60
SOON = """
from holdfast.gateway import connections
connections.STALL_WITHIN = 1.0
"""
"""Seconds until a client that reads nothing is cut off."""
LATE = SOON.replace("1.0", "3600.0")


def fill(replica: Replica) -> None:
    """With sandboxes that have ended, of 390 kB each."""
    for number in range(SANDBOXES):
        body = {"id": f"big-{number:02}", "argv": ["true"], "metadata": {"text": "x" * 390_000}}
        assert replica.http.post("/sandboxes", json=body).status_code == 201


def most_resident(replica: Replica) -> int:
    """The most memory that it has had, in kB."""
    status = Path(f"/proc/{replica.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def answers(replica: Replica) -> int:
    return len([each for each in replica.events("request") if (each["method"], each["path"]) == ("GET", "/sandboxes")])


def stall(stack: ExitStack, replica: Replica, path: str) -> socket.socket:
    """A client that asks, and reads nothing."""
    url = urlsplit(replica.address)
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(PATIENCE)
    client.connect((url.hostname, url.port))
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return client


def test_40_readers_that_read_nothing_cost_half_of_the_memory_at_most(tmp_path: Path) -> None:
    with Replica(f"sqlite:///{tmp_path / 'app.db'}", tmp_path, feature=LATE) as replica, ExitStack() as stack:
        fill(replica)
        listed, after = [], ""
        while after is not None:
            page = replica.http.get("/sandboxes", params={"limit": 1000, "after": after}).json()
            assert 1 <= len(page["items"]) <= 2, "a page ends by its bytes"
            listed += [each["id"] for each in page["items"]]
            after = page["next"]
        assert listed == [f"big-{number:02}" for number in range(SANDBOXES)]
        before, already = most_resident(replica), answers(replica)  # one client has read all of it
        for _ in range(READERS):
            stall(stack, replica, "/sandboxes?limit=1000")
        eventually(lambda: answers(replica) == already + READERS, "each is answered")
        assert replica.http.get("/api/leases").status_code == 200, "an operator meanwhile"
        assert most_resident(replica) < 1.5 * before, "kB"


def test_a_client_that_reads_nothing_is_cut_off(tmp_path: Path) -> None:
    with Replica(f"sqlite:///{tmp_path / 'app.db'}", tmp_path, feature=SOON) as replica, ExitStack() as stack:
        body = {"id": "big", "argv": ["true"], "metadata": {"text": "x" * 390_000}}
        assert replica.http.post("/sandboxes", json=body).status_code == 201
        files = Path(f"/proc/{replica.process.pid}/fd")
        before = len([*files.iterdir()])
        for _ in range(3):
            stall(stack, replica, "/sandboxes?limit=1000")
        eventually(lambda: answers(replica) == 3, "each is answered")
        eventually(lambda: len([*files.iterdir()]) <= before, "they are cut off")
        assert replica.http.get("/sandboxes/big").status_code == 200
