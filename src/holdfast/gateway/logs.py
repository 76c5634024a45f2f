"""What a replica tells: one JSON object a line on stderr, or lines for people on a terminal. No secret is in them.

``event`` has a stable name, to be searched for and alerted on; what belongs to it stands in fields of its own.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

_log = logging.getLogger("holdfast.gateway")
_USUAL = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "fields", "color_message"}

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Of the request that this task answers."""


def say(
    event: str,
    level: int = logging.INFO,
    *,
    error: BaseException | None = None,
    fields: Mapping[str, Any] | None = None,
    **more: Any,
) -> None:
    """``error``: told with its traceback."""
    _log.log(level, event, extra={"fields": {**(fields or {}), **more}}, exc_info=error)


def install(replica: str, secrets: Iterable[str], *, people: bool | None = None) -> None:
    """From here on all that is logged in this process goes to stderr, in our form."""
    form = _Form(replica, secrets, people=sys.stderr.isatty() if people is None else people)
    where = logging.StreamHandler(sys.stderr)
    where.setFormatter(form)
    logging.basicConfig(level=logging.INFO, handlers=[where], force=True)
    for noisy in ("uvicorn", "asyncio", "holdfast.elector"):  # a heartbeat every few seconds is no news
        logging.getLogger(noisy).setLevel(logging.WARNING)


class _Form(logging.Formatter):
    def __init__(self, replica: str, secrets: Iterable[str], *, people: bool) -> None:
        super().__init__()
        self._replica, self._people = replica, people
        told = {form for each in secrets for form in (each, json.dumps(each)[1:-1])}  # as it is, and inside of JSON
        known = "|".join(re.escape(each) for each in sorted(told, key=len, reverse=True) if each)
        self._secret = re.compile(known) if known else None

    def format(self, record: logging.LogRecord) -> str:
        told = self._told(record)
        if self._people:
            return self._clean(_line(told))
        return self._clean(json.dumps(told, default=str))

    def _told(self, record: logging.LogRecord) -> dict[str, Any]:
        """Of a record that was not made here the event is the name of its logger, and its extra fields are fields."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        ours = hasattr(record, "fields")
        told: dict[str, Any] = {"at": at, "level": record.levelname.lower()}
        told["event"] = record.getMessage() if ours else record.name
        told["replica"] = self._replica
        if (number := request_id.get()) is not None:
            told["requestId"] = number
        more = getattr(record, "fields", None) or {k: v for k, v in vars(record).items() if k not in _USUAL}
        told |= {**more, "replica": self._replica}  # who tells it, whoever it is about
        if not ours:
            told["message"] = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            told["error"] = "".join(traceback.format_exception(record.exc_info[1]))
        return told

    def _clean(self, text: str) -> str:
        text = re.sub(r"://([^/\s:@]*):[^@/\s]+@", r"://\1:***@", text)
        text = re.sub(r"(?i)\b(bearer|basic) [^\s\"',]+", r"\1 ***", text)
        text = re.sub(r"(?i)(password|token|secret)=[^&\s\"']+", r"\1=***", text)
        return self._secret.sub("***", text) if self._secret else text


def _line(told: dict[str, Any]) -> str:
    """For a terminal: unprintable characters are escaped, so that no name can move the cursor."""
    shown = {k: v for k, v in told.items() if k not in ("at", "level", "event", "replica", "error", "message")}
    words = [time.strftime("%H:%M:%S"), told["level"].upper().ljust(7), told["event"], str(told.get("message", ""))]
    line = " ".join(each for each in [*words, *(f"{name}={value}" for name, value in shown.items())] if each)
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return line if "error" not in told else f"{line}\n{told['error'].rstrip()}"
