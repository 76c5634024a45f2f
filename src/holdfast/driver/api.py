"""What can be asked of the driver, and who may ask.

GET    /v1/sandboxes                  all of them, and the cursor from which a watch goes on
GET    /v1/sandboxes/ID               404 with "missing" when there certainly is none
PUT    /v1/sandboxes/ID               create: 201, 200 if it is there with the same spec, 409 with another
DELETE /v1/sandboxes/ID?grace=&wait=  TERM, the grace, KILL; 204 when it is gone, 202 while it is being ended
GET    /v1/sandboxes/ID/log?offset=&tail=&follow=
GET    /v1/watch?since=               a JSON object a line, without end
GET    /v1/health
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
import re
from collections.abc import AsyncIterator
from typing import Any

from holdfast.driver import logs
from holdfast.driver.box import Box
from holdfast.driver.events import Expired
from holdfast.driver.http import Answer, Problem, Request
from holdfast.driver.runs import Full, Runs, Taken
from holdfast.driver.spec import ID, LONGEST_GRACE, BadSpec, parse

BEAT = 5.0
"""Seconds after which a quiet watch says that it is still there."""
FOLLOW_EVERY = 0.1
LONGEST_WAIT = 3600.0
_ROUTE = re.compile(r"/v1/(?:(health|watch|sandboxes)|sandboxes/([^/]+)(/log)?)")


class Api:
    """``hosts`` are the names by which it may be called, or None for any; ``token`` is what the caller must know."""

    def __init__(self, runs: Runs, *, token: str | None, hosts: frozenset[str] | None) -> None:
        self._runs, self._token, self._hosts = runs, token, hosts

    async def handle(self, request: Request) -> Answer:
        self._admit(request)
        found = _ROUTE.fullmatch(request.path)
        if found is None:
            raise Problem(404, "there is no such address")
        what, id, log = found.groups()
        if id is not None and not ID.fullmatch(id):
            message = f"an id must match {ID.pattern}"
            raise Problem(400, message) if request.method == "PUT" else Problem(404, message, missing=id)
        name = "log" if log else what or "sandbox"
        answer = getattr(self, f"_{request.method.lower()}_{name}", None)
        if answer is None or request.method not in ("GET", "PUT", "DELETE"):
            methods = [each for each in ("GET", "PUT", "DELETE") if hasattr(self, f"_{each.lower()}_{name}")]
            raise Problem(405, f"{request.method} is not possible here", {"Allow": ", ".join(methods)})
        try:
            done: Answer = await (answer(request) if id is None else answer(request, id))
        except OSError as error:  # nothing was acknowledged, so that the same may be asked again
            raise Problem(503, f"the disk refused: {error.strerror}", {"Retry-After": "1"}) from None
        return done

    def _admit(self, request: Request) -> None:
        """A page in a browser, even one that has made its name lead here, gets nothing."""
        if "origin" in request.headers:
            raise Problem(403, "requests from web pages are refused")
        host = re.sub(r":\d+$", "", request.headers.get("host", "localhost")).lower()
        if self._hosts is not None and host not in self._hosts:
            raise Problem(421, "the Host is not one of this driver's names")
        if self._token is not None:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode("latin-1"), f"Bearer {self._token}".encode()):
                raise Problem(401, "a token is needed", {"WWW-Authenticate": "Bearer"})

    async def _get_health(self, request: Request) -> Answer:
        _only(request)
        return Answer(200, {"status": "ok", "pid": os.getpid(), "sandboxes": len(self._runs.list())})

    async def _get_sandboxes(self, request: Request) -> Answer:
        _only(request)
        return Answer(200, {"cursor": self._runs.events.cursor, "sandboxes": self._runs.list()})

    async def _get_sandbox(self, request: Request, id: str) -> Answer:
        _only(request)
        self._runs.look(self._box(id))
        return Answer(200, self._box(id).told)

    async def _put_sandbox(self, request: Request, id: str) -> Answer:
        _only(request)
        try:
            box, new = self._runs.create(id, parse(request.json()))
        except BadSpec as bad:
            raise Problem(422, str(bad)[:2000], errors=bad.mistakes[:100]) from None
        except Taken as taken:
            raise Problem(409, str(taken)) from None
        except Full as full:
            raise Problem(429, str(full), {"Retry-After": "10"}) from None
        return Answer(201 if new else 200, box.told)

    async def _delete_sandbox(self, request: Request, id: str) -> Answer:
        _only(request, "grace", "wait", "run")
        grace = _number(request, "grace", LONGEST_GRACE)
        wait = _number(request, "wait", LONGEST_WAIT) or 0.0
        box = self._box(id)
        if request.query.get("run", box.facts.spec["run"]) != box.facts.spec["run"]:
            raise Problem(409, f"sandbox {id!r} is another run by now", run=box.facts.spec["run"])
        self._runs.delete(box, grace)
        try:
            async with asyncio.timeout(wait):
                await box.gone.wait()
        except TimeoutError:
            return Answer(202, box.told)
        return Answer(204)

    async def _get_log(self, request: Request, id: str) -> Answer:
        _only(request, "offset", "tail", "follow")
        box = self._box(id)
        offset, tail = _whole(request, "offset"), _whole(request, "tail")
        follow = request.query.get("follow", "false")
        if follow not in ("true", "false"):
            raise Problem(400, "follow must be true or false")
        if offset is not None and tail is not None:
            raise Problem(400, "offset and tail exclude each other")
        first, end = logs.bounds(box.folder)
        start = await asyncio.to_thread(logs.tail, box.folder, tail) if tail is not None else max(offset or 0, first)
        headers = {"Content-Type": "application/octet-stream", "Holdfast-Log-Offset": str(start)}
        return Answer(200, None, headers, _log(box, start, math.inf if follow == "true" else end))

    async def _get_watch(self, request: Request) -> Answer:
        _only(request, "since")
        try:
            at = self._runs.events.position(request.query.get("since", self._runs.events.cursor))
        except Expired as expired:
            raise Problem(410, str(expired)) from None
        except ValueError as error:
            raise Problem(400, str(error)) from None
        return Answer(200, None, {"Content-Type": "application/x-ndjson"}, _lines(self._runs.events.since(at, BEAT)))

    def _box(self, id: str) -> Box:
        if (box := self._runs.get(id)) is None:
            raise Problem(404, f"there is no sandbox {id!r}", missing=id)
        return box


async def _lines(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    async for event in events:
        yield json.dumps(event).encode() + b"\n"


async def _log(box: Box, at: float, end: float) -> AsyncIterator[bytes]:
    """Up to ``end``; to the end of the sandbox if that is infinite."""
    while at < end and not box.gone.is_set():
        over = box.facts.exit is not None
        try:
            begun, data = logs.read(box.folder, int(at), int(min(logs.BLOCK, end - at)))
        except FileNotFoundError:  # deleted meanwhile
            return
        if data:
            at = begun + len(data)
            yield data
        elif over or end != math.inf:
            return
        else:
            await asyncio.sleep(FOLLOW_EVERY)


def _only(request: Request, *names: str) -> None:
    if unknown := sorted(request.query.keys() - {*names}):
        raise Problem(400, f"{unknown[0][:50]!r} is no parameter here")


def _number(request: Request, name: str, most: float) -> float | None:
    if name not in request.query:
        return None
    try:
        value = float(request.query[name])
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise Problem(400, f"{name} must be a number from 0 to {most:g}")
    return value


def _whole(request: Request, name: str) -> int | None:
    if name not in request.query:
        return None
    text = request.query[name]
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise Problem(400, f"{name} must be a whole number")
    return int(text)
