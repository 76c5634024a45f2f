"""Streams, clients that leave, servers that cancel: what was begun ends once, and is recorded as what it came to."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import holdfast
from holdfast.database.sqlite_async import AsyncSqliteSession
from tests.children import PATIENCE
from tests.integrations.asgi_client import Client, Reply, Shop, ask, guarded


@pytest.fixture
async def client(sqlite_url: str) -> AsyncIterator[holdfast.AsyncClient]:
    async with holdfast.AsyncClient(sqlite_url) as client:
        yield client


class Stream:
    """Says one piece whenever it is told to. Without end, it ends when it hears that its client has left."""

    def __init__(self, pieces: list[bytes], *, endless: bool = False) -> None:
        self.effects, self.pieces, self.endless = 0, pieces, endless
        self.next, self.heard = asyncio.Semaphore(0), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        self.effects += 1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for piece in self.pieces:
            await self.next.acquire()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if self.endless:
            assert (await receive())["type"] == "http.disconnect"
            self.heard.set()
            with pytest.raises(OSError, match="the client has left"):
                await send({"type": "http.response.body", "body": b"!", "more_body": True})
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def pieces(reply: Reply, number: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(reply.messages) < number:
            reply.arrived.clear()
            await reply.arrived.wait()


async def status_of(client: holdfast.AsyncClient, status: str) -> None:
    """Wait until the only operation has it."""

    async def has_it() -> bool:
        return [each.status for each in await client.operations.list()] == [status]

    await eventually(has_it)


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_stream_goes_to_the_client_as_it_comes_and_is_given_again_whole(client: holdfast.AsyncClient) -> None:
    app = guarded(stream := Stream([b"one ", b"two"]), client)
    first = Client()
    asked = asyncio.ensure_future(first.ask(app))
    stream.next.release()
    await pieces(first.reply, 2)
    assert (first.reply.body, (await ask(app)).kind) == (b"one ", "running")
    stream.next.release()
    await asked
    again = await ask(app)
    assert (first.reply.body, again.body, again.replayed, stream.effects) == (b"one two", b"one two", True, 1)
    assert again.headers["content-type"] == "text/event-stream"


async def test_who_has_the_end_of_an_answer_can_have_it_again(client: holdfast.AsyncClient) -> None:
    """When the last message is sent, the log has it."""
    seen: list[tuple[bool, str]] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            seen.append((message.get("more_body", False), (await client.operations.list())[0].status))

    stream = Stream([b"."])
    stream.next.release()
    for key, app in (("1", Shop()), ("2", stream)):
        one = Client(key=key)
        await guarded(app, client)(one.scope, one.receive, send)
    assert seen == [(False, "success"), (True, "running"), (False, "success")]


async def test_a_stream_that_is_too_large_reaches_its_client_and_is_gone(client: holdfast.AsyncClient) -> None:
    app = guarded(stream := Stream([b"x" * 60] * 3), client, max_kept=100)
    for _ in range(3):
        stream.next.release()
    assert (await ask(app)).body == b"x" * 180
    assert ((await ask(app)).kind, stream.effects) == ("gone", 1)


async def test_a_stream_whose_client_has_left_may_end_and_is_kept(client: holdfast.AsyncClient) -> None:
    app = guarded(stream := Stream([b"one ", b"two"]), client)
    first = Client()
    asked = asyncio.ensure_future(first.ask(app))
    stream.next.release()
    await pieces(first.reply, 2)
    first.leave()
    stream.next.release()
    await asked
    again = await ask(app)
    assert (again.body, again.replayed, stream.effects) == (b"one two", True, 1)


async def test_a_stream_without_end_hears_that_its_client_has_left(client: holdfast.AsyncClient) -> None:
    app = guarded(stream := Stream([b"one "], endless=True), client, linger=0.0)
    first = Client()
    asked = asyncio.ensure_future(first.ask(app))
    stream.next.release()
    await pieces(first.reply, 2)
    assert not stream.heard.is_set()
    first.leave()
    await asyncio.wait_for(asked, PATIENCE)
    assert stream.heard.is_set()
    refused = await ask(app)
    assert (refused.status, refused.kind, stream.effects) == (409, "interrupted", 1), "what it did is not known"


async def test_a_server_that_cancels_does_not_end_what_was_begun(client: holdfast.AsyncClient) -> None:
    app = guarded(shop := Shop(), client)
    shop.go_on.clear()
    asked = asyncio.ensure_future(ask(app))
    await shop.entered.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert (await ask(app)).kind == "running"
    shop.go_on.set()
    await status_of(client, "success")
    again = await ask(app)
    assert (again.body, again.replayed, len(shop.effects)) == (b"done", True, 1)


async def test_at_any_moment_a_server_may_cancel(client: holdfast.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it was, a retry finds one effect and its answer, or nothing that has begun; never what is in between.

    The loop stands still while the thread of the file is at work, so that the steps do not depend on how fast it is.
    """
    submit = AsyncSqliteSession._submit

    def submit_and_wait(session: AsyncSqliteSession, action: Callable[[], Any]) -> Any:
        answer, done = submit(session, action), threading.Event()
        session._jobs.put(done.set)
        assert done.wait(PATIENCE)
        return answer

    monkeypatch.setattr(AsyncSqliteSession, "_submit", submit_and_wait)
    app = guarded(shop := Shop(), client, wait=PATIENCE)
    for moment in range(1000):
        asked = asyncio.ensure_future(ask(app, key=f"m{moment}"))
        for _ in range(moment):
            await asyncio.sleep(0)
        ended = asked.done()
        asked.cancel()
        await asyncio.wait([asked])
        assert (await ask(app, key=f"m{moment}")).body == b"done"
        assert (await ask(app, key=f"m{moment}")).replayed
        assert len(shop.effects) == moment + 1
        if ended:
            break
    assert 10 < moment < 999, "at every step of the loop, until there is nothing left to cancel"


async def test_an_error_after_its_client_was_cancelled_is_told(
    client: holdfast.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await shop.go_on.wait()
        raise LookupError("in vain")

    shop = Shop()
    shop.go_on.clear()
    asked = asyncio.ensure_future(ask(guarded(app, client)))
    await status_of(client, "running")
    asked.cancel()
    await asyncio.wait([asked])
    shop.go_on.set()
    await status_of(client, "failure")

    async def is_told() -> bool:
        return "ended with an error" in caplog.text

    await eventually(is_told)
    assert "in vain" in caplog.text


async def test_a_client_that_leaves_in_the_middle_of_its_body_has_begun_nothing(client: holdfast.AsyncClient) -> None:
    shop, one = Shop(), Client([])
    one.leave()
    assert (await one.ask(guarded(shop, client))).messages == []
    assert (shop.effects, await client.operations.list()) == ([], [])


async def test_an_answer_that_cannot_be_sent_is_kept(client: holdfast.AsyncClient) -> None:
    async def send(message: Any) -> None:
        raise BrokenPipeError

    one, app = Client(), guarded(shop := Shop(), client)
    await app(one.scope, one.receive, send)
    assert ((await ask(app)).replayed, len(shop.effects)) == (True, 1)


async def test_what_comes_after_the_answer_is_not_waited_for(client: holdfast.AsyncClient) -> None:
    """As frameworks do with background tasks: they begin when the answer was sent."""
    shop, steps = Shop(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await shop(scope, receive, send)
        steps.append(len(first.reply.messages))
        assert (await receive())["type"] == "http.disconnect"
        await shop.go_on.wait()

    first, middleware = Client(), guarded(app, client)
    asked = asyncio.ensure_future(first.ask(middleware))
    await pieces(first.reply, 2)
    shop.go_on.clear()
    assert (await ask(middleware)).replayed
    assert (steps, asked.done()) == ([2], False)
    shop.go_on.set()
    await asked


async def test_others_hear_of_an_interrupted_request_when_nothing_of_it_goes_on(client: holdfast.AsyncClient) -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.extend(each.status for each in await client.operations.list())

    asked = asyncio.ensure_future(ask(middleware := guarded(app, client)))
    await status_of(client, "running")
    for work in middleware._working:
        work.cancel()
    await asyncio.wait([asked])
    assert seen == ["running"]
    await status_of(client, "partial")


async def test_what_is_too_large_to_be_kept_is_not_held_in_memory(client: holdfast.AsyncClient) -> None:
    piece, count = b"x" * (1 << 20), 32
    app = guarded(stream := Stream([piece] * count), client)
    one = Client()
    sizes: list[int] = []

    async def send(message: Any) -> None:
        sizes.append(len(message.get("body", b"")))

    for _ in range(count):
        stream.next.release()
    tracemalloc.start()
    try:
        await app(one.scope, one.receive, send)
        _, limit = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(sizes) == len(piece) * count
    assert limit < 8 * len(piece)


def test_what_the_end_of_its_loop_interrupts_stays_half_done(sqlite_url: str) -> None:
    calls: list[int] = []

    async def interrupted() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            calls.append(1)
            begun.set()
            await asyncio.Event().wait()

        begun, client = asyncio.Event(), holdfast.AsyncClient(sqlite_url)
        asked = asyncio.ensure_future(ask(guarded(app, client)))
        await begun.wait()
        asked.cancel()
        await asyncio.wait([asked])

    async def again() -> None:
        async with holdfast.AsyncClient(sqlite_url) as client:
            refused = await ask(guarded(shop := Shop(), client))
            assert (refused.status, refused.kind, shop.effects) == (409, "interrupted", [])

    asyncio.run(interrupted())
    asyncio.run(again())
    assert calls == [1]
