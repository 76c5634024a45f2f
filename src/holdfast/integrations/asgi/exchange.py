"""One call of the application: it gets the whole body, and its answer is collected while it is sent to the client.

The last message of an answer is held back until the answer is recorded: a client that has received a complete answer
can get it again. The application is not told that the client has disconnected, so that it ends and its answer is
recorded. Only a stream, which may have no end, is told after ``linger`` seconds.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from holdfast.integrations.asgi.answer import Answer, is_final
from holdfast.integrations.asgi.problem import App, Message, Receive, Scope, Send


class Released(Exception):
    """The request may be tried again: the application raised, or its answer is not final."""


class UnknownEffect(BaseException):
    """The effect of the application is not known. A BaseException, so that the operation is logged as partial."""


class Exchange:
    def __init__(
        self, app: App, scope: Scope, receive: Receive, send: Send, body: bytes, *, limit: int, linger: float
    ) -> None:
        self._app, self._scope, self._from_client, self._to_client = app, scope, receive, send
        self._body: bytes | None = body
        self._limit, self._linger = limit, linger
        self._call: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_connected, self._is_complete = True, False
        self._held: list[Message] = []
        """Messages not sent to the client yet."""
        self._collected: bytearray | None = bytearray()
        """The body of the answer; None if it is too large."""
        self._status, self._headers = 0, list[tuple[str, str]]()
        self._answered, self._closed = asyncio.Event(), asyncio.Event()

    @property
    def called(self) -> bool:
        """Whether the application was called."""
        return self._call is not None

    async def perform(self) -> Answer:
        """Call the application. Returns its answer as soon as it is complete.

        Raises Released if the application failed or its answer is not final, UnknownEffect if it was interrupted.
        """
        self._call = asyncio.ensure_future(self._app(self._scope, self._receive, self._send))
        self._call.add_done_callback(lambda _: self._answered.set())
        try:
            await self._answered.wait()
        except BaseException:  # cancelled: the application must have ended before the operation does
            self._call.cancel()
            await asyncio.wait([self._call])
            raise
        finally:
            if self._watch is not None:
                self._watch.cancel()
        if not self._is_complete:
            if self._closed.is_set() or self._call.cancelled():
                raise UnknownEffect
            error = self._call.exception()
            raise Released("ended without an answer" if error is None else f"raised {type(error).__name__}")
        if not is_final(self._status):
            raise Released(f"answered {self._status}")
        return Answer(self._status, self._headers, None if self._collected is None else bytes(self._collected))

    async def finish(self) -> None:
        """Send the messages that were held back, and wait for the application. Raises its error."""
        assert self._call is not None
        try:
            if self._is_complete:
                await self._flush()
        finally:
            self._close()
            await self._call

    def leave(self) -> None:
        """The client has disconnected."""
        self._is_connected = False
        if self._watch is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._linger, self._close)

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._closed.set()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._closed.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._is_complete or self._closed.is_set():
            if message.get("more_body", False):
                raise OSError("the client has left")
            return  # the last message of an answer that is over
        self._held.append(message)
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = [
                (name.decode("latin-1"), value.decode("latin-1")) for name, value in message.get("headers", ())
            ]
            return
        if message["type"] == "http.response.body":
            self._collect(message.get("body", b""))
            if not message.get("more_body", False):
                self._is_complete = True
                self._answered.set()
                await self._closed.wait()  # background work of the application starts after its answer is sent
                return
            if self._watch is None:
                self._watch = asyncio.ensure_future(self._wait_for_disconnect())
                if not self._is_connected:
                    self.leave()
        await self._flush()

    def _collect(self, body: bytes) -> None:
        if self._collected is not None:
            self._collected += body
            if len(self._collected) > self._limit:
                self._collected = None

    async def _flush(self) -> None:
        held, self._held = self._held, []
        for message in held:
            if not self._is_connected:
                return
            try:
                await self._to_client(message)
            except OSError:
                self.leave()

    async def _wait_for_disconnect(self) -> None:
        with suppress(OSError):
            while (await self._from_client())["type"] != "http.disconnect":
                pass
        self.leave()
