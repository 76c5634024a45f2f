"""Clients of HTTP and WebSocket that are malformed, silent, stalled, or without a right to what they ask for."""

import base64
import json
import os
import random
import re
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from proof.attack.tally import Tally
from proof.attack.targets import GatewayTarget, Target

OPEN_PATHS = ("/healthz", "/readyz")
HELD = 400
"""Connections that are left open; the oldest is closed then."""
_SILENCE = 0.25
"""Seconds without a byte after which a request counts as not answered."""
_LINES = (
    b"GET / HTTP/1.1", b"GET  / HTTP/1.1", b"get / HTTP/1.1", b"GET / HTTP/2.0", b"GET / HTTP/1.1 x", b"GET",
    b"\x16\x03\x01",
    b"PRI * HTTP/2.0", b"CONNECT a:1 HTTP/1.1", b"GET http://evil/ HTTP/1.1", b"GET /../../etc/passwd HTTP/1.1",
    b"GET /%2e%2e/static/../api/leases HTTP/1.1", b"GET //api/leases HTTP/1.1",
    b"GET /healthz/../api/leases HTTP/1.1",
    b"GET /static/..%2f..%2fsettings.py HTTP/1.1", b"POST /sandboxes HTTP/1.1", b"DELETE /sandboxes/own HTTP/1.1",
    b"OPTIONS * HTTP/1.1", b"TRACE / HTTP/1.1", b"GET /\xff\x00 HTTP/1.1", b"PUT /v1/sandboxes/a HTTP/1.1",
    b"GET /api/wal?after=1/08/1 HTTP/1.1", b"GET /v1/watch HTTP/1.1", b"DELETE /v1/sandboxes/own HTTP/1.1",
)  # fmt: skip
_HEADERS = (
    b"Host: localhost", b"Host: evil.example", b"Host: a\r\nHost: localhost", b" folded: x", b"X: \x00", b"X : y",
    b"X", b": y",
    b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 5\r\nContent-Length: 6",
    b"Content-Length: 9999999999999999",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\nContent-Length: 3", b"Transfer-Encoding: xchunked",
    b"Expect: 100-continue", b"Upgrade: websocket\r\nConnection: Upgrade", b"Origin: http://evil.example",
    b"Origin: null",
    b"X: " + b"y" * 40_000, b"a: b\r\n" * 150 + b"a: b", b"Authorization: Basic \xff", b"Authorization: Bearer",
    b"Authorization: Bearer a\r\nAuthorization: Bearer b", b"X-HTTP-Method-Override: DELETE",
    b"X-Forwarded-For: 127.0.0.1",
    b"Idempotency-Key: \xff", b"Connection: close", b"Content-Type: application/json", b"Sec-Fetch-Site: cross-site",
    b"Authorization: Peer " + b"0" * 64,
)  # fmt: skip
_BODIES = (
    b"", b"hello", b"{", b"[" * 5000, b'{"a": 1e999}', b'{"argv": ["\\ud800"]}', b"\xff\xfe", b"zz\r\n",
    b"ffffffffffffffff\r\nx",
    b"5\r\nhello\r\n0\r\n\r\n", b'{"id": "../../x", "argv": ["true"]}', b'{"a": 1, "a": 2}',
    b"0\r\n\r\nGET /api/leases HTTP/1.1\r\n\r\n",
)  # fmt: skip
_STALLED = ("/sandboxes?limit=1000", "/events", "/", "/api/operations?limit=1000", "/openapi.json")


class WebAttacker:
    STRIKES = 30
    """In a round."""

    def __init__(self, target: Target, tally: Tally, random: random.Random) -> None:
        self._target, self._tally, self._random = target, tally, random
        self._name = target.name
        self._held: deque[socket.socket] = deque()
        self.attacks: list[Callable[[], None]] = [self.send_malformed, self.stay_silent]
        if isinstance(target, GatewayTarget):
            self._gateway = target
            self.attacks += [self.ask_without_right, self.stall, self.shake_hands, self.send_bad_frames]

    def close(self) -> None:
        for connection in self._held:
            connection.close()

    def send_malformed(self) -> None:
        chance = self._random
        lines = [chance.choice(_LINES), *chance.sample(_HEADERS, chance.randrange(4))]
        if chance.random() < 0.8:
            lines.insert(1, b"Host: localhost")
        end = chance.choice([b"\r\n", b"\r\n", b"\r\n", b"\n"])
        request = bytearray(end.join(lines) + 2 * end + chance.choice(_BODIES))
        for _ in range(chance.choice([0, 0, 1, 5])):
            request[chance.randrange(len(request))] = chance.randrange(256)
        answer = self._exchange(bytes(request))
        status = self._judge("malformed", bytes(request), answer)
        path = bytes(request).split(b" ", 2)[1:2]
        is_ambiguous = re.search(rb"(?<!\r)\n|\n[ \t]", bytes(request).partition(b"\r\n\r\n")[0])
        is_open = path and path[0].split(b"?")[0].decode("latin-1") in OPEN_PATHS
        if status.startswith("2") and (is_ambiguous or not is_open):
            self._tally.report(f"{self._name}: {bytes(request)!r:.300} was answered with {answer!r:.300}")

    def ask_without_right(self) -> None:
        """Any route without a token, with a wrong one, or with one whose scope does not allow it."""
        chance = self._random
        path, methods = chance.choice(self._gateway.paths)
        method = chance.choice([*methods]).upper()
        scope = chance.choice(["none", "wrong", "basic", "peer", "read", "report"])
        if scope == "read" and method in ("GET", "HEAD"):
            method = "DELETE"
        if scope == "report" and path.startswith("/hook/"):
            path = "/sandboxes"
        basic = base64.b64encode(b"x:" + os.urandom(8)).decode()
        credentials = {
            "none": "", "wrong": f"Bearer {chance.randbytes(16).hex()}", "basic": f"Basic {basic}",
            "peer": f"Peer {chance.randbytes(32).hex()}",
            **{key: f"Bearer {each}" for key, each in self._gateway.tokens.items()},
        }[scope]  # fmt: skip
        concrete = re.sub(r"\{\w+(:path)?\}", chance.choice(["own", "1", "..", "%2e%2e", "x" * 300]), path)
        lines = [
            f"{method} {concrete} HTTP/1.1",
            "Host: localhost",
            "Content-Length: 2",
            "Content-Type: application/json",
        ]
        lines += [f"Authorization: {credentials}"] if credentials else []
        request = "\r\n".join([*lines, "", "{}"]).encode()
        answer = self._exchange(request)
        status = self._judge(f"without right ({scope})", request, answer)
        if status.startswith("2") and concrete not in OPEN_PATHS:
            self._tally.report(f"{self._name}: {request!r:.300} was answered with {answer!r:.300}")

    def stay_silent(self) -> None:
        """Some connections without a request, or with half of one."""
        for _ in range(10):
            with suppress(OSError):
                connection = self._connect()
                connection.sendall(
                    self._random.choice([b"", b"GET / HTTP/1.1\r\nHost: loc", b"POST /sandboxes HTTP/1.1\r\n"])
                )
                self._hold(connection)
                self._tally.note(f"{self._name}: silent", "open")

    def stall(self) -> None:
        """Ask for much, with a token that may read, and read nothing."""
        with suppress(OSError):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(10.0)
            connection.connect(self._target.place)
            token = self._gateway.tokens["read"]
            head = f"GET {self._random.choice(_STALLED)} HTTP/1.1\r\nHost: localhost"
            request = f"{head}\r\nAuthorization: Bearer {token}\r\n\r\n"
            connection.sendall(request.encode() * self._random.choice([1, 20]))
            self._hold(connection)
            self._tally.note(f"{self._name}: stalled", "open")

    def shake_hands(self) -> None:
        """Connect as the supervisor of a sandbox without its token."""
        chance = self._random
        tokens = ["", chance.randbytes(16).hex(), base64.urlsafe_b64encode(chance.randbytes(32)).decode().rstrip("=")]
        token = chance.choice([*tokens, self._gateway.tokens["read"]])
        id = chance.choice(["own", "large-1", "nothing", "..", "%00"])
        answer = self._exchange(_handshake(id, token))
        if self._judge("handshake", token, answer) == "101":
            self._tally.report(f"{self._name}: a supervisor of {id!r} was accepted with the token {token!r:.20}")

    def send_bad_frames(self) -> None:
        """As the supervisor of a sandbox, with its token."""
        with suppress(OSError), self._connect() as connection:
            connection.sendall(_handshake("own", self._gateway.supervisor_token))
            status = self._judge("frames", "handshake", _read_answer(connection))
            if status == "101":
                connection.sendall(self._bad_frame())
                connection.settimeout(_SILENCE)
                with suppress(TimeoutError):
                    self._tally.check_secrets(self._name, "frame", connection.recv(65536))

    def _bad_frame(self) -> bytes:
        chance = self._random
        text = chance.choice(
            [
                b"{",
                b"[]",
                b'{"id": 1}',
                b"\xff",
                b'{"id": [], "reply": 1}',
                json.dumps({"id": 1, "part": "x" * 60000}).encode(),
            ]
        )
        header = chance.choice([b"\x81", b"\x83", b"\xff", b"\x09", b"\x01", b"\x82", b"\x88"])
        length = chance.choice(
            [
                b"\xff" + struct.pack(">Q", 2**63),
                b"\xff" + struct.pack(">Q", len(text)),
                b"\xfe" + struct.pack(">H", len(text) % 65536),
                b"\x05",
            ]
        )
        return header + length + b"\0\0\0\0" + text

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._target.place, timeout=10.0)

    def _hold(self, connection: socket.socket) -> None:
        self._held.append(connection)
        if len(self._held) > HELD:
            self._held.popleft().close()

    def _exchange(self, request: bytes) -> bytes:
        try:
            with self._connect() as connection:
                with suppress(ConnectionError):  # it has answered and closed before all was sent
                    connection.sendall(request)
                return _read_answer(connection)
        except OSError:
            return b""

    def _judge(self, kind: str, request: object, answer: bytes) -> str:
        """Note the status. Anything but an answer of HTTP, and an error of the server, is a violation."""
        match = re.match(rb"HTTP/1\.[01] (\d{3})[ \r]", answer)
        status = match[1].decode() if match else "closed or silent"
        self._tally.note(f"{self._name}: {kind}", status)
        self._tally.check_secrets(self._name, request, answer)
        if (answer and not match) or (status.startswith("5") and status not in ("501", "503")):
            self._tally.report(f"{self._name}: {request!r:.300} was answered with {answer!r:.300}")
        return status


def _handshake(id: str, token: str) -> bytes:
    lines = [
        f"GET /sandboxes/{id}/supervisor HTTP/1.1", "Host: localhost", "Upgrade: websocket", "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", f"Authorization: Bearer {token}", "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode()


def _read_answer(connection: socket.socket) -> bytes:
    """One answer: until its length is there, the connection is closed, or nothing comes."""
    answer, wanted = b"", None
    connection.settimeout(_SILENCE)
    with suppress(OSError):
        while (wanted is None or len(answer) < wanted) and len(answer) < 1 << 20:
            if not (data := connection.recv(65536)):
                break
            answer += data
            head, end, _ = answer.partition(b"\r\n\r\n")
            if end and wanted is None:
                length = re.search(rb"(?im)^content-length: *(\d+)", head)
                wanted = len(head) + 4 + int(length[1]) if length else len(head) + 4
                connection.settimeout(10.0)
    return answer
