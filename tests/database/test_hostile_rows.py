"""What a worker writes past the library is refused, or is shown as what it is, and hides nobody else's rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.errors import CheckViolation

import holdfast
from tests.cli.command import call

DIGITS, DEEP, LONG = "1" * 4301, "[" * 6000 + "]" * 6000, "x" * 100_000
NO_OBJECTS = ("no json", "[1]", "null", "3", '"x"', DIGITS, f'{{"x": {DIGITS}}}', DEEP)
ENTRY = '["",[1,"failure",1,1,1,"{}",null],"x"]'
OPERATION: dict[str, Any] = {
    "key": "hostile", "pointer": "1:x", "entries": ENTRY, "error": None, "keep": None, "rollback": None,
    "rhash": None, "label": "l", "pipeline": "p", "status": "failure", "failures": 1,
}  # fmt: skip
WRITE = """select state from holdfast.operation_write(%(key)s, null, %(pointer)s, 1, %(entries)s, %(status)s, 1, 7, 'f',
    null, %(rhash)s, %(error)s, %(keep)s, false, %(failures)s, %(rollback)s, null, null, null, null, %(label)s,
    %(pipeline)s, 't', 'd', 'o', null, null)"""
ACQUIRE = "select status from holdfast.lease_acquire('hostile', 'h', 600, process => %(process)s)"
REVIEW = "select holdfast.review_open('k', %(label)s, 'd', 'o', 'policy', %(detail)s, 'me', 'f', %(outputs)s)"
REFUSED: list[tuple[str, dict[str, Any]]] = [
    *((ACQUIRE, {"process": process}) for process in (
        '{"info": [1]}', '{"info": "x"}', '{"info": 3}', '{"info": null}', json.dumps({"host": LONG}),
        '{"started": "Infinity"}', '{"started": 9e11}',
    )),
    *((WRITE, OPERATION | {name: LONG}) for name in ("error", "rollback", "rhash", "label", "pipeline", "pointer")),
    *((WRITE, OPERATION | {"key": key}) for key in ("", "k" * 201, "a\nb")),
    *((WRITE, OPERATION | {"status": "success", "failures": 0, "keep": seconds}) for seconds in (-1e11, 2.5e11)),
    *((REVIEW, {"label": "l", "detail": "w", "outputs": None, name: LONG}) for name in ("label", "detail", "outputs")),
]  # fmt: skip
SHOWN = [
    *((WRITE, OPERATION | {"error": text}) for text in NO_OBJECTS),
    *((WRITE, OPERATION | {"error": f'{{"type": "x", "message": {text}}}'}) for text in ("3", "[1]", "null")),
    *((WRITE, OPERATION | {"entries": text}) for text in (*NO_OBJECTS, ENTRY.replace("1,1,1", "1,1," + "9" * 20))),
    *((WRITE, OPERATION | {"entries": ENTRY.replace('"{}"', json.dumps(text))}) for text in NO_OBJECTS),
    *((ACQUIRE, {"process": process}) for process in (
        "[1]", "{}", '{"info": {"label": [1]}, "host": "a\\nb\\u001b[31m"}', '{"pid": -5}',
    )),
]  # fmt: skip


@pytest.fixture
def hostile(postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


def test_what_would_be_shown_at_any_length_or_in_any_form_is_refused(hostile: psycopg.Connection[Any]) -> None:
    for statement, fields in REFUSED:
        with pytest.raises(CheckViolation):
            pytest.fail(f"{hostile.execute(statement.encode(), fields).fetchall()} for {str(fields)[:300]}")


def test_listings_show_the_rows_of_others_beside_a_damaged_one(
    postgres_url: str, hostile: psycopg.Connection[Any]
) -> None:
    with holdfast.Client(postgres_url) as client:
        client.lease("good", ttl=3600).acquire()
        client.operation("good").run(lambda: 1)
        for statement, fields in SHOWN:
            what = str(fields)[:300]
            hostile.execute(statement.encode(), fields)
            assert {"good"} <= {record.name for record in client.leases.list()}, what
            records = client.operations.list(limit=100)
            assert {"good"} <= {record.label for record in records}, what
            for record in records:
                client.operations.get(record.key)
                client.operations.history(record.key)
            if "entries" in fields:
                damaged = fields["error"] is not None
                assert (records[0].error or {}).get("type") == ("damaged" if damaged else None), what
                client.operations.verify()
                assert client.operations.health() is not None
            hostile.execute("delete from holdfast.idempotency_log where idem_key = 'hostile'")
            hostile.execute("delete from holdfast.lease where name = 'hostile'")


@pytest.mark.parametrize(
    ("command", "writes"),
    [
        (("ops", "ls"), [(WRITE, OPERATION | {"key": f"k{n}", "error": text}) for n, text in enumerate(NO_OBJECTS)]),
        (("ops", "verify"), [(WRITE, OPERATION | {"key": f"k{n}", "entries": e}) for n, e in enumerate(NO_OBJECTS)]),
        (("ls",), SHOWN[-2:]),
    ],
    ids=str,
)  # fmt: skip
def test_commands_do_so_too(
    postgres_url: str, hostile: psycopg.Connection[Any], command: tuple[str, ...], writes: list[Any]
) -> None:
    for statement, fields in writes:
        hostile.execute(statement.encode(), fields)
    done = call(*command, HOLDFAST_URL=postgres_url)  # which fails on a traceback
    assert "\x1b[31m" not in done.stdout
    assert done.stdout


def test_an_object_that_python_cannot_parse_is_its_bytes_and_hides_no_other(
    postgres_url: str, hostile: psycopg.Connection[Any]
) -> None:
    with holdfast.Client(postgres_url) as client:
        client.objects.put_if("box", "good", {"x": 1}, holdfast.MustCreate())
        for number, body in enumerate((DIGITS, f'{{"x": {DIGITS}}}', DEEP, f" {DEEP}")):
            hostile.execute("select holdfast.object_put_if('box', %s, %s, 0)", [f"h{number}", body])
            record = client.objects.get("box", f"h{number}")
            assert record is not None
            assert record.payload == body.encode()
        assert [record.id for record in client.objects.list("box")] == ["good", "h0", "h1", "h2", "h3"]
        assert client.objects.list("box")[0].payload == {"x": 1}
