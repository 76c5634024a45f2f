"""Summaries are made once, whoever asks, and settings of agents are merged: with others at it at the same time."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.gateway.agents import records, summaries
from holdfast.gateway.agents.config_editor import merge
from holdfast.gateway.agents.lifecycle import Turn
from holdfast.gateway.context import Gateway
from holdfast.gateway.settings import OPTIONS
from tests.children import PATIENCE
from tests.gateway.local_replica import LocalReplica, open_local_replica

PATH = "/agents/1/commands/1/summary"


class Slow:
    """A summariser that waits until it may go on."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, turns: Sequence[Turn]) -> str:
        self.calls.append([turn.text for turn in turns])
        self.begun.set()
        assert self.go_on.wait(PATIENCE)
        return f"summary {len(self.calls)}"


@pytest.fixture
async def local(either: str, tmp_path: Path) -> AsyncIterator[LocalReplica]:
    url = either.replace("sqlite:", "SQLite:")  # as whoever sets it up may write it
    async with open_local_replica(url, tmp_path) as made:
        await made.send_hooks("user-prompt-submit", "stop", "user-prompt-submit")
        yield made


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow()
    monkeypatch.setattr(summaries, "load", lambda _: made)
    yield made
    made.go_on.set()


async def test_a_summary_is_made_once_and_nobody_waits_for_it(local: LocalReplica, slow: Slow) -> None:
    first = asyncio.create_task(local.http.post(PATH))
    assert await asyncio.to_thread(slow.begun.wait, PATIENCE)
    second = await local.http.post(PATH)
    assert (second.status_code, second.headers["retry-after"], second.json()["text"]) == (202, "1", None)
    name = f"gateway:summary:{records.key(1, 1)}"
    assert await local.other.lock(name).try_acquire() is None, "the first request has the lock"
    # The one writer of a SQLite file is free, however slow the summariser is.
    await local.other.objects.put_if("x", "x", 1, holdfast.MustCreate())
    slow.go_on.set()
    made = (await first).json()
    assert made["text"] == "summary 1"
    assert (await local.http.post(PATH)).json() == made, "the one that exists is returned"
    assert slow.calls == [["make it green", "It is green."]]


async def test_a_summary_that_fails_or_is_broken_off_is_left_to_the_next(
    local: LocalReplica, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Sequence[Turn]) -> str:
        raise ConnectionError("no answer, and a secret")

    with monkeypatch.context() as patch:
        patch.setattr(summaries, "load", lambda _: fails)
        failed = await local.http.post(PATH)
    assert (failed.status_code, "secret" in failed.text) == (502, False)
    broken = asyncio.create_task(local.http.post(PATH))
    assert await asyncio.to_thread(slow.begun.wait, PATIENCE)
    broken.cancel()
    assert (await broken).status_code == 503
    slow.go_on.set()
    assert (await local.http.post(PATH)).json()["text"] == "summary 2"
    assert (await local.http.post("/agents/1/commands/2/summary")).status_code == 409, "it is still running"
    assert (await local.http.post("/agents/1/commands/3/summary")).status_code == 404


async def test_a_summary_that_was_made_between_our_look_and_our_lock_is_returned(
    local: LocalReplica, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, read, looks = {"text": "theirs", "made_at": 1.0}, summaries._stored, count()

    async def look(gateway: Gateway, id: str) -> dict[str, Any] | None:
        stored = await read(gateway, id)
        if next(looks) == 0:
            await local.other.objects.put_if("@summary", records.key(1, 1), theirs, holdfast.MustCreate())
        return stored

    monkeypatch.setattr(summaries, "_stored", look)
    slow.go_on.set()
    assert (await local.http.post(PATH)).json() == theirs
    assert slow.calls == []


async def test_the_summariser_is_a_setting_and_the_default_is_local_and_always_the_same(local: LocalReplica) -> None:
    assert OPTIONS["summariser"](f"{__name__}:shout") == f"{__name__}:shout"
    assert await summaries._call(summaries.load(f"{__name__}:shout"), []) == "SHOUTED"
    for wrong in (f"{__name__}:nobody", "no.such.module:x", "json:__name__", ":"):
        with pytest.raises(ValueError, match="summariser"):
            OPTIONS["summariser"](wrong)
    made = (await local.http.post(PATH)).json()
    assert made["text"] == "make it green → It is green. (2 turns, 1 by the user)"
    assert summaries.extract([]) == "(no prompt) → (no answer) (0 turns, 0 by the user)"


async def shout(turns: Sequence[Turn]) -> str:
    return "shouted".upper()


async def test_the_second_writer_of_settings_reads_what_the_first_one_wrote(sqlite_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "config"
    folder.mkdir()
    file = folder / "hooks.json"
    async with open_local_replica(sqlite_url, tmp_path, agent_config=str(folder)) as local:
        assert (await local.http.get("/agents/config/hooks")).status_code == 404
        async with holdfast.file_lock(file) as first:
            second = asyncio.create_task(local.http.patch("/agents/config/hooks", json={"b": {"x": None, "y": 2}}))
            await asyncio.sleep(0)
            first.write_text(json.dumps({"a": 1, "b": {"x": 1, "z": 3}}))
        assert (await second).json() == {"a": 1, "b": {"z": 3, "y": 2}}
        changes = [local.http.patch("/agents/config/hooks", json={f"n{n}": n}) for n in range(20)]
        assert {(await each).status_code for each in asyncio.as_completed(changes)} == {200}
        expected = {"a": 1, "b": {"z": 3, "y": 2}, **{f"n{n}": n for n in range(20)}}
        assert json.loads(file.read_text()) == (await local.get("/agents/config/hooks")) == expected


async def test_settings_are_edited_in_their_folder_alone_and_never_made_worse(sqlite_url: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "config", tmp_path / "outside.json"
    folder.mkdir()
    outside.write_text("{}")
    (folder / "link.json").symlink_to(outside)
    (folder / "loop.json").symlink_to("loop.json")
    (folder / "folder.json").mkdir()
    (folder / "broken.json").write_text("{")
    (folder / "nan.json").write_text('{"a": NaN}')
    (folder / "list.json").write_text("[]")
    (folder / "bytes.json").write_bytes(b"\xff")
    async with open_local_replica(sqlite_url, tmp_path, agent_config=str(folder)) as local:
        for name in ("..%2foutside", "link", "loop", "a.b", ".hidden", "a" * 101, "%00"):
            for method in ("GET", "PATCH"):
                answer = await local.http.request(method, f"/agents/config/{name}", json={"a": 1})
                assert answer.status_code in (404, 422), name
        for method in ("GET", "PATCH"):
            assert (await local.http.request(method, "/agents/config/folder", json={"a": 1})).status_code == 409
        for name in ("broken", "list", "bytes", "nan"):
            before = (folder / f"{name}.json").read_bytes()
            assert (await local.http.get(f"/agents/config/{name}")).status_code == 409
            assert (await local.http.patch(f"/agents/config/{name}", json={"a": 1})).status_code == 409
            assert (folder / f"{name}.json").read_bytes() == before
        for body in ("[1]", "1", "{", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[" * 100_000):
            wrong = await local.http.patch("/agents/config/new", content=body)
            assert wrong.status_code in (400, 422), body[:20]
        big = await local.http.patch("/agents/config/new", json={"a": "x" * (1 << 20)})
        assert big.status_code == 413
        assert not (folder / "new.json").exists()
        assert outside.read_text() == "{}"
    async with open_local_replica(sqlite_url, tmp_path) as local:
        assert "agent_config" in (await local.http.get("/agents/config/hooks")).json()["detail"]


@pytest.mark.parametrize(
    ("before", "patch", "after"),
    [  # from RFC 7396, appendix A
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merging(before: dict[str, Any], patch: dict[str, Any], after: dict[str, Any]) -> None:
    assert merge(before, patch) == after
