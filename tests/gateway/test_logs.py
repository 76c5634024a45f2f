"""One JSON object a line, with the number of the request and no secret; on a terminal, lines for terminal."""

from __future__ import annotations

import json
import logging

import pytest

from holdfast.gateway.logs import EventFormatter, request_id

SECRET = 'a-"token"\\that-is-known'
SAID = f"postgresql://me:hunter2@db/app Authorization: Bearer abc.def Basic dTpw password=swordfish {SECRET}"


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "holdfast.gateway", "levelname": "INFO", "msg": message, **extra})
    try:
        raise ValueError(SAID)
    except ValueError as error:
        made.exc_info = (ValueError, error, error.__traceback__)
    return made


@pytest.mark.parametrize("terminal", [False, True])
def test_no_secret_is_in_a_line_wherever_it_comes_from(terminal: bool) -> None:
    form = EventFormatter("r-1", [SECRET], terminal=terminal)
    for each in (record("request", event="request", fields={"path": SAID}), record(SAID), record("x", holder=SAID)):
        line = form.format(each)
        for secret in ("hunter2", "abc.def", "dTpw", "swordfish", SECRET, "that-is-known"):
            assert secret not in line
        assert "me:***@db" in line


def test_a_line_is_an_object_with_a_stable_event_and_the_number_of_its_request() -> None:
    form, token = EventFormatter("r-1", [], terminal=False), request_id.set("n-7")
    try:
        ours = json.loads(form.format(record("request", event="request", fields={"status": 200})))
        theirs = json.loads(form.format(record("words\nof a library", elector="e", replica="e/1")))
    finally:
        request_id.reset(token)
    assert (ours["event"], ours["replica"], ours["requestId"], ours["status"]) == ("request", "r-1", "n-7", 200)
    assert (theirs["event"], theirs["message"], theirs["elector"]) == ("holdfast.gateway", "words\nof a library", "e")
    assert theirs["replica"] == "r-1"
    plain = logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": "a\x1b[2J\nb"})
    assert EventFormatter("r-1", [], terminal=True).format(plain).endswith(r"x a\x1b[2J\nb")
