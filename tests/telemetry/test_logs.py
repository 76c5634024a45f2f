"""Whatever is logged says which event it is of, under names that are listed and stay."""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast.telemetry

ROOT = Path(__file__).parents[2]
APART = ("cli", "driver", "testing")
"""Folders of programs that do not log, or have a log of their own."""
LEVELS = ("log.info", "log.warning", "log.error", "log.critical", "log.exception")
USUAL = frozenset(vars(logging.makeLogRecord({})))


def logged() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every call of a logger in the source, with what it says in ``extra``, as far as that can be read."""
    package = ROOT / "src" / "holdfast"
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        if path.relative_to(package).parts[0] in APART or text.startswith("# Generated"):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            if (called := _name(node.func)) in LEVELS:
                yield f"{path.name}:{node.lineno}", _extra(node)
            elif called == "log.event":
                fields = {str(each.arg): None for each in node.keywords if each.arg != "exc_info"}
                yield f"{path.name}:{node.lineno}", {"event": ast.literal_eval(node.args[0]), **fields}


def _name(called: ast.expr) -> str:
    """As ``ast.unparse`` writes it, of a name or an attribute of a name; that takes seconds for all calls."""
    if isinstance(called, ast.Name):
        return called.id
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        return f"{called.value.id}.{called.attr}"
    return ""


def _extra(call: ast.Call) -> dict[str, Any]:
    [extra] = [each.value for each in call.keywords if each.arg == "extra"] or [ast.Dict([], [])]
    assert isinstance(extra, ast.Dict)
    pairs = zip(extra.keys, extra.values, strict=True)
    return {str(key.value): getattr(value, "value", None) for key, value in pairs if isinstance(key, ast.Constant)}


def test_every_message_from_info_on_has_an_event_that_the_page_lists() -> None:
    found = dict(logged())
    assert len(found) > 40
    assert not [where for where, extra in found.items() if not isinstance(extra.get("event"), str)]
    page = (ROOT / "docs" / "howto" / "telemetry.md").read_text().partition("## Logs")[2]
    listed = re.findall(r"^- `([a-z_]+(?:\.[a-z_]+)?)`", page, re.MULTILINE)
    assert listed == sorted({extra["event"] for extra in found.values()})
    assert not USUAL & {field for extra in found.values() for field in extra}, "the record has them already"


def test_a_record_carries_its_event_and_its_fields_for_any_formatter(
    sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with holdfast.Client(sqlite_url) as client:
        slots = client.slots("pool", capacity=2)
        slots.reconcile([{"id": "s", "slot": slots.claim(owner="other").slot, "terminal": False}])
        client.elector("x").run(lambda term: None)
    told = [{k: v for k, v in vars(each).items() if k not in USUAL} for each in caplog.records]
    lines = [json.dumps(each) for each in told]  # whatever is in there can be written as JSON
    assert len(lines) >= 3
    violation = next(each for each in told if each["event"] == "slots.violation")
    assert violation["pool"] == "pool"
    assert violation["kind"] in slots.invariant_violation_total
    changed = [each for each in told if each["event"] == "elector.changed"]
    assert [(each["elector"], each["to"]) for each in changed] == [("x", "leading"), ("x", "released")]


def test_fields_that_another_program_names_cannot_replace_attributes_of_the_record(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = holdfast.telemetry.logger("holdfast.test")
    log.event("driver.said", holdfast.telemetry.WARNING, "%(name)s of %(pid)d", fields={"name": "exit"}, pid=7)
    log.event("driver.away", holdfast.telemetry.WARNING)
    said, away = caplog.records
    assert (said.name, said.getMessage(), vars(said)["fields"], vars(said)["pid"]) == (
        "holdfast.test", "exit of 7", {"name": "exit"}, 7,
    )  # fmt: skip
    assert (vars(away)["event"], away.getMessage()) == ("driver.away", "driver.away")
