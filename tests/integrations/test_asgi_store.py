"""The store behind the middleware: shared by replicas, down, lost in the middle; and what dead attempts left in it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.integrations.asgi import Answer
from holdfast.testing import Postgres
from tests.children import PATIENCE, query
from tests.conftest import migrated
from tests.integrations.asgi_client import Shop, ask, guarded

BY = {"actor": "ann", "reason": "the bank says that it never arrived"}


@pytest.mark.parametrize(("either", "wait"), [("sqlite", PATIENCE), ("postgres", 0.0)], indirect=["either"])
async def test_of_fifty_at_once_on_two_replicas_one_has_an_effect(either: str, wait: float) -> None:
    async with holdfast.AsyncClient(either) as one, holdfast.AsyncClient(either) as two:
        shop = Shop()
        apps = [guarded(shop, one, wait=wait), guarded(shop, two, wait=wait)]
        shop.go_on.clear()
        asked = [asyncio.ensure_future(ask(apps[number % 2])) for number in range(50)]
        await shop.entered.wait()
        if not wait:
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        shop.go_on.set()
        replies = await asyncio.gather(*asked)
        counts = Counter((each.status, each.replayed) for each in replies)
        assert (len(shop.effects), counts[201, False]) == (1, 1)
        assert counts.keys() <= {(201, False), (201, True), (409, False)}
        assert {each.kind for each in replies if each.status == 409} <= {"running"}
        assert counts[409, False] == 0 if wait else counts[409, False] > 0
        assert {(await ask(app)).body for app in apps} == {b"done"}


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """One to be stopped."""
    with Postgres.create() as server:
        yield server


async def test_while_the_store_is_down_nothing_is_done(server: Postgres) -> None:
    async with holdfast.AsyncClient(migrated(server.database())) as client:
        app = guarded(shop := Shop(), client)
        assert (await ask(app, key="before")).status == 201
        server.stop("immediate")
        for key in ("before", "new"):
            refused = await asyncio.wait_for(ask(app, key=key), PATIENCE)
            assert (refused.status, refused.kind, refused.headers["retry-after"]) == (503, "unavailable", "1")
        assert len(shop.effects) == 1
        assert (await ask(app, key=None)).status == 201, "who sends no key needs no store"
        server.start()
        assert (await ask(app, key="before")).replayed
        assert (await ask(app, key="new")).status == 201
        assert len(shop.effects) == 3


async def test_a_store_that_cannot_be_used_is_down(tmp_path: Path, postgres_url: str) -> None:
    shop = Shop()
    (tmp_path / "file").write_text("")
    for url in (f"sqlite:///{tmp_path}/file/app.db", f"{postgres_url}_missing"):
        async with holdfast.AsyncClient(url) as client:
            assert (await ask(guarded(shop, client))).kind == "unavailable"
    async with holdfast.AsyncClient(postgres_url, schema="never_made") as client:
        assert (await ask(guarded(shop, client))).kind == "unavailable"
    assert shop.effects == []


async def test_a_store_that_is_lost_in_the_middle_takes_no_answer_away(
    server: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    """The effect is there, so its answer is given; but that it is there was not recorded, and is not guessed later."""
    url = migrated(server.database())
    async with holdfast.AsyncClient(url) as client:
        app = guarded(shop := Shop(), client, ttl=600.0)
        shop.go_on.clear()
        asked = asyncio.ensure_future(ask(app))
        await shop.entered.wait()
        server.stop("immediate")
        shop.go_on.set()
        assert ((await asked).status, (await asked).body) == (201, b"done")
        assert "could not be recorded" in caplog.text
        server.start()
        async with asyncio.timeout(PATIENCE):
            while (refused := await ask(app)).kind != "interrupted":
                assert refused.kind in ("running", "unavailable")
                await asyncio.to_thread(query, url, "update holdfast.beat set expires_at = started")
                await asyncio.sleep(0.05)
        assert len(shop.effects) == 1


async def leave_half_done(client: holdfast.AsyncClient) -> None:
    async def dies(scope: Any, receive: Any, send: Any) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await ask(guarded(dies, client))
    [record] = await client.operations.list()
    assert record.status == "partial"


async def test_what_was_left_half_done_waits_for_somebody(sqlite_url: str) -> None:
    async with holdfast.AsyncClient(sqlite_url) as client:
        await leave_half_done(client)
        app = guarded(shop := Shop(), client)
        refused = await ask(app)
        assert (refused.status, refused.kind, "retry-after" in refused.headers) == (409, "interrupted", False)
        [review] = await client.reviews.list()
        assert review.key in refused.body.decode(), "whom the client asks finds it by that"
        await client.reviews.reject(review.id, **BY)
        assert ((await ask(app)).kind, shop.effects) == ("denied", [])
        await client.operations.reset(review.key, **BY)
        assert [(await ask(app)).replayed for _ in range(2)] == [False, True]


async def test_what_was_left_half_done_is_tried_again_when_that_is_declared(sqlite_url: str) -> None:
    async with holdfast.AsyncClient(sqlite_url) as client:
        await leave_half_done(client)
        app = guarded(shop := Shop(), client, on_partial="retry")
        assert [(await ask(app)).replayed for _ in range(2)] == [False, True]
        assert len(shop.effects) == 1


async def test_what_was_left_half_done_is_what_the_application_finds_out(sqlite_url: str) -> None:
    async with holdfast.AsyncClient(sqlite_url) as client:
        await leave_half_done(client)
        shop, decisions = (
            Shop(),
            list[Any]([False, None, LookupError("no"), Answer(200, [("Location", "/7")], b"found")]),
        )

        async def find(scope: Any, body: bytes) -> Any:
            assert (scope["path"], body) == ("/charges", b"{}")
            decision = decisions.pop(0)
            if isinstance(decision, Exception):
                raise decision
            return decision

        app = guarded(shop, client, on_partial=find)
        assert [(await ask(app)).kind for _ in range(2)] == ["interrupted", "interrupted"]
        with pytest.raises(LookupError):
            await ask(app)
        for _ in range(2):
            reply = await ask(app)
            assert (reply.status, reply.body, reply.replayed) == (200, b"found", True)
            assert reply.headers["location"] == "/7"
        assert (decisions, shop.effects) == ([], [])


async def test_what_was_left_half_done_may_be_found_not_to_be_done(sqlite_url: str) -> None:
    async with holdfast.AsyncClient(sqlite_url) as client:
        await leave_half_done(client)
        app = guarded(shop := Shop(), client, on_partial=lambda scope, body: True)
        assert [(await ask(app)).replayed for _ in range(2)] == [False, True]
        assert len(shop.effects) == 1
