"""The routes of the driver, and the check of host, origin and token.

GET    /v1/sandboxes                  all of them, and a cursor for a watch
GET    /v1/sandboxes/ID               404 with "missing" when there certainly is none
PUT    /v1/sandboxes/ID               create: 201; 200 if it exists with the same spec, 409 with another
DELETE /v1/sandboxes/ID?grace=&wait=  TERM, the grace, KILL; 204 when it has ended, 202 while it is ending
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
from holdfast.driver.events import EventCursorExpired
from holdfast.driver.http import Request, Response
from holdfast.driver.reconcile_folder import FolderReconciler, IdTaken, TooManySandboxes
from holdfast.driver.sandbox import Sandbox
from holdfast.driver.spec import ID, MAX_GRACE, BadSpec, parse
from holdfast.problem_json import Problem

BOOKMARK_EVERY = 5.0
"""Seconds without an event after which a watch sends a bookmark."""
FOLLOW_EVERY = 0.1
MAX_WAIT = 3600.0
_ROUTE = re.compile(r"/v1/(?:(health|watch|sandboxes)|sandboxes/([^/]+)(/log)?)")


class Api:
    """``hosts``: the allowed Host headers, or None for any. ``token``: the secret of clients, or None."""

    def __init__(self, sandboxes: FolderReconciler, *, token: str | None, hosts: frozenset[str] | None) -> None:
        self._sandboxes, self._token, self._hosts = sandboxes, token, hosts

    async def handle(self, request: Request) -> Response:
        match = _ROUTE.fullmatch(request.path)
        if match is None:
            raise Problem(404, "there is no such address")
        collection, id, log = match.groups()
        if id is not None and not ID.fullmatch(id):
            message = f"an id must match {ID.pattern}"
            raise Problem(400, message) if request.method == "PUT" else Problem(404, message, missing=id)
        name = "log" if log else collection or "sandbox"
        handler = getattr(self, f"_{request.method.lower()}_{name}", None)
        if handler is None or request.method not in ("GET", "PUT", "DELETE"):
            methods = [each for each in ("GET", "PUT", "DELETE") if hasattr(self, f"_{each.lower()}_{name}")]
            raise Problem(405, f"{request.method} is not possible here", headers={"Allow": ", ".join(methods)})
        try:
            response: Response = await (handler(request) if id is None else handler(request, id))
        except OSError as error:  # nothing was acknowledged: the client may retry
            raise Problem(503, f"the disk refused: {error.strerror}", headers={"Retry-After": "1"}) from None
        return response

    def admit(self, request: Request) -> None:
        """Raises Problem for web pages, also those whose name resolves to this machine, and without the token."""
        if "origin" in request.headers:
            raise Problem(403, "requests from web pages are refused")
        host = re.sub(r":\d+$", "", request.headers.get("host", "localhost")).lower()
        if self._hosts is not None and host not in self._hosts:
            raise Problem(421, "the Host is not one of this driver's names")
        if self._token is not None:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode("latin-1"), f"Bearer {self._token}".encode()):
                raise Problem(401, "a token is needed", headers={"WWW-Authenticate": "Bearer"})

    async def _get_health(self, request: Request) -> Response:
        _check_parameters(request)
        return Response(200, {"status": "ok", "pid": os.getpid(), "sandboxes": len(self._sandboxes.list())})

    async def _get_sandboxes(self, request: Request) -> Response:
        _check_parameters(request)
        return Response(200, {"cursor": self._sandboxes.events.cursor, "sandboxes": self._sandboxes.list()})

    async def _get_sandbox(self, request: Request, id: str) -> Response:
        _check_parameters(request)
        self._sandboxes.reconcile(self._get(id))
        return Response(200, self._get(id).description)

    async def _put_sandbox(self, request: Request, id: str) -> Response:
        _check_parameters(request)
        try:
            sandbox, is_new = self._sandboxes.create(id, parse(request.json()))
        except BadSpec as bad:
            raise Problem(422, str(bad)[:2000], errors=bad.mistakes[:100]) from None
        except IdTaken as error:
            raise Problem(409, str(error)) from None
        except TooManySandboxes as error:
            raise Problem(429, str(error), headers={"Retry-After": "10"}) from None
        return Response(201 if is_new else 200, sandbox.description)

    async def _delete_sandbox(self, request: Request, id: str) -> Response:
        _check_parameters(request, "grace", "wait", "run")
        grace = _number(request, "grace", MAX_GRACE)
        wait = _number(request, "wait", MAX_WAIT) or 0.0
        sandbox = self._get(id)
        if request.query.get("run", sandbox.facts.spec["run"]) != sandbox.facts.spec["run"]:
            raise Problem(409, f"sandbox {id!r} is another run by now", run=sandbox.facts.spec["run"])
        self._sandboxes.delete(sandbox, grace)
        try:
            async with asyncio.timeout(wait):
                await sandbox.removed.wait()
        except TimeoutError:
            return Response(202, sandbox.description)
        return Response(204)

    async def _get_log(self, request: Request, id: str) -> Response:
        """The log from the byte ``offset`` on, or its last ``tail`` lines, or all that is kept."""
        _check_parameters(request, "offset", "tail", "follow")
        sandbox = self._get(id)
        offset, tail = _whole(request, "offset"), _whole(request, "tail")
        follow = request.query.get("follow", "false")
        if follow not in ("true", "false"):
            raise Problem(400, "follow must be true or false")
        if offset is not None and tail is not None:
            raise Problem(400, "offset and tail exclude each other")
        first, end = logs.bounds(sandbox.folder)
        start = (
            await asyncio.to_thread(logs.tail, sandbox.folder, tail) if tail is not None else max(offset or 0, first)
        )
        headers = {"Content-Type": "application/octet-stream", "Holdfast-Log-Offset": str(start)}
        return Response(200, None, headers, _log(sandbox, start, math.inf if follow == "true" else end))

    async def _get_watch(self, request: Request) -> Response:
        _check_parameters(request, "since")
        try:
            at = self._sandboxes.events.position(request.query.get("since", self._sandboxes.events.cursor))
        except EventCursorExpired as error:
            raise Problem(410, str(error)) from None
        except ValueError as error:
            raise Problem(400, str(error)) from None
        return Response(
            200,
            None,
            {"Content-Type": "application/x-ndjson"},
            _lines(self._sandboxes.events.since(at, BOOKMARK_EVERY)),
        )

    def _get(self, id: str) -> Sandbox:
        if (sandbox := self._sandboxes.get(id)) is None:
            raise Problem(404, f"there is no sandbox {id!r}", missing=id)
        return sandbox


async def _lines(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    async for event in events:
        yield json.dumps(event).encode() + b"\n"


async def _log(sandbox: Sandbox, at: float, end: float) -> AsyncIterator[bytes]:
    """The log from ``at`` to ``end``; an infinite ``end`` is the end of the sandbox."""
    while at < end and not sandbox.removed.is_set():
        has_ended = sandbox.facts.exit is not None
        try:
            start, data = logs.read(sandbox.folder, int(at), int(min(logs.BLOCK, end - at)))
        except FileNotFoundError:  # deleted meanwhile
            return
        if data:
            at = start + len(data)
            yield data
        elif has_ended or end != math.inf:
            return
        else:
            await asyncio.sleep(FOLLOW_EVERY)


def _check_parameters(request: Request, *names: str) -> None:
    if unknown := sorted(request.query.keys() - {*names}):
        raise Problem(400, f"{unknown[0][:50]!r} is no parameter here")


def _number(request: Request, name: str, limit: float) -> float | None:
    if name not in request.query:
        return None
    try:
        value = float(request.query[name])
    except ValueError:
        value = math.nan
    if not 0 <= value <= limit:
        raise Problem(400, f"{name} must be a number from 0 to {limit:g}")
    return value


def _whole(request: Request, name: str) -> int | None:
    if name not in request.query:
        return None
    text = request.query[name]
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise Problem(400, f"{name} must be a whole number")
    return int(text)
