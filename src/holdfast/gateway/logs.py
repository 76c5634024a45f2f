"""The log of a replica: one JSON object a line on stderr, readable lines on a terminal. Secrets are masked in both.

Every record has an ``event``, a stable name to search for and to alert on, and fields.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from holdfast.telemetry import ERROR, INFO, WARNING, logger

__all__ = ["ERROR", "INFO", "WARNING", "install", "log", "request_id"]

_STANDARD_ATTRIBUTES = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message", "asctime", "taskName", "fields", "event", "color_message",
}  # fmt: skip

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that the current task answers."""

log = logger("holdfast.gateway")


def install(replica: str, secrets: Iterable[str], *, terminal: bool | None = None) -> None:
    """Send everything that this process logs to stderr, in the format of the gateway."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        EventFormatter(replica, secrets, terminal=sys.stderr.isatty() if terminal is None else terminal)
    )
    logging.basicConfig(level=INFO, handlers=[handler], force=True)
    for noisy in ("uvicorn", "asyncio", "holdfast.elector"):  # the elector logs every heartbeat at INFO
        logging.getLogger(noisy).setLevel(WARNING)


def mask_credentials(text: str) -> str:
    """``text`` without passwords in URLs, Authorization headers and parameters that name a secret."""
    text = re.sub(r"://([^/\s:@]*):[^@/\s]+@", r"://\1:***@", text)
    text = re.sub(r"(?i)\b(bearer|basic) [^\s\"',]+", r"\1 ***", text)
    return re.sub(r"(?i)(password|token|secret)=[^&\s\"']+", r"\1=***", text)


class EventFormatter(logging.Formatter):
    """``secrets`` are masked wherever they occur, also inside JSON strings."""

    def __init__(self, replica: str, secrets: Iterable[str], *, terminal: bool) -> None:
        super().__init__()
        self._replica, self._terminal = replica, terminal
        spellings = {text for secret in secrets for text in (secret, json.dumps(secret)[1:-1]) if text}
        pattern = "|".join(re.escape(text) for text in sorted(spellings, key=len, reverse=True))
        self._secrets = re.compile(pattern) if pattern else None

    def format(self, record: logging.LogRecord) -> str:
        members = self._members(record)
        return self._mask(_terminal_line(members) if self._terminal else json.dumps(members, default=str))

    def _members(self, record: logging.LogRecord) -> dict[str, Any]:
        """The members of the JSON object. The event of a record that has none is the name of its logger."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        event, message = getattr(record, "event", record.name), record.getMessage()
        members: dict[str, Any] = {"at": at, "level": record.levelname.lower(), "event": event}
        members["replica"] = self._replica
        if (id := request_id.get()) is not None:
            members["requestId"] = id
        members |= {name: value for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES}
        members |= getattr(record, "fields", {})
        members["replica"] = self._replica  # a field of that name is about another replica
        if message != event:
            members["message"] = message
        if record.exc_info and record.exc_info[1] is not None:
            members["error"] = "".join(traceback.format_exception(record.exc_info[1]))
        return members

    def _mask(self, text: str) -> str:
        text = mask_credentials(text)
        return self._secrets.sub("***", text) if self._secrets else text


def _terminal_line(members: dict[str, Any]) -> str:
    """One line, and the traceback below it. Unprintable characters are escaped: no name may move the cursor."""
    leading = ("at", "level", "event", "replica", "error", "message")
    words = [
        time.strftime("%H:%M:%S"), members["level"].upper().ljust(7), members["event"], str(members.get("message", "")),
        *(f"{name}={value}" for name, value in members.items() if name not in leading),
    ]  # fmt: skip
    line = " ".join(word for word in words if word)
    line = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)
    return line if "error" not in members else f"{line}\n{members['error'].rstrip()}"
