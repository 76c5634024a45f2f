"""Requests that one replica sends to another: messages and streams of supervisors, between real processes."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import holdfast
from holdfast.gateway import peers
from holdfast.gateway.health import PRESENCE
from holdfast.gateway.peers import Peer, Peers
from holdfast.problem_json import Problem
from tests.children import PATIENCE, eventually
from tests.gateway.replicas import Replica

SUPERVISOR = """
import json, os, threading
from websockets.sync.client import connect
address = os.environ["HOLDFAST_GATEWAY"].replace("http", "ws", 1)
path = f"{address}/sandboxes/{os.environ['HOLDFAST_SANDBOX']}/supervisor"
token = {"Authorization": "Bearer " + os.environ["HOLDFAST_SUPERVISOR_TOKEN"]}
cancelled = []
with connect(path, additional_headers=token) as socket:
    def send(id, **answer):
        socket.send(json.dumps({"id": id, **answer}))
    for text in socket:
        request = json.loads(text)
        id, message = request["id"], request.get("message")
        if "cancel" in request:
            cancelled.append(id)
        elif message == "cancelled?":
            send(id, reply=len(cancelled))
        elif message == "silence":
            pass
        elif message == "begin":
            send(id, part="begun")
        elif message == "output":
            for number in range(100):
                send(id, part="ü" * 10_000 + str(number))
            send(id, reply={"exit_code": 0})
        else:
            send(id, reply={"heard": message})
"""


def supervised(here: Replica, id: str) -> None:
    """A sandbox whose supervisor is connected to this replica."""
    body = {"id": id, "argv": [sys.executable, "-c", SUPERVISOR], "supervised": True, "grace": 0.1}
    assert here.http.post("/sandboxes", json=body).status_code == 201
    eventually(lambda: here.http.get(f"/sandboxes/{id}").json()["phase"] == "Ready", "its supervisor is connected")


def lines_of(answer: httpx.Response) -> list[Any]:
    return [json.loads(line) for line in answer.iter_lines()]


def test_a_stream_is_sent_on_and_ends_in_an_error_when_its_replica_dies(replicas: list[Replica]) -> None:
    here, there = replicas[0], replicas[1]
    supervised(here, "streams")
    for each in (here, there):
        with each.http.stream("POST", "/sandboxes/streams/streams", json={"message": "output"}) as answer:
            assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
            *parts, last = lines_of(answer)
        assert [part["part"].lstrip("ü") for part in parts] == [str(number) for number in range(100)]
        assert last == {"reply": {"exit_code": 0}}
    late = there.http.post("/sandboxes/streams/streams", json={"message": "silence", "timeout": 0.2})
    assert late.status_code == 504, "the problem is that of the replica with the connection"
    assert "may have received" in late.json()["detail"]
    heard = there.http.post("/sandboxes/streams/messages", json={"message": "cancelled?"}).json()["reply"]
    with there.http.stream("POST", "/sandboxes/streams/streams", json={"message": "begin"}) as answer:
        assert next(answer.iter_lines()) == '{"part": "begun"}'

    def cancelled() -> bool:
        reply = there.http.post("/sandboxes/streams/messages", json={"message": "cancelled?"}).json()["reply"]
        return bool(reply > heard)

    eventually(cancelled, "its supervisor learns that the client has gone")
    with there.http.stream("POST", "/sandboxes/streams/streams", json={"message": "begin"}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == '{"part": "begun"}'
        here.end(signal.SIGKILL)
        [last] = [json.loads(line) for line in lines]
    assert f"replica '{here.told['replica']}', which has the connection, has gone" in last["error"]
    refused = there.http.post("/sandboxes/streams/messages", json={"message": "?"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1"), refused.text
    assert "cannot be reached" in refused.json()["detail"]
    here.restart()


def test_a_replica_redirects_instead_when_it_is_set_up_so(replicas: list[Replica]) -> None:
    here = replicas[0]
    supervised(here, "redirected")
    driver = here.told["driver"]
    with Replica(here.url, here.folder, "--redirect", name="redirects", driver=driver) as there:
        for kind in ("messages", "streams"):
            path = f"/sandboxes/redirected/{kind}"
            answer = there.http.post(path, json={"message": "?"})
            assert (answer.status_code, answer.headers["location"]) == (307, f"{here.address}{path}")
            answer = there.http.post(path, json={"message": "?"}, follow_redirects=True)
            assert answer.json() == {"reply": {"heard": "?"}}


def worker_url(url: str) -> str:
    """The database as a role that may execute every function of ours, and is not that of the replicas."""
    name = f"worker_{uuid4().hex[:12]}"
    with psycopg.connect(url, autocommit=True) as database:
        for statement in (
            "create role {} login", "grant usage on schema holdfast to {}",
            "grant execute on all functions in schema holdfast to {}",
        ):  # fmt: skip
            database.execute(statement.format(name).encode())
    return make_conninfo(url, user=name)


@pytest.mark.parametrize("is_announced", [False, True])
def test_no_request_goes_to_the_address_that_a_worker_wrote(replicas: list[Replica], is_announced: bool) -> None:
    """As the holder of the lease on a connection, with and without the presence of a replica of that name. Neither sent
    on nor redirected: with the redirect the page would give away the token of its client."""
    here, id = replicas[0], f"lured-{is_announced}"
    program = {"id": id, "argv": ["sleep", "1000"], "supervised": True, "grace": 0.1}
    assert here.http.post("/sandboxes", json=program).status_code == 201
    with (
        socket.create_server(("127.0.0.1", 0)) as attacker,
        psycopg.connect(worker_url(here.url), autocommit=True) as worker,
        Replica(here.url, here.folder, "--redirect", name="redirects", driver=here.told["driver"]) as redirects,
    ):
        address = f"http://127.0.0.1:{attacker.getsockname()[1]}"
        holder = f"{address}/attacker{id}#x"
        acquire = "select token from holdfast.lease_acquire(%s, %s, 600)"
        worker.execute(acquire, [f"gateway:supervisor:{id}", holder])
        if is_announced:
            [token] = worker.execute(acquire, [PRESENCE + holder, holder]).fetchone() or []
            announce = "select holdfast.peer_announce(%s, %s, %s, %s)"
            assert worker.execute(announce, [PRESENCE + holder, token, address, "0" * 64]).fetchone() == (True,)
        for replica in (here, redirects):
            for method, path in (("POST", "messages"), ("POST", "streams"), ("GET", "supervisor")):
                body = {"message": "secret"} if method == "POST" else None
                answer = replica.http.request(method, f"/sandboxes/{id}/{path}", json=body)
                assert answer.status_code == 503, answer.text
                assert "location" not in answer.headers
        attacker.settimeout(0)
        with pytest.raises(BlockingIOError):
            attacker.accept()


def test_a_forged_replica_gets_nothing_and_a_forged_request_is_refused(replicas: list[Replica]) -> None:
    here, there = replicas[0], replicas[1]
    program = {"argv": ["sleep", "1000"], "supervised": True, "grace": 0.1}
    for id in ("forged", "stray"):
        assert here.http.post("/sandboxes", json={"id": id, **program}).status_code == 201
    key = "0" * 64
    with (
        socket.create_server(("127.0.0.1", 0)) as attacker,
        holdfast.Client(here.url) as client,
        psycopg.connect(worker_url(here.url), autocommit=True) as worker,
    ):
        address = f"http://127.0.0.1:{attacker.getsockname()[1]}"
        acquire = "select token from holdfast.lease_acquire(%s, %s, 600)"
        [token] = worker.execute(acquire, [f"{PRESENCE}evil", "evil"]).fetchone() or []
        announce = "select holdfast.peer_announce(%s, %s, %s, %s)"
        assert worker.execute(announce, [f"{PRESENCE}evil", token, address, key]).fetchone() == (True,)
        real = PRESENCE + there.told["replica"]
        assert worker.execute(announce, [real, token, address, key]).fetchone() == (False,), "not with another's token"
        find = "select address, key from holdfast.peer_find(%s)"
        assert worker.execute(find, [real]).fetchall() == [], "no key is read by another role"
        worker.execute(acquire, ["gateway:supervisor:forged", "evil"])
        for kind in ("messages", "streams"):
            refused = here.http.post(f"/sandboxes/forged/{kind}", json={"message": "secret"})
            assert (refused.status_code, "not present" in refused.json()["detail"]) == (503, True), refused.text
        assert here.http.get("/sandboxes/forged/supervisor").status_code == 503
        attacker.settimeout(0)
        with pytest.raises(BlockingIOError):
            attacker.accept()

        # A lease that names the wrong replica: each sends the request on to the other, which must not send it back.
        lease = client.lease("gateway:supervisor:stray", holder=there.told["replica"], ttl=600).acquire()
        stray = here.http.post("/sandboxes/stray/messages", json={"message": "?"}, headers={"X-Request-Id": "stray"})
        assert (stray.status_code, stray.headers["retry-after"]) == (409, "1")

        def logged() -> list[dict[str, Any]]:
            return [each for each in there.events("request") if each["requestId"] == "stray"]

        eventually(logged, "the request is in the log, which is written after the answer")
        [request] = logged()
        assert (request["status"], request["principal"]) == (409, "local"), "the principal goes with it"
        lease.release()
        client.lease("gateway:supervisor:stray", holder=here.told["replica"], ttl=600).acquire()
        with psycopg.connect(here.url, autocommit=True) as gateway:
            [stored, key] = gateway.execute(find, [real]).fetchone() or []
            [_, others] = gateway.execute(find, [PRESENCE + here.told["replica"]]).fetchone() or []
        assert stored == there.address
        ours = {"Authorization": f"Peer {key}", "X-Request-Id": "loop"}
        assert there.http.post("/sandboxes/stray/messages", json={"message": "?"}, headers=ours).status_code == 409
        assert not [each for each in here.events("request") if each["requestId"] == "loop"], "it is not sent on"
        for forged in ("guess", others):
            headers = {"Authorization": f"Peer {forged}"}
            answer = there.http.post("/sandboxes/stray/messages", json={"message": "?"}, headers=headers)
            assert answer.status_code == 401, "also on a replica that needs no token"
        for method, path in (("GET", "/sandboxes"), ("POST", "/sandboxes"), ("DELETE", "/sandboxes/stray")):
            assert there.http.request(method, path, headers=ours).status_code == 401, "it is good for nothing else"


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[Peer]:
    """A replica that answers each request with these bytes and then nothing more, or, without any, not at all."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        for piece in pieces:
            writer.write(piece)
        if pieces:
            writer.close()
        else:
            await over.wait()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Peer("other", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "key")
    finally:
        over.set()
        server.close()
        await server.wait_closed()


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def test_what_another_replica_may_send_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = None  # nothing here asks the database
    ours = Peers(client, "http://127.0.0.1:1", PRESENCE, single=False)

    async def ask(peer: Peer, within: float = PATIENCE) -> list[bytes]:
        async with ours.send(peer, "/sandboxes/a/streams", b"{}", {}, within) as answer:
            return [line async for line in answer.lines()]

    async with answering(HEAD, chunk(b"one\nt"), chunk(b"wo\n"), chunk(b"")) as peer:
        assert b"".join(await ask(peer)) == b"one\ntwo\n"
        monkeypatch.setattr(peers, "MAX_REQUESTS", 1)
        async with ours.send(peer, "/sandboxes/a/streams", b"{}", {}, PATIENCE):
            with pytest.raises(Problem, match="are being sent") as problem:
                await ask(peer)
        assert problem.value.status == 503
        assert await ask(peer), "the place is free again"
    async with answering(HEAD, chunk(b"whole\npart")) as peer:
        [whole, last] = await ask(peer)
        assert (whole, "has gone" in json.loads(last)["error"]) == (b"whole\n", True), "an unfinished line is dropped"
    monkeypatch.setattr(peers, "LINE_BYTES", 1000)
    async with answering(HEAD, chunk(b"x" * 1001), chunk(b"")) as peer:
        [last] = await ask(peer)
        assert "more than 1000 bytes" in json.loads(last)["error"]
        async with ours.send(peer, "/sandboxes/a/messages", b"{}", {}, PATIENCE) as answer:
            with pytest.raises(Problem, match="more than 1000 bytes"):
                await answer.read()
    for head, status in ((b"HTTP/1.1 200 OK\r\nX: " + b"x" * 40_000, 502), (b"not HTTP\r\n\r\n", 502), (b"", 502)):
        async with answering(head) as peer:
            with pytest.raises(Problem) as problem:
                await ask(peer)
            assert problem.value.status == status
    async with answering() as peer:
        with pytest.raises(Problem, match="not answered in time") as problem:
            await ask(peer, within=0.05)
        assert problem.value.status == 504
    with pytest.raises(Problem, match="nothing was sent") as problem:
        await ask(peer)
    assert problem.value.status == 503
