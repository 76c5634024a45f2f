"""ASGI middleware in front of everything: it checks host, origin, token, size and rate of each request.

Every request gets an id, is logged and is measured. Every error behind it is answered with a problem.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote, urlsplit

from starlette.websockets import WebSocketDisconnect

import holdfast
from holdfast.gateway import admission_rules as rules
from holdfast.gateway import logs, tokens
from holdfast.gateway.logs import ERROR, WARNING, log
from holdfast.gateway.problem import problem_from, respond
from holdfast.gateway.request_metrics import RequestMetrics
from holdfast.gateway.settings import Settings
from holdfast.gateway.tokens import LOCAL, Token
from holdfast.problem_json import Problem

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_BODY_WITHIN = 30.0
_CHALLENGE = 'Bearer realm="holdfast", Basic realm="holdfast", charset="UTF-8"'


class _ClientDisconnected(Exception):
    """Before the whole body was received."""


class Admission:
    """Sets ``request_id``, ``principal``, ``may_operate`` and ``is_forwarded`` in ``scope["state"]``; the last says
    whether the request comes from another replica."""

    def __init__(self, app: Any, *, settings: Settings, metrics: RequestMetrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        public = {urlsplit(url).hostname or "" for url in (settings.advertise, settings.entrance) if url}
        self._hosts = frozenset({*settings.hosts, settings.host.lower(), *(name.rstrip(".") for name in public)})
        self._rate_limit = rules.RateLimit(settings.writes, time.monotonic)
        self._failures = rules.RateLimit(rules.FAILURES, time.monotonic)
        self._known: dict[str, None] = {}
        """Addresses from which a token was accepted, perhaps that of a proxy: no failures of others block them."""

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        exchange = _Exchange(scope, send, rules.request_id(headers.get("x-request-id")))
        try:
            token = self._admit(scope, headers)
            exchange.state |= {"principal": token.name, "may_operate": token.scope == "operate"}
            if scope["type"] == "http" and ("content-length" in headers or "transfer-encoding" in headers):
                receive = await _receive_body(headers, receive)
            await self._app(scope, receive, exchange.send)
        except asyncio.CancelledError:  # by uvicorn, when timeout_graceful_shutdown is over
            await exchange.send_problem(Problem(503, "this replica is stopping", headers={"Retry-After": "1"}))
        except _ClientDisconnected:
            exchange.status = exchange.status or 499
        except Exception as error:
            if scope["type"] == "websocket" and isinstance(error, OSError | WebSocketDisconnect):
                exchange.status = exchange.status or 499  # its client has gone
                return
            # After the answer has begun, Starlette raises a RuntimeError that says only this; the reason is its cause.
            cause = error.__cause__ if exchange.status else None
            await exchange.send_problem(_problem(cause if isinstance(cause, holdfast.HoldfastError) else error))
        finally:
            self._record(scope, exchange)

    def _admit(self, scope: Any, headers: dict[str, str]) -> Token:
        """The token of the request. Raises Problem when the request is not allowed."""
        method = scope.get("method", "WEBSOCKET")
        if len(scope["headers"]) > rules.MAX_HEADERS:
            raise Problem(431, f"more than {rules.MAX_HEADERS} headers")
        if sum(len(name) + len(value) for name, value in scope["headers"]) > rules.HEAD_BYTES:
            raise Problem(431, f"the headers have more than {rules.HEAD_BYTES} bytes")
        if "content-length" in headers and "transfer-encoding" in headers:
            raise Problem(400, "a body has a Content-Length or a Transfer-Encoding, not both")
        if len(scope["path"]) > rules.MAX_PATH or len(scope["query_string"]) > rules.MAX_QUERY:
            raise Problem(414, f"a path has at most {rules.MAX_PATH} characters, a query {rules.MAX_QUERY}")
        if repeated := rules.repeated_header(scope["headers"]):
            raise Problem(400, f"more than one {repeated} header")
        if not rules.is_allowed_host(headers.get("host", ""), self._hosts):
            raise Problem(421, "this host is not served here: add it to `hosts` ([gateway], HOLDFAST_HOSTS, --hosts)")
        checks_itself = scope["type"] == "websocket" and rules.SUPERVISOR_PATH.fullmatch(scope["path"])
        is_open = checks_itself or scope["path"] in rules.OPEN_PATHS
        token = LOCAL if is_open else self._authenticate_within_rate(scope, headers)
        if not rules.permits(token.scope, method, scope["path"]):
            may = "read, and not operate" if token.scope == "read" else "send hooks of agents, and nothing else"
            raise Problem(403, f"the token {token.name!r} may {may}")
        if method in rules.SAFE_METHODS or checks_itself:
            return token
        if not rules.is_same_origin(headers):
            raise Problem(403, "a page of another origin sent this request")
        if (seconds := self._rate_limit.take(token.name)) is not None:
            raise Problem(
                429, f"{token.name!r} writes more than {self._settings.writes:g} times a second",
                headers={"Retry-After": str(seconds)},
            )  # fmt: skip
        return token

    def _authenticate_within_rate(self, scope: Any, headers: dict[str, str]) -> Token:
        """The token, also of an address with many failures if it is known. Raises Problem 401, 429."""
        address = rules.address_group((scope.get("client") or ("",))[0])
        if address not in self._known and (seconds := self._failures.wait(address)) is not None:
            detail = "too many requests of your address had no token, or an unknown one"
            raise Problem(429, detail, headers={"Retry-After": str(seconds), "Connection": "close"})
        try:
            token = self._authenticate(scope, headers)
        except Problem:
            self._failures.take(address)
            raise
        self._known.pop(address, None)
        self._known[address] = None
        if len(self._known) > rules.MAX_BUCKETS:
            del self._known[next(iter(self._known))]
        return token

    def _authenticate(self, scope: Any, headers: dict[str, str]) -> Token:
        authorization = headers.get("authorization")
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() == "peer":
            if not scope["app"].state.gateway.peers.accepts(key.strip(), scope.get("method", ""), scope["path"]):
                raise Problem(
                    401, "this request does not come from a replica", headers={"WWW-Authenticate": _CHALLENGE}
                )
            scope["state"]["is_forwarded"] = True
            return Token(unquote(headers.get("x-holdfast-principal", "peer"))[:64], "operate", "")
        if not self._settings.tokens:
            return LOCAL
        secret = tokens.secret_in_header(authorization or "")
        token = tokens.find(secret, self._settings.tokens) if secret else None
        if token is None:
            reason = "a token is needed" if not authorization else "this token is unknown"
            raise Problem(401, f"{reason}: Authorization: Bearer …", headers={"WWW-Authenticate": _CHALLENGE})
        return token

    def _record(self, scope: Any, exchange: _Exchange) -> None:
        method, seconds = scope.get("method", "WEBSOCKET"), time.monotonic() - exchange.began
        # The path of ``route`` lacks the prefix of an included router.
        # private: scope["fastapi"]["effective_route_context"] of FastAPI, tested in tests/test_private_names.py
        matched = scope.get("fastapi", {}).get("effective_route_context") or scope.get("route")
        route = getattr(matched, "path", None)
        self._metrics.observe(method, route, exchange.status, seconds)
        if scope["path"] in (*rules.OPEN_PATHS, "/metrics") and exchange.status < 400:
            return  # requested every few seconds
        client = scope.get("client") or ("",)
        log.event(
            "request", method=method, path=scope["path"], route=route, status=exchange.status,
            milliseconds=round(seconds * 1000, 1), principal=exchange.state.get("principal"), client=client[0],
        )  # fmt: skip


class _Exchange:
    """One request and its answer. ``status`` is 0 until the answer has begun."""

    def __init__(self, scope: Any, send: Send, request_id: str) -> None:
        self._scope, self._send, self._request_id = scope, send, request_id
        self.state: dict[str, Any] = scope.setdefault("state", {})
        self.state |= {"request_id": request_id, "is_forwarded": False}
        logs.request_id.set(request_id)
        self.began, self.status = time.monotonic(), 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            given = {name.lower() for name, _ in message["headers"]}
            defaults = {"x-request-id": self._request_id, **rules.HEADERS}
            added = [(name.encode(), value.encode()) for name, value in defaults.items() if name.encode() not in given]
            message = {**message, "headers": [*message["headers"], *added]}
        elif message["type"] == "websocket.accept":
            self.status = 101
        await self._send(message)

    async def send_problem(self, problem: Problem) -> None:
        """Answer with ``problem``. An answer that has begun is cut short instead, and that is logged."""
        if self.status:
            log.event("request.cut", WARNING, why=problem.detail)
            return
        if self._scope["type"] == "websocket":
            self.status = problem.status
            await self._send({"type": "websocket.close", "code": 1008, "reason": problem.title})
            return

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        await respond(problem, self._request_id)(self._scope, receive, self.send)


def _problem(error: Exception) -> Problem:
    """The problem for ``error``. An unexpected error is logged, and the answer says nothing about it."""
    try:
        return problem_from(error)
    except Exception:
        log.event("request.failed", ERROR, exc_info=error)
        return Problem(500, "an unexpected error; the log has it under this requestId")


async def _receive_body(headers: dict[str, str], receive: Receive) -> Receive:
    """Read the whole body, within bounds of size and time, and return a ``receive`` that replays it.

    The application need not guard against clients that send too much or never end. Raises Problem or
    _ClientDisconnected.
    """
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
                    raise _ClientDisconnected
                body += message.get("body", b"")
                if len(body) > rules.BODY_BYTES:
                    raise too_large
                if not message.get("more_body"):
                    break
    except TimeoutError:
        close = {"Connection": "close"}
        raise Problem(408, f"the body did not come within {_BODY_WITHIN:g} seconds", headers=close) from None
    if reason := rules.json_body_error(bytes(body)):
        raise Problem(400, reason)
    pending: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
