"""OpenLineage: real documents, by the client's own classes and by the schemas that we ship."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.serde import Serde
from openlineage.client.transport.console import ConsoleConfig, ConsoleTransport

import holdfast
from holdfast.lineage import Contract, Lineage, openlineage
from holdfast.lineage.openlineage import OpenLineage
from holdfast.testing.operation_contract import leave_half_done
from tests.children import PATIENCE
from tests.cli.command import at, call, printed, valid

SCHEMA = json.loads(openlineage.SCHEMA_FILE.read_text(encoding="utf-8"))


@pytest.fixture
def events(sqlite_url: str) -> list[holdfast.lineage.Event]:
    key = holdfast.OperationKey(
        pipeline="etl", task="load", dataset="parcels", operation="upsert", checksum="abc", params={"a": 1}
    )

    def load(op: Any) -> int:
        op.emit("loaded", {"rows": 7, "none": None})
        return 7

    def fail() -> None:
        raise ValueError("broken")

    with holdfast.Client(sqlite_url, energy=holdfast.lineage.Energy(watts=12, grams_per_kwh=380)) as client:
        client.operations.register("undo", rollback=lambda: None)
        contract = Contract("parcels", "2.1", lambda: True)
        client.operation(
            key, rollback="undo", actor="jane", justification="asked",
            lineage=Lineage(inputs=["raw"], contract=contract), options=holdfast.OperationOptions(sovereign=True),
        ).run(load)  # fmt: skip
        client.operations.rollback(key, actor="jane", reason="wrong")
        with pytest.raises(ValueError, match="broken"):
            client.operation("plain").run(fail)
        return list(client.relays.events())


def rebuilt(document: dict[str, Any]) -> RunEvent:
    """As the client's own classes understand it; their validators raise."""
    assert document["schemaURL"].startswith("https://openlineage.io/spec/")
    facets: Any = document["run"]["facets"]
    return RunEvent(
        eventTime=document["eventTime"], producer=document["producer"], eventType=RunState[document["eventType"]],
        run=Run(document["run"]["runId"], facets), job=Job(document["job"]["namespace"], document["job"]["name"]),
        inputs=[InputDataset(each["namespace"], each["name"]) for each in document["inputs"]],
        outputs=[OutputDataset(each["namespace"], each["name"]) for each in document["outputs"]],
    )  # fmt: skip


def test_the_log_leads_to_the_run_and_the_run_to_the_log(either: str, tmp_path: Path) -> None:
    file = tmp_path / "ol.jsonl"
    with holdfast.Client(either) as client:
        client.operations.register("undo", rollback=lambda: None)
        leave_half_done(either, "load", rollback=lambda: None)
        client.operation("load", rollback="undo").run(int)  # the second attempt rolls the first one back
        client.operation("other").run(int)
        pointer = client.operations.find("load").pointer
        assert client.operations.find(pointer).run == client.operations.history("load")[-1].run
        client.operations.rollback("load", actor="jane", reason="wrong")
        client.relay("marquez", OpenLineage(file)).step()
        documents = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        logs = {record.key: client.operations.history(record.key) for record in client.operations.list()}
        for each in documents:
            facet, run = each["run"]["facets"]["holdfast_idempotency"], each["run"]["runId"]
            record = client.operations.find_run(run)
            assert record == client.operations.get(facet["key"])
            assert logs[record.key][facet["number"] - 1].run == run
        runs = list(dict.fromkeys(each["run"]["runId"] for each in documents))
        assert len(runs) == 3
        assert {entry.run for log in logs.values() for entry in log} == {*runs}
        assert client.operations.find("load").run == runs[1], "that of the last attempt, which was rolled back"
        shown = [valid("ops-show", printed(*at(either, "ops", "show", "--run", run, "--json"))) for run in runs]
        assert [(each["label"], each["run"]) for each in shown] == [("load", runs[1])] * 2 + [("other", runs[2])]
        assert sum(len(each["entries"]) for each in shown) == sum(map(len, logs.values()))
        for run, each in zip(runs, shown, strict=True):
            assert {entry["run"] for entry in each["entries"]} == {run}
        client.operations.archive(datetime.now(UTC) + timedelta(hours=1), list)
        assert client.operations.find_run(runs[0]).label == "load"
        unknown = runs[0][:-12] + runs[2][-12:]
        with pytest.raises(LookupError, match=f"no operation has the run {unknown}"):
            client.operations.find_run(unknown)
        with pytest.raises(ValueError, match="run must be a UUID in lower case"):
            client.operations.find_run("load")
    for wrong, code in (
        (("--run", unknown), 1), (("--run", "load"), 2), (("load", "--run", runs[0]), 2), ((), 2),
    ):  # fmt: skip
        assert call(*at(either, "ops", "show", *wrong)).returncode == code, wrong


def test_documents_are_what_the_client_and_our_schemas_say(
    events: list[holdfast.lineage.Event], tmp_path: Path
) -> None:
    file = tmp_path / "ol.jsonl"
    sink = OpenLineage(file, namespace="shop")
    sink.publish(events[:2])
    with file.open("a", encoding="utf-8") as torn:
        torn.write('{"eventTi')  # as a crash leaves it
    sink.publish(events[2:])
    documents = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [each["eventType"] for each in documents] == ["START", "OTHER", "COMPLETE", "OTHER", "START", "FAIL"]
    assert len({each["run"]["runId"] for each in documents}) == 2
    shape = jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for each in documents:
        assert Serde.to_dict(rebuilt(each)) == each
        shape.validate(each)
        for name in each:
            assert not shape.is_valid({key: value for key, value in each.items() if key != name}), name
        assert not shape.is_valid({**each, "more": 1})
        assert not shape.is_valid({**each, "run": {**each["run"], "runId": "1"}})
        assert not shape.is_valid({**each, "eventTime": "yesterday"})
        assert not shape.is_valid({**each, "inputs": [{"name": "raw"}]})
        assert shape.is_valid({**each, "outputs": [{"namespace": "shop", "name": "x"}]}) is (
            each["eventType"] in ("COMPLETE", "OTHER")
        )
        for name, facet in each["run"]["facets"].items():
            if name.startswith("holdfast_"):
                where = facet["_schemaURL"].removeprefix(f"{SCHEMA['$id']}#")
                rules = {**SCHEMA, "$ref": f"#{where}"}
                jsonschema.Draft202012Validator(
                    rules, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
                ).validate(facet)
                assert not jsonschema.Draft202012Validator(rules).is_valid({**facet, "more": 1})
    start, message, complete, undone, _, fail = documents
    assert (start["job"], start["outputs"]) == ({"namespace": "shop", "name": "etl.load", "facets": {}}, [])
    assert [each["name"] for each in complete["inputs"] + complete["outputs"]] == ["raw", "parcels"]
    facets = complete["run"]["facets"]
    assert facets["holdfast_contract"]["verdict"] == "passed"
    cost = facets["holdfast_energy"]
    assert (cost["estimate"], cost["method"], cost["parameters"]["watts"]) == (True, "cpu_time:thread", 12)
    assert (cost["energyJoules"] > 0, cost["wallSeconds"] > 0, cost["carbonGrams"] > 0) == (True, True, True)
    assert "holdfast_energy" in fail["run"]["facets"], "what came to nothing cost something as well"
    assert (facets["holdfast_governance"]["sovereigntyEvent"], facets["holdfast_governance"]["actor"]) == (True, "jane")
    assert facets["holdfast_idempotency"]["checksum"] == "abc"
    assert json.loads(message["run"]["facets"]["holdfast_message"]["payload"]) == {"rows": 7, "none": None}
    assert undone["run"]["facets"]["errorMessage"]["message"] == "rolled back by jane: wrong"
    assert (fail["run"]["facets"]["errorMessage"]["message"], fail["job"]["name"]) == ("ValueError: broken", "plain")
    sink.publish(events)
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[:6] == lines[6:], "published again it is the same, to the last byte"


def test_a_file_of_them_is_compared_with_the_log(
    events: list[holdfast.lineage.Event], sqlite_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "ol.jsonl"
    OpenLineage(file).publish(events)
    lines = file.read_text(encoding="utf-8").splitlines()
    with holdfast.Client(sqlite_url) as client:
        assert client.relays.verify(lines).problems == ()
        assert [each.what for each in client.relays.verify(lines[1:]).problems] == ["missing"]
        for old, new in (
            ('"cpu_time:thread"', '"guess"'), ('"etl.load"', '"etl.drop"'),
            ('"COMPLETE"', '"FAIL"'), ('"passed"', '"failed"'), ('"name": "raw"', '"name": "x"'), ('"jane"', '"joe"'),
            ('"sovereigntyEvent": true', '"sovereigntyEvent": false'), ('"outputs": [{', '"outputs": [], "more": [{'),
        ):  # fmt: skip
            assert old in lines[2], old
            forged = [*lines[:2], lines[2].replace(old, new), *lines[3:]]
            assert [each.what for each in client.relays.verify(forged).problems] == ["differs"], new


@contextmanager
def answering(status: int, *more: tuple[str, str]) -> Iterator[tuple[str, list[Any]]]:
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            elsewhere = self.path == "/elsewhere"
            who = self.headers["Authorization"]
            assert who is None or who.startswith("Basic amFuZTpz"), "jane, or nobody"
            authorized = status == 401 and who == "Basic amFuZTpzM2NyZXQh"
            self.send_response(201 if elsewhere or authorized else status)
            for name, value in () if elsewhere else more:
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            """A page that is there, and has nothing to do with what was posted."""
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_by_http_a_server_that_fails_is_down_and_one_that_refuses_is_not(events: list[holdfast.lineage.Event]) -> None:
    with answering(201) as (url, got):
        OpenLineage(url, timeout=PATIENCE).publish(events)
    assert [path for path, _ in got] == ["/api/v1/lineage"] * len(events)
    assert [rebuilt(each).run.runId for _, each in got] == [each.run for each in events]
    for status in (500, 503, 429, 401):
        with answering(status) as (url, got), pytest.raises(holdfast.SinkDown, match=str(status)):
            OpenLineage(url, timeout=PATIENCE).publish(events)
        assert len(got) == 1, "it is for the relay to try again"
    with answering(422) as (url, _), pytest.raises(OSError, match="422"):
        OpenLineage(url, timeout=PATIENCE).publish(events)


def test_by_http_a_password_in_the_address_is_used_and_never_told(events: list[holdfast.lineage.Event]) -> None:
    for status, wrong in ((401, False), (401, True), (422, True), (302, True)):
        with answering(status, ("Location", "/page")) as (url, got):
            with_password = url.replace("//", f"//jane:s3cret{'' if wrong else '%21'}@")
            if not wrong:
                OpenLineage(with_password, timeout=PATIENCE).publish(events)
                assert len(got) == len(events)
            else:
                with pytest.raises(Exception, match=str(status)) as error:
                    OpenLineage(with_password, timeout=PATIENCE).publish(events)
                assert "s3cret" not in str(error.value)
    with pytest.raises(holdfast.SinkDown):
        OpenLineage(url, timeout=PATIENCE).publish(events)  # nobody is there any more


def test_by_http_only_a_server_that_says_so_has_it(events: list[holdfast.lineage.Event]) -> None:
    """One that sends us to a page which is there has taken nothing; and an answer that cannot be read is no refusal."""
    lies = [(status, ("Location", "/login")) for status in (301, 302, 303)]
    for status, *more in (*lies, (304,), (300,), (200, ("Transfer-Encoding", "chunked")), (308, ("Location", "/"))):
        with answering(status, *more) as (url, _), pytest.raises(holdfast.SinkDown):  # type: ignore[arg-type]
            OpenLineage(url, timeout=PATIENCE).publish(events)
    with answering(307, ("Location", "/elsewhere")) as (url, got):
        OpenLineage(url, timeout=PATIENCE).publish(events)
    assert [each["run"]["runId"] for path, each in got if path == "/elsewhere"] == [each.run for each in events]


@pytest.mark.parametrize("begins", [b"HTTP/1.1 201 ", b"HTTP/1.1 201 Created\r\nContent-Length: 100000\r\n\r\n"])
def test_by_http_an_answer_that_comes_drop_by_drop_is_none(events: list[holdfast.lineage.Event], begins: bytes) -> None:
    """In its head or after it. Each drop comes well within the time that the whole has; the server goes on for as long
    as it is listened to, and gives up at last, so that this fails if we do not."""
    late = threading.Event()

    def serve() -> None:
        one, _ = listening.accept()
        with closing(one), suppress(OSError):
            one.recv(65536)
            one.sendall(begins)
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until:
                time.sleep(0.03)
                one.sendall(b"x")
            late.set()

    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        serves = threading.Thread(target=serve, daemon=True)
        serves.start()
        sink = OpenLineage(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=0.2)
        with pytest.raises(holdfast.SinkDown, match="time"):
            sink.publish(events[:1])
        serves.join()
    assert not late.is_set()


def test_on_the_console_and_through_the_clients_own_transports(
    events: list[holdfast.lineage.Event], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    OpenLineage("-").publish(events)
    assert [json.loads(line)["run"]["runId"] for line in capsys.readouterr().out.splitlines()] == [
        each.run for each in events
    ]
    with caplog.at_level("INFO"):
        OpenLineage(ConsoleTransport(ConsoleConfig())).publish(events)
    assert sum(record.name.startswith("openlineage") for record in caplog.records) >= len(events)
