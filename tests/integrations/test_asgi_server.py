"""Under a real server, with real connections: kill -9, SIGTERM, and clients that hang up."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import holdfast
from tests.children import PATIENCE, Child, eventually, query

PROGRAM = "import runpy; runpy.run_module('tests.integrations.asgi_shop', run_name='__main__', alter_sys=True)"


class Shop:
    def __init__(self, child: Child, effects: Path) -> None:
        self.child, self._effects = child, effects
        self.port = int(child.line())

    def effects(self) -> list[str]:
        return self._effects.read_text().split()

    def post(self, path: str, body: str, key: str) -> httpx.Response:
        return httpx.post(f"http://127.0.0.1:{self.port}{path}", content=body, headers=headers(key), timeout=PATIENCE)

    def hang_on(self, path: str, body: str, key: str) -> socket.socket:
        """A request whose answer nobody has read yet."""
        line = socket.create_connection(("127.0.0.1", self.port))
        told = "".join(f"{name}: {value}\r\n" for name, value in headers(key).items())
        line.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\n{told}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        return line

    def when_over(self, path: str, body: str, key: str) -> httpx.Response:
        """A retry, sent again for as long as the first is under way."""
        until = time.monotonic() + PATIENCE
        while (reply := self.post(path, body, key)).status_code == 409 and "running" in reply.json()["type"]:
            assert time.monotonic() < until
            time.sleep(0.05)
        return reply


def headers(key: str) -> dict[str, str]:
    return {"Idempotency-Key": f'"{key}"', "Authorization": "ann", "Content-Type": "text/plain"}


@contextmanager
def opened(url: str, effects: Path) -> Iterator[Shop]:
    effects.touch()
    with Child(PROGRAM, url, effects, 600.0) as child:
        yield Shop(child, effects)


def test_after_kill_9_nothing_is_done_twice_unless_that_is_declared(sqlite_url: str, tmp_path: Path) -> None:
    with (
        opened(sqlite_url, tmp_path / "effects") as shop,
        shop.hang_on("/orders", "once", "once"),
        shop.hang_on("/orders", "again", "again"),
    ):
        shop.child.expect("entered", "entered")
        shop.child.kill()
    query(sqlite_url, "update holdfast_beat set expires_at = 0")
    with opened(sqlite_url, tmp_path / "effects") as shop:
        refused = shop.when_over("/orders", "once", "once")
        assert (refused.status_code, refused.json()["type"].rpartition(":")[2]) == (409, "interrupted")
        assert shop.effects().count("once") == 1
        shop.child.say("go on")
        done = shop.when_over("/orders", "again", "again")
        assert (done.json(), "Idempotent-Replayed" in done.headers) == ({"ordered": "again"}, False)
        assert sorted(shop.effects()) == ["again", "again", "once"], "the hook said that this one may be tried again"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("shop")
    with opened(f"sqlite:///{folder / 'app.db'}", folder / "effects") as shop:
        yield shop


def test_who_hangs_up_finds_the_answer_later(shop: Shop) -> None:
    with shop.hang_on("/orders", "one", "left"):
        shop.child.expect("entered")
    assert shop.post("/orders", "one", "left").status_code == 409
    shop.child.say("go on")
    reply = shop.when_over("/orders", "one", "left")
    assert (reply.json(), reply.headers["Idempotent-Replayed"]) == ({"ordered": "one"}, "true")
    assert shop.effects().count("one") == 1


def test_a_stream_without_end_ends_when_its_client_hangs_up(shop: Shop) -> None:
    with shop.hang_on("/streams", "two", "stream") as line:
        shop.child.expect("entered")
        shop.child.say("go on")
        told = b""
        while b"." not in told.partition(b"begin")[2]:
            told += line.recv(1000)
        assert shop.post("/streams", "two", "stream").status_code == 409
    assert "interrupted" in shop.when_over("/streams", "two", "stream").json()["type"]
    assert shop.effects().count("two") == 1


def test_a_server_that_is_told_to_stop_ends_what_it_has_begun(sqlite_url: str, tmp_path: Path) -> None:
    with opened(sqlite_url, tmp_path / "effects") as shop:
        with shop.hang_on("/orders", "three", "stop"):
            shop.child.expect("entered")
        shop.child.signal(signal.SIGTERM)
        eventually(lambda: not accepts(shop.port), "the server to close its door")
        shop.child.say("go on")
        shop.child.wait()
    with holdfast.Client(sqlite_url) as client:
        assert [each.status for each in client.operations.list()] == ["success"]


def accepts(port: int) -> bool:
    with socket.socket() as line:
        return line.connect_ex(("127.0.0.1", port)) == 0
