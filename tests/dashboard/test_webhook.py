"""The webhook: a POST for each new problem and one when it is over, whatever its receiver does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import httpx
import pytest

import holdfast
from holdfast.dashboard import webhook
from holdfast.dashboard.app import Dashboard
from holdfast.dashboard.source import PageSource
from holdfast.dashboard.webhook import Webhook, WebhookTarget
from tests.children import until
from tests.dashboard.receiver import FAILURE, SECRET, Receiver, receiving

BY: dict[str, Any] = {"actor": "jane", "reason": "a test"}
LOST = "A lease was lost in the last 15 minutes"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "EVERY", 0.05)
    monkeypatch.setattr(webhook, "FIRST_PAUSE", 0.01)


@pytest.fixture
async def client(url: str) -> AsyncIterator[holdfast.AsyncClient]:
    async with holdfast.AsyncClient(url) as made:
        yield made


@asynccontextmanager
async def sending(client: holdfast.AsyncClient, receiver: Receiver) -> AsyncIterator[Webhook]:
    sender = Webhook(PageSource(client), WebhookTarget(receiver.url, SECRET))
    task = asyncio.create_task(sender.run())
    try:
        yield sender
    finally:
        task.cancel()
        await asyncio.wait([task])


async def lose(client: holdfast.AsyncClient, name: str) -> None:
    """A problem: a lease that was taken away."""
    await client.lease(name, ttl=600).acquire()
    await client.leases.force_release(name, **BY)


async def interrupt(client: holdfast.AsyncClient, key: str) -> None:
    """A problem that can be over: an operation whose process died."""

    async def work() -> None:
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        await client.operation(key).run(work)


async def repair(client: holdfast.AsyncClient, key: str) -> None:
    await client.operations.reset(key, **BY)


async def page(client: holdfast.AsyncClient) -> str:
    transport = httpx.ASGITransport(Dashboard(client))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        return (await http.get("/")).text


async def test_a_problem_is_sent_once_and_so_is_its_end(client: holdfast.AsyncClient) -> None:
    async with receiving() as receiver, sending(client, receiver):
        await interrupt(client, "load")
        await until(lambda: receiver.of("load"), "it is sent")
        await lose(client, "first")
        await until(lambda: receiver.of("first"), "the next one is sent")
        await repair(client, "load")
        await until(lambda: len(receiver.of("load")) > 1, "its end is sent")
        await lose(client, "second")
        await until(lambda: receiver.of("second"), "the last one is sent")
    assert receiver.of("load") == ["problem.begun", "problem.over"]
    ids = {message["id"] for message in receiver.messages if message["subject"] == "first"}
    assert (set(receiver.of("first")), len(ids)) == ({"problem.begun"}, 1), (
        "its sender may have ended before it wrote that"
    )
    assert receiver.of("second") == ["problem.begun"]
    begun, first, over, _ = receiver.messages
    assert begun["id"] == over["id"] != first["id"]
    assert (begun["kind"], begun["level"], begun["title"]) == (
        "interrupted-operations", "critical", "An operation was interrupted",
    )  # fmt: skip
    assert "in attempt 1" in begun["text"]
    assert first["title"] == LOST
    assert "forcibly released by jane: a test" in first["text"]
    assert set(receiver.paths) == {"POST /hooks/a-path-that-is-secret?x=1 HTTP/1.1"}


async def cut(writer: asyncio.StreamWriter) -> None:
    pass


async def test_a_failed_message_is_sent_again_logged_once_and_shown_on_the_page(
    client: holdfast.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast.dashboard")
    redirect = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/\r\n\r\n"
    async with receiving() as receiver, AsyncExitStack() as stack:
        shown = asyncio.Event()

        async def hold(writer: asyncio.StreamWriter) -> None:
            await shown.wait()
            writer.write(FAILURE)

        receiver.answers = [FAILURE, redirect, cut, b"220 smtp.example ready\r\n", b"x" * 100_000, hold]
        sender = await stack.enter_async_context(sending(client, receiver))
        await lose(client, "gone")
        await until(lambda: not receiver.answers, "the page is read while it fails")
        text = await page(client)
        assert "A webhook fails" in text
        assert "it answered 500" in text
        assert "127.0.0.1" in text
        assert "a-path-that-is-secret" not in text
        shown.set()
        await until(lambda: sender._failing is None, "it is delivered")
        await lose(client, "next")
        await until(lambda: receiver.of("next"), "the next one is sent")
        assert "A webhook fails" not in await page(client)
    assert receiver.of("gone") == ["problem.begun"] * 7
    assert len({message["id"] for message in receiver.messages[:7]}) == 1
    events = [record.event for record in caplog.records if hasattr(record, "event")]
    assert events == ["webhook.failed", "webhook.delivers"]
    assert "a-path-that-is-secret" not in caplog.text
    assert SECRET not in caplog.text


async def drip(writer: asyncio.StreamWriter) -> None:
    """A byte at a time, and never a whole line."""
    while True:
        writer.write(b"H")
        await writer.drain()
        await asyncio.sleep(0.01)


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("answer", [drip, hang])
async def test_a_receiver_that_does_not_answer_is_left_in_time(
    client: holdfast.AsyncClient, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "WITHIN", 0.2)
    async with receiving() as receiver, sending(client, receiver):
        receiver.answers = [answer, answer]
        await lose(client, "gone")
        await until(lambda: len(receiver.messages) == 3, "the third time it is answered")
        await lose(client, "next")
        await until(lambda: receiver.of("next"), "the next one is sent")
    assert receiver.of("gone") == ["problem.begun"] * 3


async def test_pages_are_answered_while_a_receiver_hangs(
    client: holdfast.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "WITHIN", 600.0)
    async with receiving() as receiver, sending(client, receiver):
        receiver.otherwise = hang
        await lose(client, "gone")
        await until(lambda: receiver.messages, "it hangs")
        assert "forcibly released by jane" in await page(client)
        await lose(client, "next")
        assert "next" in await page(client)
    assert receiver.of("next") == [], "it waits for the one before it"


async def test_a_message_is_given_up_after_some_tries_and_its_end_is_not_sent(
    client: holdfast.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "TRIES", 3)
    async with receiving() as receiver, sending(client, receiver):
        receiver.answers = [FAILURE, FAILURE, FAILURE]
        await interrupt(client, "load")
        await until(lambda: len(receiver.messages) == 3, "it is given up")
        await lose(client, "next")
        await until(lambda: receiver.of("next"), "the next one is sent")
        await repair(client, "load")
        await lose(client, "last")
        await until(lambda: receiver.of("last"), "the last one is sent")
    assert receiver.of("load") == ["problem.begun"] * 3


async def test_what_is_given_up_is_counted_on_the_page_and_the_number_of_open_problems_is_bounded(
    client: holdfast.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "TRIES", 1)
    monkeypatch.setattr(webhook, "MAX_OPEN", 2)
    async with receiving() as receiver, sending(client, receiver) as sender:
        receiver.otherwise = FAILURE
        for key in ("a", "b", "c"):
            await interrupt(client, key)
        await until(lambda: len(sender._open) == 2, "two are known")
        assert "messages that were given up: 2" in await page(client)
        receiver.otherwise = b"HTTP/1.1 200 OK\r\n\r\n"
        unknown = next(key for key in "abc" if not receiver.of(key))
        known = next(key for key in "abc" if key != unknown)
        await repair(client, known)
        await until(lambda: receiver.of(unknown), "there is room for the third")


async def test_of_two_processes_one_sends_and_the_other_continues_with_its_record(
    client: holdfast.AsyncClient, url: str
) -> None:
    async with receiving() as receiver, holdfast.AsyncClient(url) as second, AsyncExitStack() as stack:
        async with sending(client, receiver):
            await interrupt(client, "load")
            await until(lambda: receiver.of("load"), "it is sent")
            await stack.enter_async_context(sending(second, receiver))
            await lose(client, "first")
            await until(lambda: receiver.of("first"), "so is the next")
        await repair(client, "load")
        await until(lambda: len(receiver.of("load")) == 2, "its end is sent by the other one")
        await lose(client, "second")
        await until(lambda: receiver.of("second"), "the last one is sent")
    assert receiver.of("load") == ["problem.begun", "problem.over"]
    ids = {message["id"] for message in receiver.messages if message["subject"] == "first"}
    assert (set(receiver.of("first")), len(ids)) == ({"problem.begun"}, 1), (
        "its sender may have ended before it wrote that"
    )
    assert receiver.of("second") == ["problem.begun"]


async def test_what_was_acknowledged_before_is_not_sent(client: holdfast.AsyncClient, url: str) -> None:
    from holdfast import commands
    from holdfast.dashboard.problems import find_problems
    from holdfast.dashboard.snapshot import take_snapshot

    await lose(client, "known")
    [problem] = find_problems(await take_snapshot(PageSource(client), None))
    parameters = {"problem": problem.title, "fingerprints": ",".join(problem.fingerprints)}
    with holdfast.Client(url) as sync:
        await asyncio.to_thread(commands.run, sync, "problem.acknowledge", parameters, **BY)
    async with receiving() as receiver, sending(client, receiver):
        await lose(client, "new")
        await until(lambda: receiver.of("new"), "the new one is sent")
    assert {message["subject"] for message in receiver.messages} == {"new"}


@pytest.mark.parametrize(
    ("url", "secret", "message"),
    [
        ("ftp://hooks.example/", SECRET, "must be a URL"), ("http://", SECRET, "must be a URL"),
        ("https://jane:pw@hooks.example/", SECRET, "without a user"), ("https://hooks.example/\r\nx: y", SECRET, "URL"),
        ("https://hooks.example:99999/", SECRET, "must be a URL"), ("https://[x/", SECRET, "must be a URL"),
        (f"https://hooks.example/{'x' * 2000}", SECRET, "must be a URL"), ("https://hooks.example/", "", "a secret of"),
        ("https://hooks.example/", "x" * 15, "at least 16 characters"),
    ],
)  # fmt: skip
def test_a_wrong_target_is_refused_and_not_repeated(url: str, secret: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        WebhookTarget(url, secret)
    for word in (url, secret):
        assert not word or word not in str(refusal.value)
    assert SECRET not in repr(WebhookTarget("https://hooks.example/", SECRET))
