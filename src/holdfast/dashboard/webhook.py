"""The webhook: a POST for each new problem of the overview, and one when it is over.

    elector ─→ read what the overview reads ─→ compare with the record ─→ POST ─→ write the record ─→ after EVERY, again

One process sends for each URL: the leader of an elector. The record of what the receiver knows is an object, so the
next leader continues with it. What is sent is bounded: MAX_OPEN problems, TRIES of a message, WITHIN for each of them.

- A message waits until the one before it was answered or given up. While it fails, the pauses double.
- A message may arrive twice, with the same ``id``: its answer was lost, or the record could not be written.
- No redirect is followed, of an answer only its first line is read, and neither the path of the URL nor the secret is
  stored, logged or shown.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import holdfast
from holdfast.dashboard.formats import format_time, one_line
from holdfast.dashboard.problems import WEBHOOK_LEASE, WEBHOOKS, find_problems, problem_id
from holdfast.dashboard.snapshot import WEBHOOK_TYPE, Snapshot, take_snapshot
from holdfast.dashboard.source import PageSource
from holdfast.telemetry import INFO, WARNING, logger

log = logger("holdfast.dashboard")

EVERY = 5.0
"""Seconds between two looks for problems."""
TRIES = 8
"""Of one message; then it is given up."""
WITHIN = 10.0
"""Seconds for the connection, the request and the first line of its answer."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds after a POST that failed."""
MAX_OPEN = 100
"""Problems that the receiver was told of and that are not over; further ones are not sent until one of these is."""
_LEAST_SECRET = 16
_MAX_URL = 2000
_MAX_LINE = 4096
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})[ \r\n]")
_GIVEN_UP = "given up"
Open = dict[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class WebhookTarget:
    url: str = field(repr=False)
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError, whose message contains neither."""
        try:
            parts = urlsplit(self.url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url or parts.username is not None or not re.fullmatch(f"[!-~]{{1,{_MAX_URL}}}", self.url):
            raise ValueError("the webhook must be a URL such as https://hooks.example/holdfast, without a user")
        if len(self.secret) < _LEAST_SECRET:
            raise ValueError(
                f"the webhook needs a secret of at least {_LEAST_SECRET} characters, which signs its messages: "
                "openssl rand -hex 32"
            )

    @property
    def digest(self) -> str:
        """Names the URL, which may contain a secret itself."""
        return sha256(self.url.encode()).hexdigest()[:12]


def read_secret(file: str | None, environment: Mapping[str, str]) -> str:
    """The secret in the file, else that of the environment, without the white space around it; empty if there is none.
    Raises ValueError if the file cannot be read."""
    if file is None:
        return environment.get("HOLDFAST_WEBHOOK_SECRET", "").strip()
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"the secret of the webhook cannot be read: {why}") from None


class Webhook:
    """``source``: of an ``AsyncClient`` of the running loop, which may write."""

    def __init__(self, source: PageSource, target: WebhookTarget) -> None:
        self._source, self._target, self._parts = source, target, urlsplit(target.url)
        self._elector = source.client.elector(f"{WEBHOOK_LEASE}{target.digest}")
        self._open: Open = {}
        """What the receiver was told of, by id, and what it could not be told of."""
        self._failing: dict[str, Any] | None = None
        self._version: int | None = None
        self._tries = self._failures = 0

    async def run(self) -> None:
        """Send, or stand by, until the task is cancelled."""
        while True:
            try:
                await self._elector.run(self._lead)
            except holdfast.HoldfastError as error:
                log.event(
                    "webhook.interrupted", WARNING, "webhook %(host)s: begins again in %(again_in)g s: %(why)s",
                    host=self._host, why=str(error), again_in=LONGEST_PAUSE,
                )  # fmt: skip
            await asyncio.sleep(LONGEST_PAUSE)

    @property
    def _host(self) -> str:
        return f"{self._parts.scheme}://{self._parts.netloc}"

    async def _lead(self, term: Any) -> None:
        await self._read_record()
        snapshot: Snapshot | None = None
        while True:
            snapshot = await take_snapshot(self._source, snapshot)
            pause = EVERY
            if snapshot.trouble is None and snapshot.unmigrated is None and not await self._send(term, snapshot):
                pause = min(FIRST_PAUSE * 2 ** (self._failures - 1), LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def _read_record(self) -> None:
        record = await self._source.client.objects.get(WEBHOOK_TYPE, self._target.digest)
        self._version = None if record is None else record.version
        self._open = {} if record is None else dict(record.payload["open"])
        self._failing = None if record is None else record.payload["failing"]
        self._tries = self._failures = 0

    async def _write_record(self, term: Any) -> None:
        payload = {"host": self._host, "open": self._open, "failing": self._failing}
        condition = holdfast.MustCreate() if self._version is None else holdfast.MatchVersion(self._version)
        record = await self._source.client.objects.put_if(
            WEBHOOK_TYPE, self._target.digest, payload, condition, under=term.grant_for(self._target.digest)
        )
        self._version = record.version

    async def _send(self, term: Any, snapshot: Snapshot) -> bool:
        """Send what has changed. False when a POST has failed: the rest waits."""
        current, texts = _current_problems(snapshot)
        for id in [id for id in self._open if id not in current]:
            row = self._open[id]
            if _GIVEN_UP not in row and await self._deliver(term, {"event": "problem.over", "id": id, **row}) is None:
                return False
            del self._open[id]
            await self._write_record(term)
        for id, row in current.items():
            if id in self._open or id not in texts or len(self._open) >= MAX_OPEN:
                continue
            is_delivered = await self._deliver(term, {"event": "problem.begun", "id": id, **row, **texts[id]})
            if is_delivered is None:
                return False
            self._open[id] = row if is_delivered else {**row, _GIVEN_UP: "after a failure"}
            await self._write_record(term)
        return True

    async def _deliver(self, term: Any, message: Mapping[str, str]) -> bool | None:
        """Whether the message was delivered; False when it is given up, None when it is to be sent again."""
        body = json.dumps({**message, "at": format_time(time.time())}).encode()
        error = await _post(self._parts, self._target.secret, body)
        if not error:
            if self._failing is not None:
                log.event("webhook.delivers", INFO, "webhook %(host)s: messages are delivered again", host=self._host)
            self._tries, self._failures, self._failing = 0, 0, None
            return True
        self._tries += 1
        self._failures += 1
        is_given_up = self._tries >= TRIES
        if self._failing is None:
            log.event("webhook.failed", WARNING, "webhook %(host)s: %(why)s", host=self._host, why=error)
        if self._failing is None or is_given_up:
            since = time.time() if self._failing is None else self._failing["since"]
            given_up = (0 if self._failing is None else self._failing["given_up"]) + is_given_up
            self._failing = {"since": since, "error": error, "given_up": given_up}
            await self._write_record(term)
        if not is_given_up:
            return None
        self._tries = 0
        return False


def _current_problems(snapshot: Snapshot) -> tuple[Open, dict[str, dict[str, str]]]:
    """What is recorded of each problem, by id, and what else is sent of those that are not acknowledged."""
    current: Open = {}
    texts: dict[str, dict[str, str]] = {}
    for problem in find_problems(snapshot):
        for subject in problem.every if problem.kind != WEBHOOKS else ():
            id = problem_id(problem.kind, subject)
            current[id] = {
                "kind": problem.kind, "level": problem.level, "title": problem.one, "subject": one_line(subject.name)
            }  # fmt: skip
            if subject in problem.fresh:
                texts[id] = {"text": one_line(subject.text), "remedy": problem.remedy}
    return current, texts


async def _post(url: SplitResult, secret: str, body: bytes) -> str:
    """POST the body, signed. Returns why it was not accepted; empty when it was."""
    at = str(int(time.time()))
    signature = hmac.new(secret.encode(), f"{at}.".encode() + body, sha256).hexdigest()
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    head = (
        f"POST {target} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nUser-Agent: holdfast/{holdfast.__version__}\r\n"
        f"Holdfast-Timestamp: {at}\r\nHoldfast-Signature: sha256={signature}\r\n\r\n"
    )
    is_https = url.scheme == "https"
    try:
        async with asyncio.timeout(WITHIN):
            reader, writer = await asyncio.open_connection(
                url.hostname, url.port or (443 if is_https else 80), ssl=is_https or None, limit=_MAX_LINE
            )
            try:
                writer.write(head.encode() + body)
                await writer.drain()
                line = await reader.readline()
            finally:
                writer.close()
    except TimeoutError:
        return f"it has not answered in {WITHIN:g} s"
    except (OSError, ValueError) as error:  # ValueError: a first line without an end
        return one_line(error) or type(error).__name__
    status = _STATUS.match(line)
    if status is None:
        return "it closed the connection without an answer" if not line else "its answer is not HTTP"
    code = int(status[1])
    if 200 <= code < 300:
        return ""
    return f"it answered {code}" + (", and redirects are not followed" if 300 <= code < 400 else "")
