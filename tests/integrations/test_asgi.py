"""What a request with an Idempotency-Key is answered with, sentence by sentence."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import holdfast
from holdfast.integrations.asgi import IdempotencyMiddleware
from tests.children import PATIENCE, query
from tests.integrations.asgi_client import JSON, Client, Shop, ask, guarded
from tests.project.test_readme import blocks

BODIES = [b"", b"0", b"null", b"false", b"\n\n", bytes(range(256)) * 40, '{"é": "☃"}'.encode()]


@pytest.fixture
async def client(sqlite_url: str) -> AsyncIterator[holdfast.AsyncClient]:
    async with holdfast.AsyncClient(sqlite_url) as client:
        yield client


async def test_a_retry_gets_the_same_bytes_and_no_second_effect(client: holdfast.AsyncClient) -> None:
    for number, body in enumerate(BODIES):
        app = guarded(shop := Shop(body), client)
        first, again = [await ask(app, body, key=f"k{number}") for _ in range(2)]
        assert (first.status, first.body, first.replayed) == (201, body, False)
        assert (again.status, again.body, again.replayed) == (201, body, True)
        assert again.headers["content-length"] == str(len(body))
        assert shop.effects == [body]


async def test_only_allowed_headers_are_repeated_and_never_a_cookie(client: holdfast.AsyncClient) -> None:
    headers = {
        "Content-Type": "text/plain",
        "Location": "/charges/7",
        "X-Cost": "3",
        "X-Trace": "1",
        "Set-Cookie": "a=b",
    }
    app = guarded(Shop(headers=headers), client, replay_headers=["X-Cost"])
    assert "Set-Cookie" in (await ask(app)).headers, "the first answer has all headers"
    assert (await ask(app)).headers == {
        "content-type": "text/plain", "location": "/charges/7", "x-cost": "3", "content-length": "4",
        "idempotent-replayed": "true",
    }  # fmt: skip


async def test_an_answer_without_a_body_has_no_length(client: holdfast.AsyncClient) -> None:
    app = guarded(Shop(b"", status=204, headers={"etag": '"7"'}), client)
    await ask(app)
    again = await ask(app)
    assert (again.status, again.headers) == (204, {"etag": '"7"', "idempotent-replayed": "true"})


async def test_without_a_key_it_is_refused_where_one_is_required(client: holdfast.AsyncClient) -> None:
    app = guarded(shop := Shop(), client, required=lambda scope: scope["path"] == "/charges")
    refused = await ask(app, key=None)
    assert (refused.status, refused.kind, shop.effects) == (400, "missing", [])
    assert (await ask(guarded(shop, client, required=True), key=None, path="/x")).kind == "missing"
    for _ in range(2):
        assert (await ask(app, key=None, path="/notes")).status == 201
    assert len(shop.effects) == 2
    assert await client.operations.list() == []


async def test_a_malformed_key_is_refused(client: holdfast.AsyncClient) -> None:
    app = guarded(shop := Shop(), client)
    for key in ("", '""', '"a', 'a"', "a b", '"a", "b"', "a,b", '"é"', '"\\x"', '"a" b', "x" * 256):
        refused = await ask(app, key=key)
        assert (refused.status, refused.kind, shop.effects) == (400, "malformed", []), key


async def test_two_keys_are_no_key(client: holdfast.AsyncClient) -> None:
    twice = [(b"Idempotency-Key", b'"a"'), (b"idempotency-key", b'"a"')]
    assert (await ask(guarded(Shop(), client), key=None, headers=twice)).kind == "malformed"


async def test_while_it_runs_a_retry_hears_so_or_waits(client: holdfast.AsyncClient) -> None:
    app, patient = guarded(shop := Shop(), client), guarded(shop, client, wait=PATIENCE)
    shop.go_on.clear()
    first = asyncio.ensure_future(ask(app))
    await shop.entered.wait()
    refused = await ask(app)
    assert (refused.status, refused.kind, refused.headers["retry-after"]) == (409, "running", "1")
    assert (await ask(guarded(shop, client, wait=0.05))).kind == "running"
    waiting = asyncio.ensure_future(ask(patient))
    shop.go_on.set()
    assert ((await first).replayed, (await waiting).replayed) == (False, True)
    assert len(shop.effects) == 1


@pytest.mark.parametrize(
    "other", [{"body": b"{ }"}, {"query": b"a=1"}, {"headers": [(b"content-type", b"text/plain")]}], ids=str
)
@pytest.mark.parametrize("status", [201, 500])
async def test_the_same_key_with_another_request_is_refused(
    client: holdfast.AsyncClient, other: dict[str, Any], status: int
) -> None:
    app = guarded(shop := Shop(status=status), client)
    shop.go_on.clear()
    first = asyncio.ensure_future(ask(app))
    await shop.entered.wait()
    assert (await ask(app, **other)).kind == "reused", "while it runs"
    shop.go_on.set()
    await first
    refused = await ask(app, **other)
    assert (refused.status, refused.kind, len(shop.effects)) == (422, "reused", 1)
    same = [(b"content-type", b" Application/JSON "), (b"user-agent", b"another")]
    assert (await ask(app, headers=same)).status == status, "what says the same is the same"


async def test_a_key_is_of_one_principal_one_method_and_one_path(client: holdfast.AsyncClient) -> None:
    app = guarded(shop := Shop(), client)
    others: list[dict[str, Any]] = [{}, {"user": "bob"}, {"method": "PATCH"}, {"path": "/refunds"}, {"key": "k2"}]
    others += [{"path": "/" + "x" * 100 + end} for end in "ab"] + [{"key": "y" * 100 + end} for end in "ab"]
    for number in (1, 2):
        replies = [await ask(app, **other) for other in others]
        assert {each.replayed for each in replies} == {number == 2}
    assert len(shop.effects) == len(others)
    assert (await ask(app, key="k")).replayed, "quoted or not, and with parameters, it is one key"
    assert (await ask(app, key='  "k"; a=1;b  ')).replayed
    shown = [record.label for record in await client.operations.list()]
    assert any(label.startswith("POST /charges k ") for label in shown)
    assert not [label for label in shown if "bob" in label or "ann" in label], "a principal may be a secret"


async def test_what_says_nothing_of_the_request_is_released(client: holdfast.AsyncClient) -> None:
    for status in (500, 502, 503, 599, 307, 308, 401, 403, 408, 409, 425, 429):
        app = guarded(shop := Shop(status=status), client)
        for number in range(1, 6 if status == 500 else 3):  # more often than an operation is tried by default
            reply = await ask(app, key=str(status))
            assert (reply.status, reply.body, reply.replayed, len(shop.effects)) == (status, b"done", False, number)
        shop.status = 200
        assert [(await ask(app, key=str(status))).replayed for _ in range(2)] == [False, True], status


async def test_other_answers_are_kept(client: holdfast.AsyncClient) -> None:
    for status in (200, 302, 400, 404, 410, 413, 422, 499):
        app = guarded(shop := Shop(status=status), client)
        first, again = [await ask(app, key=str(status)) for _ in range(2)]
        assert (first.status, again.status, again.replayed, len(shop.effects)) == (status, status, True, 1)


async def test_an_application_that_raises_is_tried_again(client: holdfast.AsyncClient) -> None:
    calls: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        if len(calls) < 3:
            raise LookupError("the password is 1234")
        if len(calls) > 3:
            await Shop()(scope, receive, send)

    for _ in range(2):
        with pytest.raises(LookupError, match="1234"):
            await ask(guarded(app, client))
    [record] = await client.operations.list()
    assert record.error == {"type": "Released", "message": "raised LookupError"}, "what it said may be a secret"
    assert (await ask_nothing(guarded(app, client))) == []
    assert (await ask(guarded(app, client))).status == 201
    assert (await ask(guarded(app, client))).replayed


async def ask_nothing(app: Any) -> list[Any]:
    """One that ends without an answer: the server has one for that."""
    return (await ask(app)).messages


async def test_an_answer_that_was_not_kept_is_gone(client: holdfast.AsyncClient) -> None:
    large = guarded(shop := Shop(b"x" * (1 << 20)), client)
    assert (await ask(large)).body == shop.body
    small = guarded(shop, client, max_kept=100)
    assert (await ask(small, key="2")).body == shop.body
    brief = guarded(shop, client, keep=0.001)
    shop.body = b"short"
    await ask(brief, key="3")
    await asyncio.sleep(0.01)
    for _ in range(2):
        for app, key in ((large, "k"), (small, "2"), (brief, "3")):
            reply = await ask(app, key=key)
            assert (reply.status, reply.kind) == (410, "gone"), key
        assert await client.operations.expire() in (0, 1)
    assert (await ask(brief, b"other", key="3")).kind == "reused"
    assert len(shop.effects) == 3


async def test_the_largest_answer_that_the_log_takes_is_kept(client: holdfast.AsyncClient) -> None:
    """Whatever its head takes, a few bytes less than the limit are kept, and never is a result refused."""
    kept = []
    for size in range((1 << 20) - 60, (1 << 20) - 40):
        app = guarded(shop := Shop(b"x" * size), client)
        await ask(app, key=str(size))
        kept.append((await ask(app, key=str(size))).body == shop.body)
    assert set(kept) == {True, False}
    assert kept == sorted(kept, reverse=True)
    assert {record.status for record in await client.operations.list()} == {"success"}


async def test_a_body_over_the_cap_is_refused(client: holdfast.AsyncClient) -> None:
    app = guarded(shop := Shop(), client, max_body=10)
    declared = await ask(app, b"x", headers=[JSON, (b"content-length", b"11")])
    endless = await ask(app, headers=[(b"content-length", b"9" * 5000)])
    streamed = await ask(app, [b"x" * 6, b"x" * 5])
    assert {(each.status, each.kind) for each in (declared, endless, streamed)} == {(413, "too-large")}
    assert shop.effects == []
    assert (await ask(app, [b"x" * 6, b"x" * 4])).status == 201
    assert shop.effects == [b"x" * 10]


async def test_problems_name_the_request_if_it_has_a_name(client: holdfast.AsyncClient) -> None:
    app = guarded(Shop(), client, required=True)
    named = await ask(app, key=None, state={"request_id": "r-7"})
    assert json.loads(named.body)["requestId"] == "r-7"
    assert "requestId" not in json.loads((await ask(app, key=None, state={})).body)


async def test_what_is_not_asked_with_these_methods_passes_untouched(client: holdfast.AsyncClient) -> None:
    seen: list[Any] = []

    async def app(*call: Any) -> None:
        seen.append(call)

    middleware = guarded(app, client, required=True)
    scopes = [{"type": "lifespan"}, {"type": "websocket", "path": "/"}, Client(method="GET").scope]
    for scope in [*scopes, Client(method="PUT").scope]:
        call = (scope, object(), object())
        await middleware(*call)  # type: ignore[arg-type]
        assert all(ours is theirs for ours, theirs in zip(call, seen.pop(), strict=True))
    assert (await ask(guarded(app, client, required=True, methods=["put"]), key=None, method="PUT")).status == 400


async def test_the_application_is_asked_for_bytes_alone(client: holdfast.AsyncClient) -> None:
    """A file that the server would send by itself could not be given again."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["extensions"])
        await Shop()(scope, receive, send)

    offered: dict[str, Any] = {"http.response.pathsend": {}, "http.response.trailers": {}, "tls": {}}
    await ask(guarded(app, client), extensions=offered)
    assert seen == [{"tls": {}}]


def test_it_does_not_start_without_a_principal_or_with_a_mistake(sqlite_url: str) -> None:
    client = holdfast.AsyncClient(sqlite_url)
    with pytest.raises(TypeError, match="principal"):
        IdempotencyMiddleware(Shop(), client)  # type: ignore[call-arg]
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"principal": None}, "principal must be a function of the scope .* another user's answer"),
        ({"client": holdfast.Client(sqlite_url)}, "client must be an AsyncClient"),
        ({"on_partial": "again"}, "on_partial must be"),
        ({"replay_headers": ["Set-Cookie"]}, "must not have set-cookie"),
        ({"replay_headers": "etag"}, "replay_headers must be names"),
        ({"methods": [b"POST"]}, "methods must be names"),
        ({"wait": -1}, "wait must be from 0.0 to 86400.0, not -1"),
        ({"keep": 0}, "keep must be from"),
        ({"ttl": True}, "ttl must be a number, not bool"),
        ({"max_kept": (1 << 20) + 1}, "max_kept must be from 0 to 1048576"),
        ({"max_body": None}, "max_body must be a number"),
        ({"linger": float("nan")}, "linger must be from"),
    ]
    for options, message in mistakes:
        with pytest.raises((TypeError, ValueError), match=message):
            IdempotencyMiddleware(Shop(), **{"client": client, "principal": str, **options})


async def test_a_principal_that_is_none_is_nobodys_key(client: holdfast.AsyncClient) -> None:
    for wrong in (None, "", 7):
        app = guarded(shop := Shop(), client, principal=lambda scope, answer=wrong: answer)
        with pytest.raises(TypeError, match="principal must return the owner of the key"):
            await ask(app)
        assert shop.effects == []


PAGE = (Path(__file__).parents[2] / "docs/howto/idempotency-key.md").read_text(encoding="utf-8")


async def test_the_first_program_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop, on_partial, _ = blocks("python", PAGE)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(shop, namespace)
    [(name, value)] = re.findall(r"-H '(Idempotency-Key): (.*?)'", PAGE)
    async with served(namespace["app"]) as http:
        assert (await http.post("/charges", json={"amount": 7})).status_code == 400
        replies = [await http.post("/charges", json={"amount": 7}, headers={name: value}) for _ in range(2)]
        assert [each.status_code for each in replies] == [201, 201]
        assert replies[0].json() == replies[1].json()
        assert [each.headers.get("Idempotent-Replayed") for each in replies] == [None, "true"]
        assert (await http.post("/charges", json={"amount": 8}, headers={name: value})).status_code == 422
    namespace["app"].middleware_stack = None
    exec(on_partial, namespace)


async def test_the_second_program_of_the_page_books_exactly_once(postgres_url: str) -> None:
    *_, bank = blocks("python", PAGE)
    namespace: dict[str, Any] = {"__name__": "bank"}
    exec(bank.replace("postgresql://localhost/app", postgres_url), namespace)
    async with served(namespace["app"]) as http:
        transfer, headers = {"account": "jane", "amount": 7}, {"Idempotency-Key": "8e03"}
        replies = await asyncio.gather(*[http.post("/transfers", json=transfer, headers=headers) for _ in range(5)])
        assert [(each.status_code, each.json()) for each in replies] == [(201, {"id": 1})] * 5
        other = await http.post("/transfers", json={**transfer, "amount": 8}, headers=headers)
        assert (other.status_code, (await http.post("/transfers", json=transfer)).status_code) == (422, 422)
    assert query(postgres_url, "select account, amount from transfers") == [("jane", 7)]


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
        yield http
