"""A replica among peers that say nothing, and a leader whose event loop is blocked."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

import holdfast
from holdfast.gateway.connections import BACKLOG
from tests.children import PATIENCE, eventually
from tests.conftest import fresh
from tests.gateway.replicas import Replica, fleet

SILENT = 2000
FEW = """
import resource
from holdfast.gateway import connections
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
connections.MAX_CONNECTIONS, connections.HEAD_WITHIN = 1200, 4.0
"""
BLOCK = """
import threading
import holdfast
elector = holdfast.AsyncClient.elector
def impatient(client, name, **terms):
    return elector(client, name, **{**terms, "ttl": 3.0, "renew_every": 0.5, "retry_every": 0.2})
holdfast.AsyncClient.elector = impatient
@feature.router.post("/block")
async def block() -> None:
    threading.Event().wait()
"""


@pytest.fixture
def _many_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < SILENT + 500:
        pytest.skip(f"needs {SILENT + 500} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (SILENT + 500, hard))


@pytest.mark.usefixtures("_many_files")
def test_an_operator_is_answered_among_2000_silent_connections(tmp_path: Path) -> None:
    with Replica(f"sqlite:///{tmp_path / 'app.db'}", tmp_path, feature=FEW) as replica, ExitStack() as stack:
        place = (urlsplit(replica.address).hostname, urlsplit(replica.address).port)
        files = Path(f"/proc/{replica.process.pid}/fd")
        watching = stack.enter_context(replica.http.stream("GET", "/events"))
        events = watching.iter_lines()
        assert next(events)
        before = len([*files.iterdir()])
        for number in range(SILENT):
            peer = stack.enter_context(socket.create_connection(place, timeout=PATIENCE))
            if number % 2:
                with suppress(OSError):  # it was closed already
                    peer.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        assert len([*files.iterdir()]) < before + 620 + BACKLOG, "the oldest are closed before their time is over"
        eventually(lambda: len([*files.iterdir()]) < before + 620, "600 of one address are left")
        with httpx.Client(base_url=replica.address, timeout=PATIENCE) as operator:
            made = operator.post("/sandboxes", json={"id": "nap", "argv": ["sh", "-c", "ulimit -n; sleep 1000"]})
            assert made.status_code == 201
            eventually(lambda: operator.get("/sandboxes/nap/log").text == "1024\n", "a sandbox has the limit of before")
        eventually(lambda: len([*files.iterdir()]) < before + 20, "each is closed, and none of them was")
        with holdfast.Client(replica.url) as client, client.lease("made since", ttl=600):
            assert any("made since" in line for line in events), "who is being answered is not closed"


def test_supervisors_connect_among_handshakes_without_a_token(tmp_path: Path) -> None:
    program = {
        "argv": ["sh", "-c", "echo $HOLDFAST_SUPERVISOR_TOKEN; exec sleep 1000"],
        "supervised": True,
        "grace": 0.1,
    }
    with Replica(f"sqlite:///{tmp_path / 'app.db'}", tmp_path, "--writes", "20") as replica:
        url, tokens = replica.address.replace("http", "ws", 1), {}
        for id in ("a", "b"):
            assert replica.http.post("/sandboxes", json={"id": id, **program}).status_code == 201
            eventually(lambda id=id: replica.http.get(f"/sandboxes/{id}/log").text, "its token is there")  # type: ignore[misc]
            tokens[id] = replica.http.get(f"/sandboxes/{id}/log").text.strip()

        def handshake(token: str | None) -> ClientConnection:
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            return connect(f"{url}/sandboxes/a/supervisor", additional_headers=headers, open_timeout=PATIENCE)

        for token in (None, "wrong", tokens["b"]) * 40:
            with pytest.raises(InvalidStatus):
                handshake(token)
        with handshake(tokens["a"]):
            assert replica.http.get("/sandboxes/a/supervisor").status_code == 200
        with ExitStack() as stack, suppress(InvalidStatus):  # with its own token, far more often than it needs to
            for _ in range(1000):
                stack.enter_context(handshake(tokens["a"]))
            pytest.fail("none was refused")


def test_a_leader_whose_event_loop_is_blocked_for_good_is_succeeded(tmp_path: Path) -> None:
    with fleet(fresh(), tmp_path, count=2, feature=BLOCK) as replicas, holdfast.Client(replicas[0].url) as client:

        def leader() -> Replica | None:
            lease = client.leases.get("gateway:reconciler")
            holder = "" if lease is None else lease.holder
            return next((each for each in replicas if holder.startswith(f"{each.name}:")), None)

        eventually(lambda: leader() is not None, "one of them leads")
        first = leader()
        assert first is not None
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{first.address}/block", timeout=httpx.Timeout(PATIENCE, read=1.0))
        eventually(lambda: leader() not in (first, None), "the other one leads")
        first.process.kill()
