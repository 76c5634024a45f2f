"""The middleware: answers a request with an Idempotency-Key by calling the application, or from the log."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import holdfast
from holdfast.integrations.asgi import options, problem
from holdfast.integrations.asgi.answer import MAX_STORED, Answer
from holdfast.integrations.asgi.exchange import Exchange, Released, UnknownEffect
from holdfast.integrations.asgi.header import parse
from holdfast.integrations.asgi.problem import App, Receive, Scope, Send, send_problem
from holdfast.integrations.asgi.request import fingerprint, header, operation_key, read_body
from holdfast.problem_json import Problem
from holdfast.telemetry import ERROR, logger

log = logger("holdfast.asgi")

UNLIMITED_ATTEMPTS = 1 << 60
"""A request that failed may be sent again any number of times."""
DAY = 86400.0


class IdempotencyMiddleware:
    """Answers a repeated request with the answer of the first one.

    ``client``: an AsyncClient, or a function of the scope that returns it, for one that the application's lifespan
    opens. ``principal``: a function of the scope that returns the owner of the key. ``required``: whether a request
    without a key is refused, or a function of the scope that decides. ``wait``: seconds for which a retry waits for a
    request that is running; 0: 409 at once. ``keep``: seconds for which answers are replayed; after that 410, and never
    a second effect. ``on_partial``: what happens to a request whose server died: "refuse", "retry" (the application
    handles it), or a function of scope and body that returns an Answer, True to call the application again, or False to
    refuse. ``replay_headers``: further headers to repeat. ``max_body``, ``max_kept``: bytes of a request, and of a
    stored answer. ``seal``: encrypts stored answers. ``linger``: seconds that a stream may continue after its client
    has disconnected. ``ttl``: seconds after which a server that died counts as dead.
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
        max_kept: int = MAX_STORED,
        seal: options.AnswerSeal | None = None,
        linger: float = 30.0,
        ttl: float = 30.0,
    ) -> None:
        options.check_functions(principal, client, on_partial)
        self.app, self._client, self._principal, self._required = app, client, principal, required
        self._methods, self._repeated = options.check_methods(methods), options.check_headers(replay_headers)
        self._on_partial, number = on_partial, options.check_number
        self._max_body = number("max_body", max_body, 0, 1 << 40)
        self._max_kept = number("max_kept", max_kept, 0, MAX_STORED)
        self._seal = seal
        if seal is not None:
            self._max_kept = min(self._max_kept, MAX_STORED * 3 // 4 - 1000)
        self._linger = number("linger", linger, 0.0, DAY)
        self._terms: dict[str, Any] = {
            "when_locked": "wait" if number("wait", wait, 0.0, DAY) else "fail", "timeout": wait,
            "keep": None if keep is None else number("keep", keep, 0.001, 3650 * DAY),
            "ttl": number("ttl", ttl, 0.05, DAY), "retry": holdfast.Retry(attempts=UNLIMITED_ATTEMPTS),
            "options": holdfast.OperationOptions(reuse=False),
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
                return None  # the client has disconnected, and nothing has begun
        except Problem as error:
            return await send_problem(error, scope, send)
        _disable_response_extensions(scope)
        exchange = Exchange(self.app, scope, receive, send, body, limit=self._max_kept, linger=self._linger)
        work = asyncio.ensure_future(self._work(exchange, key, scope, body, send))
        self._working.add(work)
        work.add_done_callback(self._working.discard)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            exchange.leave()
            work.add_done_callback(_log_error)
            raise

    def _key(self, scope: Scope) -> str | None:
        """The operation key; None if the request has no Idempotency-Key and needs none."""
        value = header(scope, b"idempotency-key")
        if value is None:
            if self._required(scope) if callable(self._required) else self._required:
                raise problem.missing()
            return None
        try:
            key = parse(value)
        except ValueError as error:
            raise problem.malformed(error) from None
        principal: Any = self._principal(scope)
        if not isinstance(principal, str) or not principal:
            raise TypeError(
                f"principal must return the owner of the key, a non-empty str, not {type(principal).__name__}"
            )
        return operation_key(principal, scope["method"], scope["path"], key)

    async def _work(self, exchange: Exchange, key: str, scope: Scope, body: bytes, send: Send) -> None:
        """From the claim to the recorded answer, whether or not the client is still connected."""

        async def perform() -> bytes:
            return self._dump(await exchange.perform(), key)

        async def probe(op: Any) -> Any:
            return await self._verify(op, scope, body, key)

        verify = None if self._on_partial == "refuse" else probe
        client = self._client if isinstance(self._client, holdfast.AsyncClient) else self._client(scope)
        operation = client.operation(key, payload=fingerprint(scope, body), verify=verify, **self._terms)
        try:
            outcome = await operation.run(perform)
            if not exchange.called:
                if outcome.status == "expired":
                    raise problem.gone("is not kept any more")
                stored = outcome.result if self._seal is None else self._seal.open(outcome.result, key)
                return await Answer.load(stored).replay(send)
        except (Released, UnknownEffect):
            pass
        except Exception as error:
            if not exchange.called:
                return await send_problem(problem.problem_of(error), scope, send)
            log.event(
                "request.unrecorded", ERROR,
                "%(key)s was answered, but the answer could not be recorded: the operation counts as partial",
                exc_info=True, key=key,
            )  # fmt: skip
        return await exchange.finish()

    def _dump(self, answer: Answer, key: str) -> bytes:
        """The answer as it is stored."""
        data = answer.dump(self._repeated, self._max_kept)
        return data if self._seal is None else self._seal.close(data, key)

    async def _verify(self, op: Any, scope: Scope, body: bytes, key: str) -> Any:
        """Decide about an attempt that died: ``op.done(answer)``, False to try again. Raises a 409 if it is unknown."""
        if self._on_partial == "retry":
            return False
        assert callable(self._on_partial)
        result = self._on_partial(scope, body)
        decision: Any = await result if inspect.isawaitable(result) else result
        if isinstance(decision, Answer):
            return op.done(self._dump(decision, key))
        if decision is True:
            return False
        raise problem.interrupted(op.key.digest)


def _disable_response_extensions(scope: Scope) -> None:
    """Remove extensions such as http.response.pathsend, whose content could not be stored.

    The scope is changed in place, because frameworks add the matched route to it.
    """
    if extensions := scope.get("extensions"):
        scope["extensions"] = {
            name: value for name, value in extensions.items() if not name.startswith("http.response.")
        }


def _log_error(work: asyncio.Task[None]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        text = "a request whose client had left ended with an error"
        log.event("request.failed", ERROR, text, exc_info=error, why="its client had left")
