"""What operators see over HTTP, and what they may do: all of it, nothing secret, and every run on the record."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from click.testing import CliRunner

import holdfast
from holdfast.cli.app import app
from holdfast.commands import execute
from holdfast.gateway import record_page, server
from holdfast.gateway.app import create_app
from holdfast.gateway.operators import queries
from holdfast.gateway.operators.commands import MAX_RUNNING, CommandRunner
from holdfast.gateway.settings import Settings
from holdfast.gateway.tokens import Token
from holdfast.problem_json import Problem
from tests.children import PATIENCE
from tests.conftest import for_one_test
from tests.gateway.example_data import HOSTILE, filled_database

WHY = {"actor": "jane", "reason": "its machine is gone"}


@pytest.fixture
def url() -> str:
    return for_one_test()


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(Settings(url, driver="unix:/nowhere/driver.sock"))
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost/api") as asking,
    ):
        yield asking


async def told(http: httpx.AsyncClient, path: str, **parameters: Any) -> Any:
    answer = await http.get(path, params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def run(http: httpx.AsyncClient, name: str, status: int = 200, **order: Any) -> Any:
    answer = await http.post(f"/commands/{name}", json=WHY | order)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_all_that_there_is_can_be_read_and_nothing_secret(url: str, http: httpx.AsyncClient) -> None:
    with filled_database(url, mark=HOSTILE) as client, client.lease("proven") as grant:
        client.gates.open("dot_config", seconds=60, actor="jane", reason=HOSTILE)
        client.leases.force_release("invoices" + HOSTILE, actor="jane", reason=HOSTILE)
        leases = await told(http, "/leases")
        assert {"proven", "nightly-import" + HOSTILE} <= {each["name"] for each in leases["leases"]}
        [proven] = [each for each in leases["leases"] if each["name"] == "proven"]
        assert (proven["fence"], proven["holder"], proven["info"]["ttl"]) == (grant.fence, grant.holder, 30)
        assert 0 < proven["remaining"] <= 30
        [ended] = (await told(http, "/history", name="invoices" + HOSTILE))["history"]
        assert (ended["outcome"], ended["actor"], ended["reason"]) == ("forced", "jane", HOSTILE)
        locks = (await told(http, "/locks"))["locks"]
        [holder] = [each for each in locks if each["name"] == "report" + HOSTILE and each["granted"]]
        [waiter] = [each for each in locks if not each["granted"]]
        assert (waiter["label"], waiter["blocked_by"]) == ("report" + HOSTILE, [holder["pid"]])
        by_status = {
            status: [each["label"] for each in (await told(http, "/operations", status=status))["operations"]]
            for status in ("success", "failure", "partial", "undone", "running")
        }
        assert by_status == {
            "success": ["load rivers" + HOSTILE, "load parcels" + HOSTILE],
            "failure": ["publish tiles" + HOSTILE],
            "partial": ["publish map" + HOSTILE],
            "undone": [],
            "running": [],
        }
        assert (await told(http, "/operations", dataset="nothing"))["operations"] == []
        one = await told(http, f"/operations/{(await told(http, '/operations'))['operations'][-1]['key']}")
        assert (one["label"], one["status"]) == ("load parcels" + HOSTILE, "success")
        assert [each["number"] for each in one["wal"]] == list(range(1, len(one["wal"]) + 1))
        assert {"claimed", "success"} <= {each["kind"] for each in one["wal"]}
        [relay] = (await told(http, "/outbox"))["relays"]
        assert (relay["name"], relay["parked"]) == ("catalogue" + HOSTILE, len(relay["refused"]))
        assert relay["lag"] > 0
        [review] = (await told(http, "/reviews"))["reviews"]
        assert (review["label"], review["status"]) == ("publish tiles" + HOSTILE, "open")
        assert (await told(http, "/reviews", status="approved"))["reviews"] == []
        [gate] = (await told(http, "/gates"))["gates"]
        assert (gate["name"], gate["holder"], gate["timed"], gate["reason"]) == ("dot_config", "jane", True, HOSTILE)
        assert (await told(http, "/audit"))["audit"][0]["action"] == "lease_force_release"
        paths = ["leases", "history", "locks", "operations", "wal", "outbox", "reviews", "gates", "audit", "commands"]
        everything = "".join([(await http.get(f"/{path}")).text for path in paths])
        for secret in (grant.token, "tell-nobody", '"token":', '"payload":'):
            assert secret not in everything


async def test_listings_end_by_their_bytes_and_say_whether_there_is_more(
    url: str, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.Client(url) as client:
        for number in range(3):
            client.operation(f"key-{number}").run(lambda: None)
            leave_for_review(client, f"failed-{number}")
            client.audit.end(client.audit.begin("a.one", "it", **WHY), "done")

    async def lengths(**parameters: Any) -> dict[str, tuple[int, bool]]:
        answers = {name: await told(http, f"/{name}", **parameters) for name in ("operations", "reviews", "audit")}
        return {name: (len(answer[name]), answer["more"]) for name, answer in answers.items()}

    assert await lengths() == {"operations": (6, False), "reviews": (3, False), "audit": (3, False)}
    assert await lengths(limit=2) == {"operations": (2, True), "reviews": (2, True), "audit": (2, True)}
    whole = (await told(http, "/wal"))["wal"]
    monkeypatch.setattr(record_page, "PAGE_BYTES", 1)
    monkeypatch.setattr(queries, "PAGE_BYTES", 1)
    assert await lengths() == {"operations": (1, True), "reviews": (1, True), "audit": (1, True)}
    assert (await told(http, "/operations", status="partial")) == {"operations": [], "more": False}
    entries: list[Any] = []
    after: dict[str, str] = {}
    while (page := await told(http, "/wal", **after))["wal"]:
        assert len({each["operation"] for each in page["wal"]}) == 1
        entries += page["wal"]
        after = {"after": page["next"]}
    assert entries == whole


def leave_for_review(client: holdfast.Client, key: str) -> None:
    with pytest.raises(ZeroDivisionError):
        client.operation(key).run(lambda: 1 / 0)
    with pytest.raises(holdfast.OperationFailed):
        client.operation(key, retry=holdfast.Retry(attempts=1)).run(lambda: 1 / 0)


ANSWERED = {
    "LeaseRecord": "acquired_at expires_at fence holder host info kind name pid remaining waiting",
    "HistoryRecord": "acquired_at actor ended_at fence holder host name outcome pid reason role",
    "LockAnswer": (
        "application_name blocked_by duration entity_id granted held_since holder label mode name namespace pid "
        "query_start role state waiting"
    ),
    "OperationAnswer": (
        "attempt created_at dataset effect_started error expires_at failures fence key label operation pipeline "
        "result_hash rollback status task updated_at"
    ),
    "LogEntryAnswer": "at attempt detail fence hash kind number operation payload_hash previous",
    "ParkedAnswer": "again id key label parked_at problem tries type",
    "RelayAnswer": "entries holder lag moved_at name parked problem refused since told",
    "ScheduleAnswer": "every last name next_slot overdue paused running zone",
    "ScheduleRunAnswer": ("attempt count ended_at lateness note owner reason slot started_at status until"),
    "ReviewRecord": "actor answer asked_by closed_at dataset detail id key label opened_at operation reason spent_at "
    "status",
    "GateAnswer": "acquired_at expires_at fence holder name reason remaining timed",
    "AuditRecord": "action actor at detail ended_at fence id outcome reason role subject",
}


def test_a_field_that_a_record_gains_is_not_answered_before_it_is_listed_here(tmp_path: Path) -> None:
    app = create_app(Settings(f"sqlite:///{tmp_path / 'app.db'}", driver="unix:/nowhere/driver.sock"))
    schemas = app.openapi()["components"]["schemas"]
    assert {name: " ".join(sorted(schemas[name]["properties"])) for name in ANSWERED} == ANSWERED


async def test_pages_follow_each_other_without_a_gap(url: str, http: httpx.AsyncClient) -> None:
    with holdfast.Client(url) as client:
        for number in range(5):
            client.lease(f"l{number}").acquire()
            client.operation(f"o{number}").run(lambda: None)
        names: list[str] = []
        page = await told(http, "/leases", limit=2)
        names += [each["name"] for each in page["leases"]]
        while page["next"]:
            page = await told(http, "/leases", limit=2, after=page["next"])
            names += [each["name"] for each in page["leases"]]
        assert [each for each in names if each.startswith("l")] == [f"l{number}" for number in range(5)]
        assert page["count"] >= 5, "the gateway has one, too, once it leads"
        seen: list[str] = []
        after: dict[str, str] = {}
        while (page := await told(http, "/wal", limit=2, **after))["wal"]:
            seen += [each["hash"] for each in page["wal"]]
            after = {"after": page["next"]}
        assert len(seen) == len(set(seen))
        assert {"claimed", "success"} <= {each["kind"] for each in (await told(http, "/wal"))["wal"]}
        assert seen == [each["hash"] for each in (await told(http, "/wal", limit=1000))["wal"]]


WRONG = [
    ("/operations/nobody-ran-it", 404), ("/operations/a%2Fb", 404), ("/operations/", 422),
    ("/operations?status=odd", 422), ("/operations?dataset=%00", 422), ("/leases?limit=0", 422),
    ("/leases?limit=1001", 422), ("/history?name=" + "x" * 201, 422), ("/wal?after=odd", 422),
    ("/wal?after=999999999999999999/1/1", 410), ("/reviews?status=odd", 422), ("/audit?limit=x", 422),
]  # fmt: skip


async def test_what_makes_no_sense_is_a_problem(http: httpx.AsyncClient) -> None:
    for path, status in WRONG:
        answer = await http.get(path)
        assert (path, answer.status_code, answer.headers["content-type"]) == (path, status, "application/problem+json")
        assert answer.json()["requestId"]


async def test_a_command_is_rehearsed_then_run_and_on_the_record(url: str, http: httpx.AsyncClient) -> None:
    with holdfast.Client(url) as client:
        client.lease("nightly-import", holder="worker-1").acquire()
        before = client.audit.list()
        dry = await run(http, "lease.release", parameters={"name": "nightly-import"}, dry_run=True)
        assert dry["changes"] == [f"lease 'nightly-import', held by worker-1 with fence {_fence(client)}, is released"]
        assert (dry["entry"], dry["fence"], dry["dry_run"]) == (None, None, True)
        assert client.audit.list() == before
        assert client.leases.get("nightly-import") is not None
        done = await run(http, "lease.release", parameters={"name": "nightly-import"})
        assert (done["changes"], done["actor"], done["doubt"]) == (dry["changes"], "jane", None)
        assert client.leases.get("nightly-import") is None
        [entry] = [each for each in client.audit.list() if each.id == done["entry"]]
        assert (entry.action, entry.subject, entry.outcome) == ("lease.release", "nightly-import", "done")
        assert (entry.actor, entry.reason, entry.fence) == (*WHY.values(), done["fence"])
        refused = await run(http, "lease.release", 409, parameters={"name": "nightly-import"})
        assert refused["detail"] == "lease 'nightly-import' is not held"
        assert client.audit.list()[0].outcome is not None
        assert next(each for each in client.audit.list() if each.action == "lease.release").outcome == (
            "refused: lease 'nightly-import' is not held"
        )


def _fence(client: holdfast.Client) -> int:
    record = client.leases.get("nightly-import")
    assert record is not None
    return record.fence


async def test_commands_say_what_they_need_and_which_are_not_for_http(http: httpx.AsyncClient) -> None:
    found = {each["name"]: each for each in (await told(http, "/commands"))["commands"]}
    assert found["slot.release"]["destructive"]
    assert [each["name"] for each in found["slot.release"]["parameters"]] == ["pool", "slot"]
    elsewhere = {name for name, each in found.items() if each["elsewhere"]}
    assert elsewhere == {"lease.wipe", "schema.migrate", "schema.revert", "wal.archive"}
    for name in elsewhere:
        assert "holdfast do" in (await run(http, name, 403))["detail"]


ORDERS: list[tuple[str, dict[str, Any], int, str]] = [
    ("lease.relase", {}, 404, "there is no command 'lease.relase'"),
    ("lease.release", {}, 422, "needs 'name'"),
    ("lease.release", {"parameters": {"nam": "x"}}, 422, "has no parameter 'nam'"),
    ("lease.release", {"parameters": {"name": ""}}, 422, "1 to 200 characters"),
    ("lease.release", {"parameters": {"name": "x"}, "break_glass": True}, 422, "break_glass"),
    ("lease.release", {"parameters": {"name": "holdfast:runtime"}}, 409, "break-glass"),
    ("lock.end", {"parameters": {"pid": True}}, 422, "pid"),
    ("lock.end", {"parameters": {"pid": 2**31}}, 422, "pid must be an integer"),
    ("review.approve", {"parameters": {"number": 10**30}}, 422, "number must be an integer"),
    ("review.approve", {"parameters": {"number": 7}}, 409, "there is no review 7"),
    ("wal.verify", {"actor": None}, 422, "actor must be given"),
    ("wal.verify", {"reason": " "}, 422, "reason must not be empty"),
    ("wal.verify", {"reason": "a\x00b"}, 422, "reason"),
    ("leader.resign", {"parameters": {"name": "x", "wait": 1e999}}, 422, "wait must be a number"),
]


async def test_a_wrong_order_is_told_what_is_wrong_and_changes_nothing(http: httpx.AsyncClient) -> None:
    for name, order, status, why in ORDERS:
        body = json.dumps(WHY | order)  # which writes Infinity, as httpx does not
        before = (await told(http, "/audit"))["audit"]
        answer = await http.post(f"/commands/{name}", content=body, headers={"content-type": "application/json"})
        assert (name, order, answer.status_code) == (name, order, status)
        assert why in answer.json()["detail"]
        if status in (404, 422):
            assert (await told(http, "/audit"))["audit"] == before


async def test_one_command_at_a_time_and_who_waits_in_vain_is_told(
    url: str, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.Client(url) as client, client.gates.runtime(), monkeypatch.context() as patched:
        patched.setattr(execute, "_RUNTIME_TIMEOUT", 0.1)
        busy = await run(http, "wal.verify", 409)
    assert "another command is under way" in busy["detail"]
    gate = {"name": "dot_config", "seconds": 60}
    await run(http, "gate.open", parameters=gate)
    taken = await run(http, "gate.open", 409, parameters=gate)
    assert taken["detail"].startswith("gate 'dot_config' is already open: it is held by")


async def test_what_has_no_end_yet_is_told_as_that(url: str, http: httpx.AsyncClient) -> None:
    """A leader that does not stop: the command has asked, and does not know."""
    leading, over = threading.Event(), threading.Event()
    with holdfast.Client(url) as client:
        elector = client.elector("stubborn")

        def lead(term: object) -> None:
            leading.set()
            over.wait()

        thread = threading.Thread(target=elector.run, args=(lead,))
        thread.start()
        try:
            assert await asyncio.to_thread(leading.wait, PATIENCE)
            told = await run(http, "leader.resign", 500, parameters={"name": "stubborn", "wait": 0})
            [entry] = [each for each in client.audit.list() if each.id == told["entry"]]
        finally:
            elector.stop()
            over.set()
            thread.join()
    assert told["title"] == "Unsettled"
    assert (entry.action, entry.outcome) == ("leader.resign", told["outcome"])
    assert told["outcome"].startswith("unknown: ")


async def test_with_tokens_the_actor_is_whose_token_it_is(url: str) -> None:
    tokens = (Token("oncall", "operate", "s" * 20), Token("viewer", "read", "v" * 20))
    app = create_app(Settings(url, driver="unix:/nowhere/driver.sock", tokens=tokens))
    order = {"actor": "somebody else", "reason": "looking", "dry_run": True}
    transport = httpx.ASGITransport(app=app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as asking:
        for token, status in zip(tokens, (200, 403), strict=True):
            headers = {"authorization": f"Bearer {token.secret}"}
            path = "http://localhost/api/commands/wal.verify"
            answer = await asking.post(path, json=order, headers=headers)
            assert answer.status_code == status, answer.text
            if status == 200:
                assert answer.json()["actor"] == "oncall"


async def test_what_holdfast_toml_declares_of_datasets_holds_for_operators_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `holdfast serve` sets it up; only that it would then serve is left out."""
    (tmp_path / "holdfast.toml").write_text('[datasets.graves]\nmay_reset = ["elder*"]\n')
    monkeypatch.chdir(tmp_path)
    seen: list[Settings] = []
    monkeypatch.setattr(server, "run", lambda settings, ready: seen.append(settings))
    url = f"sqlite:///{tmp_path / 'app.db'}"
    CliRunner().invoke(app, ["--url", url, "serve", "--driver", "unix:/nowhere/driver.sock"], catch_exceptions=False)
    graves = holdfast.OperationKey(pipeline="etl", task="load", dataset="graves", operation="upsert")
    with holdfast.Client(url) as client:
        client.operation(graves).run(int)
    served = create_app(*seen)
    transport = httpx.ASGITransport(app=served)
    async with (
        served.router.lifespan_context(served),
        httpx.AsyncClient(transport=transport, base_url="http://localhost/api") as http,
    ):
        order: dict[str, Any] = {"parameters": {"key": graves.digest}}
        refused = await run(http, "operation.reset", 403, **order)
        assert "may be reset, rolled back, completed and reviewed by elder*, not by 'jane'" in refused["detail"]
        await run(http, "operation.reset", actor="elder Mary", **order)


async def test_only_a_few_are_under_way_at_once_and_the_end_waits_for_them(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that could not be begun takes up no place."""
    app = create_app(Settings(url, driver="unix:/nowhere/driver.sock"))
    over = threading.Event()
    async with app.router.lifespan_context(app):
        runner: CommandRunner = app.state.gateway.commands
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
            for _ in range(MAX_RUNNING):
                with pytest.raises(Problem, match="can't start new thread"):
                    await runner.run(lambda client: client)
        works = [
            asyncio.ensure_future(runner.run(lambda client: over.wait(PATIENCE) and client)) for _ in range(MAX_RUNNING)
        ]
        await asyncio.sleep(0)
        with pytest.raises(Problem) as refused:
            await runner.run(lambda client: client)
        assert refused.value.status == 503
        app.state.gateway.stopping.set()
        asyncio.get_running_loop().call_later(0.1, over.set)
    clients = {id(work.result()) for work in works}
    assert len(clients) == 1, "all on one client"
    with pytest.raises(Problem, match="this replica is stopping"):
        await runner.run(lambda client: client)
