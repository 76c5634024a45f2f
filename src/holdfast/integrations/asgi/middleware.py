"""The middleware: what a request with an Idempotency-Key is answered with, by the application or from the log."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

import holdfast
from holdfast.integrations.asgi import options, problem
from holdfast.integrations.asgi.answer import MOST_KEPT, Answer
from holdfast.integrations.asgi.exchange import Exchange, Interrupted, Released
from holdfast.integrations.asgi.header import parse
from holdfast.integrations.asgi.problem import App, Problem, Receive, Scope, Send
from holdfast.integrations.asgi.request import fingerprint, header, operation_key, read_body

log = logging.getLogger("holdfast.asgi")

OFTEN = 1 << 60
"""Attempts: a request that failed may be tried again as often as somebody sends it."""
DAY = 86400.0


class IdempotencyMiddleware:
    """Answers a request that was sent before with the answer that it had then.

    ``client``: an AsyncClient, or a function of the scope that finds it, for one that is opened by the application's
    lifespan. ``principal``: a function of the scope that says whose key it is. ``required``: whether a request without
    a key is refused, or a function of the scope that says so. ``wait``: seconds for which a retry waits for one that is
    under way; 0: it hears 409 at once. ``keep``: seconds for which answers are given again; after that it is 410, and
    never a second effect. ``on_partial``: what becomes of a request whose server died: "refuse", "retry" (the
    application sees to it itself), or a function of scope and body that finds out: an Answer, True to call the
    application again, or False. ``replay_headers``: further headers to be repeated. ``max_body``, ``max_kept``: bytes
    of a request, and of an answer that is kept. ``linger``: seconds for which a stream may go on when its client has
    left. ``ttl``: seconds after which a server that died counts as dead.
    """

    def __init__(
        self,
        app: App,
        client: options.Client,
        *,
        principal: Callable[[Scope], str],
        required: bool | Callable[[Scope], bool] = False,
        methods: Iterable[str] = ("POST", "PATCH"),
        wait: float = 0.0,
        keep: float | None = DAY,
        on_partial: options.OnPartial = "refuse",
        replay_headers: Iterable[str] = (),
        max_body: int = 1 << 20,
        max_kept: int = MOST_KEPT,
        linger: float = 30.0,
        ttl: float = 30.0,
    ) -> None:
        options.check_functions(principal, client, on_partial)
        self.app, self._client, self._principal, self._required = app, client, principal, required
        self._methods, self._repeated = options.check_methods(methods), options.check_headers(replay_headers)
        self._on_partial, number = on_partial, options.check_number
        self._max_body = number("max_body", max_body, 0, 1 << 40)
        self._max_kept = number("max_kept", max_kept, 0, MOST_KEPT)
        self._linger = number("linger", linger, 0.0, DAY)
        self._terms: dict[str, Any] = {
            "when_locked": "wait" if number("wait", wait, 0.0, DAY) else "fail", "timeout": wait,
            "keep": None if keep is None else number("keep", keep, 0.001, 3650 * DAY), "reuse": False,
            "ttl": number("ttl", ttl, 0.05, DAY), "max_attempts": OFTEN,
        }  # fmt: skip
        self._working: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in self._methods:
            return await self.app(scope, receive, send)
        try:
            key = self._key(scope)
            if key is None:
                return await self.app(scope, receive, send)
            body = await read_body(scope, receive, self._max_body)
            if body is None:
                return None  # the client has left, and nothing has begun
        except Problem as wrong:
            return await wrong.send(scope, send)
        _ask_for_bytes(scope)
        exchange = Exchange(self.app, scope, receive, send, body, most=self._max_kept, linger=self._linger)
        work = asyncio.ensure_future(self._work(exchange, key, scope, body, send))
        self._working.add(work)
        work.add_done_callback(self._working.discard)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            exchange.leave()
            work.add_done_callback(_tell)
            raise

    def _key(self, scope: Scope) -> str | None:
        """The operation that it is; None when it has no key, and needs none."""
        value = header(scope, b"idempotency-key")
        if value is None:
            if self._required(scope) if callable(self._required) else self._required:
                raise problem.missing()
            return None
        try:
            key = parse(value)
        except ValueError as error:
            raise problem.malformed(error) from None
        whose: Any = self._principal(scope)
        if not isinstance(whose, str) or not whose:
            raise TypeError(
                f"principal must say whose key it is by a str that is not empty, not {type(whose).__name__}"
            )
        return operation_key(whose, scope["method"], scope["path"], key)

    async def _work(self, exchange: Exchange, key: str, scope: Scope, body: bytes, send: Send) -> None:
        """From the claim to the recorded answer, whether or not anybody is left to hear it."""

        async def perform() -> bytes:
            return (await exchange.perform()).dump(self._repeated, self._max_kept)

        async def probe(op: Any) -> Any:
            return await self._find_out(op, scope, body)

        verify = None if self._on_partial == "refuse" else probe
        client = self._client if isinstance(self._client, holdfast.AsyncClient) else self._client(scope)
        operation = client.operation(key, payload=fingerprint(scope, body), verify=verify, **self._terms)
        try:
            outcome = await operation.run(perform)
            if not exchange.called:
                if outcome.status == "expired":
                    raise problem.gone("is not kept any more")
                return await Answer.load(outcome.result).replay(send)
        except (Released, Interrupted):
            pass
        except Exception as error:
            if not exchange.called:
                return await problem.problem_of(error).send(scope, send)
            log.exception(
                "%s was answered, and that could not be recorded: it reads as left half done",
                key,
                extra={"event": "request.unrecorded", "key": str(key)},
            )
        return await exchange.finish()

    async def _find_out(self, op: Any, scope: Scope, body: bytes) -> Any:
        """What became of an attempt that died: done, to be tried again, or not to be known."""
        if self._on_partial == "retry":
            return False
        assert callable(self._on_partial)
        found = self._on_partial(scope, body)
        said: Any = await found if inspect.isawaitable(found) else found
        if isinstance(said, Answer):
            return op.done(said.dump(self._repeated, self._max_kept))
        if said is True:
            return False
        raise problem.interrupted(op.key.digest)


def _ask_for_bytes(scope: Scope) -> None:
    """Whatever else a server could send could not be kept. In place: others see there which route was taken."""
    if extensions := scope.get("extensions"):
        scope["extensions"] = {name: said for name, said in extensions.items() if not name.startswith("http.response.")}


def _tell(work: asyncio.Task[None]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        log.error(
            "a request whose client had left ended with an error",
            exc_info=error,
            extra={"event": "request.failed", "why": "its client had left"},
        )
