"""Whatever is sent, a replica that has its database and its driver never answers 5xx, and goes on."""

from __future__ import annotations

import json
import os
import random
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from holdfast.gateway.admission_rules import HEAD_BYTES
from tests.children import PATIENCE
from tests.gateway.replicas import Replica

EXAMPLES = int(os.environ.get("HOLDFAST_FUZZ_EXAMPLES", "3"))
"""Of each operation, as its description says and otherwise. More find more: 200 take minutes."""
ENDLESS = {"/events"}
LONG, LONG_TOO = (json.dumps(pattern) for pattern in (r"^[^\x00]*$", r"^$|^[^\x00]*$"))
"""Of texts of up to 131,071 characters. Of the first the fuzzer makes {0,131071}, which it compiles for a second, again
and again; the second means the same."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]


@pytest.fixture(scope="module")
def replica(folder: Path) -> Iterator[Replica]:
    """With its own driver, and as many writes as one likes."""
    with Replica(f"sqlite:///{folder / 'app.db'}", folder, "--writes", "0") as made:
        yield made
        assert made.http.get("/readyz").status_code == 200
        assert made.events("request.failed") == []
        assert made.events("loop.failed") == []
        assert made.end() == 0


@pytest.mark.timeout(900)
def test_no_request_of_any_operation_is_answered_with_5xx(replica: Replica) -> None:
    document = replica.http.get("/openapi.json").json()
    described = schemathesis.openapi.from_dict(json.loads(json.dumps(document).replace(LONG, LONG_TOO)))
    asked: set[str] = set()
    with requests.Session() as session:
        for found in described.get_all_operations():
            operation = found.ok()  # type: ignore[union-attr]
            if operation.path not in ENDLESS:
                asked.add(operation.path)
                _fuzz(operation, replica.address, session)
    assert asked == document["paths"].keys() - ENDLESS


def _fuzz(operation: Any, address: str, session: requests.Session) -> None:
    ways = [operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode]

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.one_of(ways))
    def ask(case: Any) -> None:
        answer = case.call(base_url=address, session=session, timeout=PATIENCE)
        case.validate_response(answer, checks=CHECKS)

    ask()


HEADS = [
    b"", b"\r\n\r\n", b"GET", b"GET / HTTP/9.9\r\n\r\n", b"GET /healthz HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01",
    b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /%ff%00%0d%0a HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET http://evil/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: abc\r\n\r\n",
    b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\nx",
    b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n\xff",
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 150 + b"\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic \xff\xff\r\nIdempotency-Key: \xff\r\n\r\n",
    b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: \"\r\nContent-Length: 0\r\n\r\n",
]  # fmt: skip


def test_bytes_that_are_hardly_http_are_refused_as_problems(replica: Replica) -> None:
    chance = random.Random(7)
    heads = [*HEADS, *(_mangled(chance.choice(HEADS[4:]), chance) for _ in range(150))]
    for head in heads:
        answer = _say(replica.address, head)
        if answer:
            status = answer.split(b" ")[1]
            assert status.isdigit(), (head, answer)
            assert status[:1] in b"124", (head, answer)
            if status[:1] == b"4" and b"websocket" not in head.lower():  # a bad handshake is told in words
                assert b"application/problem+json" in answer, (head, answer)
    assert replica.http.get("/healthz").status_code == 200


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
SENT = b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
AMBIGUOUS = {
    "a folded line": HEALTH + b"A: b\r\n folded\r\n\r\n",
    "a line folded with a tab": HEALTH + b"A: b\r\n\tHost: evil\r\n\r\n",
    "no CR at all": b"GET /healthz HTTP/1.1\nHost: localhost\n\n",
    "no CR in the middle": HEALTH + b"A: b\nC: d\r\n\r\n",
    "no CR at the end": HEALTH + b"A: b\n\r\n",
    "no CR after a value": HEALTH + b"A: b\r\n\n",
    "a line feed before": b"\n" + HEALTH + b"\r\n",
    "a folded trailer": SENT + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nA: b\r\n c\r\n\r\n",
    "one byte too many": HEALTH + b"A: ".ljust(HEAD_BYTES - len(HEALTH) - 3, b"a") + b"\r\n\r\n",
    "far too many": HEALTH + b"A: ".ljust(40_000, b"a") + b"\r\n\r\n",
}


@pytest.mark.parametrize("request_", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_heads_that_a_proxy_may_read_otherwise_or_that_are_too_long_are_refused(
    replica: Replica, request_: bytes
) -> None:
    head, _, body = _say(replica.address, request_).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 "), head
    assert json.loads(body)["status"] == 400


def test_a_head_of_the_documented_size_is_served(replica: Replica) -> None:
    longest = HEALTH + b"A: ".ljust(HEAD_BYTES - len(HEALTH) - 4, b"a") + b"\r\n\r\n"
    assert len(longest) == HEAD_BYTES
    assert _say(replica.address, longest).startswith(b"HTTP/1.1 200 ")


BODIES = [
    "{", "[]", "null", '"x"', "[" * 5000, '{"a":' * 2000, "1e999", "NaN", '{"name": "\\ud800"}', '{"name": "\\u0000"}',
    '{"name": "<script>alert(1)</script>"}', '{"spec": {"argv": ["\\u0000"]}}', '{"id": "../../etc/passwd"}',
    '{"a": ' + "9" * 5000 + "}", '{"a": 1, "a": 2}', "\ufeff{}", "", " ", '{"labels": {"": ""}}', '{"argv": ["é"]}',
]  # fmt: skip


def test_bodies_that_are_hardly_json_are_refused(replica: Replica) -> None:
    paths = replica.http.get("/openapi.json").json()["paths"]
    writes = [(path, method) for path, known in paths.items() for method in known if method in ("post", "put", "patch")]
    assert writes
    for path, method in writes:
        where = path.replace("{", "").replace("}", "")
        for body, kind in [*((body, "application/json") for body in BODIES), (BODIES[0], "text/plain")]:
            answer = replica.http.request(method, where, content=body.encode(), headers={"Content-Type": kind})
            assert answer.status_code < 500, (path, body[:80], answer.text)


TEXTS = [
    *("\0", "a\0b", "\n", "\x7f", "é", "🔒", "'", "%", "=", "..", "../..", "-", " "),
    *("a" * 300, "9" * 30, "-1", "NaN"),
]


def test_parameters_that_are_hardly_text_are_refused(replica: Replica) -> None:
    """Each of every path and query, by itself."""
    asked = 0
    for path, known in replica.http.get("/openapi.json").json()["paths"].items():
        for method, operation in known.items() if path not in ENDLESS else ():
            where = re.sub(r"{\w+}", "x", path)
            for each in operation.get("parameters", []):
                for text in TEXTS if each["in"] in ("path", "query") else ():
                    there, query = where, {each["name"]: text}
                    if each["in"] == "path":
                        there, query = re.sub(r"{\w+}", "x", path.replace(f"{{{each['name']}}}", quote(text, ""))), {}
                    answer = replica.http.request(method, there, params=query)
                    assert answer.status_code < 500, (method, there, query, answer.text)
                    asked += 1
    assert asked > 10 * len(TEXTS)


def _mangled(head: bytes, chance: random.Random) -> bytes:
    data = bytearray(head)
    for _ in range(chance.randint(1, 6)):
        place = chance.randrange(len(data))
        match chance.randrange(3):
            case 0:
                data[place] = chance.randrange(256)
            case 1:
                del data[place]
            case _:
                data.insert(place, chance.choice(b"\x00\r\n :%/\xff"))
    return bytes(data)


def _say(address: str, data: bytes) -> bytes:
    """What is answered before the line is closed; we say nothing more."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), PATIENCE) as line:
        try:
            line.sendall(data)
            line.shutdown(socket.SHUT_WR)
            while received := line.recv(65536):
                answer += received
        except ConnectionError:
            pass
    return answer
