"""Who may ask, from where, how much and how often; and every error is a problem with the number that the logs know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

import holdfast
from holdfast.gateway import admission_rules as rules
from holdfast.gateway.admission import Admission
from holdfast.gateway.problem import ProblemDocument
from holdfast.gateway.request_metrics import RequestMetrics
from holdfast.gateway.settings import Settings
from holdfast.gateway.tokens import Token
from tests.gateway.conftest import Serving

READ, OPERATE = "the-secret-of-a-reader", "the-secret-of-an-operator"
TOKENS = (Token("reader", "read", READ), Token("operator", "operate", OPERATE))


def routes(app: FastAPI) -> None:
    @app.post("/echo")
    async def echo(request: Request) -> dict[str, Any]:
        return {"bytes": len(await request.body()), "principal": request.state.principal}

    @app.get("/boom")
    async def boom() -> None:
        raise RuntimeError("the password is hunter2")

    @app.get("/refused")
    async def refused() -> None:
        raise holdfast.EngineError("Refused: postgresql://hunter2@db1:5432/app: invalid input syntax")

    @app.get("/spoilt")
    async def spoilt(told: bool) -> dict[str, Any]:
        return {"half": "\ud800"} if told else ProblemDocument.model_validate({"type": ["hunter2"]}).model_dump()

    @app.get("/own")
    async def own() -> Any:
        from fastapi.responses import PlainTextResponse

        return PlainTextResponse("x", headers={"Cache-Control": "max-age=60"})


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("localhost", True), ("localhost:7411", True), ("LOCALHOST.", True), ("127.0.0.1:80", True),
        ("[::1]:7411", True), ("10.0.0.7", True), ("gw.example:443", True), ("evil.example", False),
        ("localhost.evil.example", False),
        ("gw.example.evil", False), ("", False), ("gw.example@evil", False), ("a b", False), ("[evil]", False),
        ("localhost:port", False), ("127.0.0.1.evil.example", False),
    ],
)  # fmt: skip
def test_a_host_is_ours_by_name_or_by_address(host: str, ours: bool) -> None:
    assert rules.is_allowed_host(host, {"gw.example"}) is ours


@pytest.mark.parametrize(
    ("headers", "ours"),
    [
        ({}, True), ({"origin": "http://gw:1"}, True), ({"origin": "https://GW:1"}, True),
        ({"origin": "http://gw:2"}, False), ({"origin": "http://gw"}, False), ({"origin": "null"}, False),
        ({"origin": "http://evil"}, False), ({"origin": "file://gw:1"}, False), ({"origin": ""}, False),
        ({"sec-fetch-site": "cross-site"}, False), ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "same-origin"}, True), ({"sec-fetch-site": "none"}, True),
    ],
)  # fmt: skip
def test_a_write_is_begun_by_a_page_of_ours_or_by_none(headers: dict[str, str], ours: bool) -> None:
    assert rules.is_same_origin({"host": "gw:1", **headers}) is ours


@pytest.mark.parametrize(
    ("body", "about"),
    [
        (rb'{"a": "\ud83d\ude00 \\ud800 \u00e9"}', None),
        ('{"a": "ü"}'.encode(), None),
        (b"[" * 100 + b"]" * 100, None),
        (b'["' + b"[" * 200 + rb'\"[", ' + b'"]", ' * 200 + b'"{"]', None),
        (b"[], " * 200, None),
        (rb'{"a": "\ud83d"}', "surrogates"),
        (rb'{"a": "\ude00\ud83d"}', "surrogates"),
        (rb'{"\\\uDFFF": 1}', "surrogates"),
        (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "UTF-8"),
        (b'{"a": ' * 101 + b"1" + b"}" * 101, "inside each other"),
        (b"[" * 5000, "inside each other"),
    ],
)
def test_a_body_can_be_told_again(body: bytes, about: str | None) -> None:
    found = rules.json_body_error(body)
    assert found is None if about is None else about in (found or "")


def test_a_bucket_fills_with_time_and_never_over() -> None:
    clock = [0.0]
    rates = rules.RateLimit(2.0, lambda: clock[0])
    assert [rates.take("a") for _ in range(3)] == [None, None, 1]
    assert rates.take("b") is None, "each has its own"
    clock[0] = 0.5
    assert [rates.take("a"), rates.take("a")] == [None, 1]
    clock[0] = 1000.0
    assert [rates.take("a") for _ in range(3)] == [None, None, 1]
    slow = rules.RateLimit(0.1, lambda: clock[0])
    assert [slow.take("a"), slow.take("a")] == [None, 10]
    assert [rules.RateLimit(0, lambda: 0.0).take("a") for _ in range(3)] == [None] * 3


def test_a_number_of_the_clients_own_is_kept_if_it_is_harmless() -> None:
    assert rules.request_id("abc-1.2:3_4") == "abc-1.2:3_4"
    for other in (None, "", "a" * 65, "a b", "a\nb", '"', "<b>", "é"):
        assert len(rules.request_id(other)) == 32


def told(answer: httpx.Response, status: int) -> dict[str, Any]:
    """A problem, with the number that its header has as well."""
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    document: dict[str, Any] = answer.json()
    assert {"type", "title", "status", "detail", "requestId"} <= document.keys()
    assert (document["status"], document["requestId"]) == (status, answer.headers["x-request-id"])
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    return document


async def test_every_error_is_a_problem_and_every_answer_has_the_headers(serving: Serving) -> None:
    async with serving(routes) as http:
        told(await http.get("/nothing"), 404)
        assert told(await http.put("/echo"), 405)
        assert (await http.put("/echo")).headers["allow"] == "POST"
        assert (await http.put("/sandboxes")).headers["allow"] == "GET, POST"
        assert (await http.put("/sandboxes/nap")).headers["allow"] == "DELETE, GET, PATCH"
        told(await http.post("/echo", headers={"Host": "evil.example"}), 421)
        told(await http.post("/echo", headers={"Origin": "http://evil.example"}), 403)
        told(await http.get("/" + "x" * 3000), 414)
        told(await http.get("/own?" + "x" * 9000), 414)
        told(await http.get("/own", headers=[(f"x-{n}", "") for n in range(100)]), 431)
        told(await http.get("/own", headers={"x": "y" * 33_000}), 431)
        told(
            await http.post("/echo", content=b"x", headers={"Transfer-Encoding": "chunked", "Content-Length": "1"}), 400
        )
        answer = await http.get("/own", headers={"X-Request-Id": "mine-1", "Origin": "http://evil.example"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine-1")
        assert answer.headers["cache-control"] == "max-age=60"
        for name in ("x-content-type-options", "x-frame-options", "referrer-policy", "cross-origin-resource-policy"):
            assert name in answer.headers
        assert not any(name.startswith("access-control") for name in answer.headers), "there is no CORS"
        preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        answer = await http.options("/echo", headers=preflight)
        assert answer.status_code == 405
        assert not any(name.startswith("access-control") for name in answer.headers)


async def test_what_nobody_expected_is_in_the_log_and_not_in_the_answer(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(routes) as http:
        for path, kind in (
            ("/boom", "RuntimeError"), ("/spoilt?told=0", "ValidationError"),
            ("/spoilt?told=1", "PydanticSerializationError"),
        ):  # fmt: skip
            caplog.clear()
            assert told(answer := await http.get(path), 500)["requestId"]
            assert "hunter2" not in answer.text
            assert kind not in answer.text
            [record] = [each for each in caplog.records if each.getMessage() == "request.failed"]
            assert kind in str(record.exc_info)


async def test_a_client_is_not_told_where_the_database_is(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(routes) as http:
        answer = await http.get("/refused")
        assert "requestId" in told(answer, 503)["detail"]
        assert "hunter2" not in answer.text
        assert answer.headers["retry-after"] == "1"
        [record] = [each for each in caplog.records if each.getMessage() == "database.failed"]
        assert "hunter2@db1" in str(vars(record)), "the operator is"


async def test_a_header_that_decides_something_is_given_once(serving: Serving) -> None:
    async with serving(routes, tokens=TOKENS) as http:
        good = ("Authorization", f"Bearer {OPERATE}")
        assert (await http.post("/echo", headers=[good])).status_code == 200
        for repeated in (
            [good, ("Authorization", "Bearer other")], [good, good],
            [good, ("Origin", "http://evil.example"), ("Origin", "http://localhost")],
        ):  # fmt: skip
            problem = told(await http.post("/echo", headers=repeated), 400)
            assert "more than one" in problem["detail"]


async def test_an_answer_that_is_cut_off_for_a_known_reason_is_told_without_a_traceback(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"half of"
        raise holdfast.DriverError("the driver was cut off")

    def cut(app: FastAPI) -> None:
        @app.get("/cut")
        async def cut() -> StreamingResponse:
            return StreamingResponse(pieces())

    async with serving(cut) as http:
        with pytest.raises(AssertionError):  # of the transport: the answer has no end
            await http.get("/cut")
    [record] = [each for each in caplog.records if each.getMessage() in ("request.cut", "request.failed")]
    assert (record.getMessage(), record.levelname, record.exc_info) == ("request.cut", "WARNING", None)
    assert record.why == "the driver was cut off"  # type: ignore[attr-defined]


async def test_a_body_has_an_end_however_it_is_sent(serving: Serving) -> None:
    async def pieces(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"x" * 65536

    async with serving(routes) as http:
        limit = rules.BODY_BYTES
        assert (await http.post("/echo", content=b"x" * limit)).json()["bytes"] == limit
        assert (await http.post("/echo", content=pieces(16))).json()["bytes"] == limit
        told(await http.post("/echo", content=b"x" * (limit + 1)), 413)
        told(await http.post("/echo", content=pieces(17)), 413)
        told(await http.post("/echo", content=b"", headers={"Content-Length": "-1"}), 413)


async def test_a_handshake_has_no_body_whatever_it_says() -> None:
    heard = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append((await receive())["type"])

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    headers = [(b"host", b"localhost"), (b"content-length", b"0")]
    scope = {"type": "websocket", "path": "/sandboxes/x/supervisor", "query_string": b"", "headers": headers}
    await Admission(app, settings=Settings("sqlite:///none.db"), metrics=RequestMetrics())(scope, receive, send)
    assert heard == ["websocket.connect"]


@pytest.mark.parametrize(
    ("method", "path", "may"),
    [
        ("POST", "/hook/stop", True), ("GET", "/hook/status", True), ("GET", "/sandboxes", False), ("GET", "/", False),
        ("POST", "/sandboxes", False), ("POST", "/hook/../sandboxes", False), ("POST", "/hook/", False),
        ("POST", "/agents", False), ("POST", "/hook/a/b", False), ("POST", "//hook/a", False),
    ],
)  # fmt: skip
async def test_a_token_that_reports_sends_hooks_and_nothing_else(
    serving: Serving, method: str, path: str, may: bool
) -> None:
    tokens = (*TOKENS, Token("agent", "report", "the-secret-of-an-agent"))
    async with serving(routes, tokens=tokens) as http:
        headers = {"Authorization": "Bearer the-secret-of-an-agent"}
        request = http.build_request(method, "/", headers=headers)
        request.url = request.url.copy_with(raw_path=path.encode())
        answer = await http.send(request)
        assert (answer.status_code == 403) is not may, answer.text
        if not may:
            assert "hooks of agents, and nothing else" in told(answer, 403)["detail"]


async def test_tokens_read_or_operate(serving: Serving) -> None:
    async with serving(routes, tokens=TOKENS, advertise="http://GW-1.example:7411", entrance="http://gw") as http:
        for host in ("gw-1.example:7411", "gw"):
            sent_on = await http.get("/healthz", headers={"Host": host})
            assert sent_on.status_code == 200, "where others are sent to is served"
        for bad in ({}, {"Authorization": "Bearer wrong-wrong-wrong-wrong"}, {"Authorization": "nonsense"}):
            answer = await http.get("/own", headers=bad)
            told(answer, 401)
            assert {"Bearer", "Basic"} <= set(answer.headers["www-authenticate"].replace(",", " ").split())
        reader, operator = ({"Authorization": f"Bearer {each}"} for each in (READ, OPERATE))
        assert (await http.get("/own", headers=reader)).status_code == 200
        assert "reader" in told(await http.post("/echo", headers=reader), 403)["detail"]
        assert (await http.post("/echo", headers=operator)).json()["principal"] == "operator"
        assert (await http.get("/own", auth=("anybody", READ))).status_code == 200, "as browsers do"
        told(await http.post("/echo", auth=("anybody", READ)), 403)
        for method in ("PUT", "PATCH", "DELETE", "TRACE", "PROPFIND"):
            told(await http.request(method, "/echo", headers=reader), 403)
        for path in ("/healthz", "/readyz"):
            assert (await http.get(path)).status_code in (200, 503), "what keeps replicas running has no token"
        for path in ("/metrics", "/openapi.json", "/", "//healthz", "/healthz/"):
            told(await http.get(path), 401)


def test_an_address_of_ipv6_is_its_network() -> None:
    assert rules.address_group("2001:db8:1:2:3:4:5:6") == rules.address_group("2001:db8:1:2::9") == "2001:db8:1:2::/64"
    assert rules.address_group("10.0.0.7") == "10.0.0.7"
    assert rules.address_group("unix") == "unix"


def test_buckets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_BUCKETS", 2)
    rates = rules.RateLimit(1.0, lambda: 0.0)
    assert [rates.take(key) for key in ("a", "b", "a", "c", "a", "b")] == [None, None, 1, None, 1, None]
    assert [rates.wait(key) for key in ("b", "d", "d")] == [1, None, None]


async def test_wrong_tokens_of_an_address_have_a_rate_and_block_none_that_is_known(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "FAILURES", 0.01)
    good = {"Authorization": f"Bearer {READ}"}
    for is_known in (True, False):
        async with serving(routes, tokens=TOKENS) as http:
            if is_known:
                assert (await http.get("/own", headers=good)).status_code == 200
            for wrong in ({}, {"Authorization": "Bearer wrong-wrong-wrong-wrong"}, {"Authorization": "Peer x"}):
                told(await http.get("/own", headers=wrong), 401 if is_known or not wrong else 429)
            answer = await http.get("/own", headers=good)
            assert answer.status_code == (200 if is_known else 429)
            assert is_known or 50 < int(answer.headers["retry-after"]) <= 100
            assert (await http.get("/healthz")).status_code == 200


async def test_writes_have_a_rate_and_reads_have_none(serving: Serving) -> None:
    async with serving(routes, writes=0.01, tokens=TOKENS) as http:
        headers = {"Authorization": f"Bearer {OPERATE}"}
        assert (await http.post("/echo", headers=headers)).status_code == 200
        refused = await http.post("/echo", headers=headers)
        told(refused, 429)
        assert 50 < int(refused.headers["retry-after"]) <= 100
        assert [(await http.get("/own", headers=headers)).status_code for _ in range(5)] == [200] * 5


async def test_a_request_that_is_cancelled_is_answered_with_503(serving: Serving) -> None:
    begun = asyncio.Event()

    def hanging(app: FastAPI) -> None:
        @app.get("/hang")
        async def hang() -> None:
            begun.set()
            await asyncio.Event().wait()

    async with serving(hanging) as http:
        asked = asyncio.create_task(http.get("/hang"))
        waiting = asyncio.create_task(begun.wait())
        await asyncio.wait((asked, waiting), return_when=asyncio.FIRST_COMPLETED)
        assert begun.is_set(), asked.result()
        asked.cancel()
        assert "stopping" in told(await asked, 503)["detail"]
