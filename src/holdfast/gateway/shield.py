"""Stands before everything, pure ASGI: who may ask, from where, how much and how often; a number for each request.

Nothing passes it unnumbered, unlogged or unmeasured, and nothing that goes wrong behind it gets out but as a problem.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import holdfast
from holdfast.gateway import logs, rules, tokens
from holdfast.gateway.meter import Meter
from holdfast.gateway.problem import Problem, answer, problem_of
from holdfast.gateway.settings import Settings
from holdfast.gateway.tokens import LOCAL, Token

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_BODY_WITHIN = 30.0
_CHALLENGE = 'Bearer realm="holdfast", Basic realm="holdfast", charset="UTF-8"'


class _Gone(Exception):
    """The client went before it had said all."""


class Shield:
    """Behind it, ``scope["state"]`` has the ``request_id`` and the ``principal``."""

    def __init__(self, app: Any, *, settings: Settings, meter: Meter) -> None:
        self._app, self._settings, self._meter = app, settings, meter
        sent = {urlsplit(each).hostname or "" for each in (settings.advertise, settings.entrance) if each}
        self._hosts = frozenset({*settings.hosts, settings.host.lower(), *(each.rstrip(".") for each in sent)})
        self._rates = rules.Rates(settings.writes, time.monotonic)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        exchange = _Exchange(scope, send, rules.number_of(headers.get("x-request-id")))
        try:
            token = self._admitted(scope, headers)
            exchange.state["principal"] = token.name
            if scope["type"] == "http" and ("content-length" in headers or "transfer-encoding" in headers):
                receive = await _whole(headers, receive)
            await self._app(scope, receive, exchange.send)
        except asyncio.CancelledError:  # by the server, when it has waited long enough for the end
            await exchange.refuse(Problem(503, "this replica is stopping", headers={"Retry-After": "1"}))
        except _Gone:
            exchange.status = exchange.status or 499
        except Exception as error:
            cause = error.__cause__ if exchange.status else None  # the framework's own says only that it has begun
            await exchange.refuse(_problem(cause if isinstance(cause, holdfast.HoldfastError) else error))
        finally:
            self._tell(scope, exchange)

    def _admitted(self, scope: Any, headers: dict[str, str]) -> Token:
        """Whoever asks; Problem when it may not."""
        method = scope.get("method", "WEBSOCKET")
        if len(scope["headers"]) > rules.MOST_HEADERS:
            raise Problem(431, f"more than {rules.MOST_HEADERS} headers")
        if len(scope["path"]) > rules.LONGEST_PATH or len(scope["query_string"]) > rules.LONGEST_QUERY:
            raise Problem(414, f"a path has at most {rules.LONGEST_PATH} characters, a query {rules.LONGEST_QUERY}")
        if not rules.is_host_ours(headers.get("host", ""), self._hosts):
            raise Problem(421, "this host is not served here: name it in `hosts` ([gateway], HOLDFAST_HOSTS, --hosts)")
        own = scope["type"] == "websocket" and rules.SUPERVISOR.fullmatch(scope["path"])  # has a token of its own kind
        token = LOCAL if own or scope["path"] in rules.OPEN else self._known(headers.get("authorization"))
        if method in rules.SAFE:
            return token
        if not rules.is_origin_ours(headers):
            raise Problem(403, "a page of another origin asked for this")
        if token.scope != "operate":
            raise Problem(403, f"the token {token.name!r} may read, and not operate")
        if (seconds := self._rates.wait(token.name)) is not None:
            told = {"Retry-After": str(seconds)}
            raise Problem(
                429, f"{token.name!r} writes more than {self._settings.writes:g} times a second", headers=told
            )
        return token

    def _known(self, authorization: str | None) -> Token:
        if not self._settings.tokens:
            return LOCAL
        secret = tokens.presented(authorization or "")
        found = tokens.known(secret, self._settings.tokens) if secret else None
        if found is None:
            why = "a token is needed" if not authorization else "this token is not known"
            raise Problem(401, f"{why}: Authorization: Bearer …", headers={"WWW-Authenticate": _CHALLENGE})
        return found

    def _tell(self, scope: Any, exchange: _Exchange) -> None:
        method, seconds = scope.get("method", "WEBSOCKET"), time.monotonic() - exchange.began
        found = scope.get("fastapi", {}).get("effective_route_context") or scope.get("route")
        route = getattr(found, "path", None)  # the first one knows the prefix of its router, too
        self._meter.observe(method, route, exchange.status, seconds)
        if scope["path"] in (*rules.OPEN, "/metrics") and exchange.status < 400:
            return  # asked every few seconds, for as long as we live
        client = scope.get("client") or ("",)
        logs.say(
            "request", method=method, path=scope["path"], route=route, status=exchange.status,
            milliseconds=round(seconds * 1000, 1), principal=exchange.state.get("principal"), client=client[0],
        )  # fmt: skip


class _Exchange:
    """One request and what is answered to it."""

    def __init__(self, scope: Any, send: Send, number: str) -> None:
        self._scope, self._send, self.number = scope, send, number
        self.state: dict[str, Any] = scope.setdefault("state", {})
        self.state["request_id"] = number
        logs.request_id.set(number)
        self.began, self.status = time.monotonic(), 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            given = {name.lower() for name, _ in message["headers"]}
            ours = {"x-request-id": self.number, **rules.HEADERS}
            added = [(n.encode(), v.encode()) for n, v in ours.items() if n.encode() not in given]
            message = {**message, "headers": [*message["headers"], *added]}
        elif message["type"] == "websocket.accept":
            self.status = 101
        await self._send(message)

    async def refuse(self, problem: Problem) -> None:
        """Instead of an answer; where one has begun, there is nothing to be said any more: it ends before its end."""
        if self.status:
            logs.say("request.cut", logging.WARNING, why=problem.detail)
            return
        if self._scope["type"] == "websocket":
            self.status = problem.status
            await self._send({"type": "websocket.close", "code": 1008, "reason": problem.title})
            return

        async def nothing() -> Message:
            return {"type": "http.disconnect"}

        await answer(problem, self.number)(self._scope, nothing, self.send)


def _problem(error: Exception) -> Problem:
    """What nobody expected is in the log, and nothing of it in the answer."""
    try:
        return problem_of(error)
    except Exception:
        logs.say("request.failed", logging.ERROR, error=error)
        return Problem(500, "something went wrong here; the logs know it by its requestId")


async def _whole(headers: dict[str, str], receive: Receive) -> Receive:
    """The body, all of it, and no more than there may be: what is behind need not fear a client that never ends."""
    too_large = Problem(413, f"a body has at most {rules.BODY_BYTES} bytes", headers={"Connection": "close"})
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > rules.BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_WITHIN):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Gone
                body += message.get("body", b"")
                if len(body) > rules.BODY_BYTES:
                    raise too_large
                if not message.get("more_body"):
                    break
    except TimeoutError:
        late = {"Connection": "close"}
        raise Problem(408, f"the body did not come within {_BODY_WITHIN:g} seconds", headers=late) from None
    if why := rules.unspeakable(bytes(body)):
        raise Problem(400, why)
    kept: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def again() -> Message:
        return kept.pop() if kept else await receive()

    return again
