"""One call of the application: it is given the whole body, and what it answers is kept while it goes to the client.

The end of an answer is held back until it is recorded, so whoever has all of an answer can have it again. The
application does not hear that its client has left: what was begun is ended and recorded. Only a stream, which may have
no end, hears of it after a while.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from holdfast.integrations.asgi.answer import Answer, is_final
from holdfast.integrations.asgi.problem import App, Message, Receive, Scope, Send


class Released(Exception):
    """The request may be tried again: the application failed, or says that it did."""


class Interrupted(BaseException):
    """What the application has done is not known. No Exception, so that the operation stays half done in the log."""


class Exchange:
    def __init__(
        self, app: App, scope: Scope, receive: Receive, send: Send, body: bytes, *, most: int, linger: float
    ) -> None:
        self._app, self._scope, self._from_client, self._to_client = app, scope, receive, send
        self._body: bytes | None = body
        self._most, self._linger = most, linger
        self._call: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._listens, self._complete = True, False
        self._held: list[Message] = []
        self._kept: bytearray | None = bytearray()
        self._status, self._headers = 0, list[tuple[str, str]]()
        self._answered, self._closed = asyncio.Event(), asyncio.Event()

    @property
    def called(self) -> bool:
        """Whether the application was."""
        return self._call is not None

    async def perform(self) -> Answer:
        """The application's answer as soon as it is whole; Released when it is not one to be kept."""
        self._call = asyncio.ensure_future(self._app(self._scope, self._receive, self._send))
        self._call.add_done_callback(lambda _: self._answered.set())
        try:
            await self._answered.wait()
        except BaseException:  # our own end: nothing may go on when others hear of it
            self._call.cancel()
            await asyncio.wait([self._call])
            raise
        finally:
            if self._watch is not None:
                self._watch.cancel()
        if not self._complete:
            if self._closed.is_set() or self._call.cancelled():
                raise Interrupted
            error = self._call.exception()
            raise Released("ended without an answer" if error is None else f"raised {type(error).__name__}")
        if not is_final(self._status):
            raise Released(f"answered {self._status}")
        return Answer(self._status, self._headers, None if self._kept is None else bytes(self._kept))

    async def finish(self) -> None:
        """Send what was held back, then let the application end; its error, if it has one."""
        assert self._call is not None
        try:
            if self._complete:
                await self._flush()
        finally:
            self._close()
            await self._call

    def leave(self) -> None:
        """Nobody listens any more."""
        self._listens = False
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
        if self._complete or self._closed.is_set():
            if message.get("more_body", False):
                raise OSError("the client has left")
            return  # an end that nobody waits for
        self._held.append(message)
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = [
                (name.decode("latin-1"), value.decode("latin-1")) for name, value in message.get("headers", ())
            ]
            return
        if message["type"] == "http.response.body":
            self._keep(message.get("body", b""))
            if not message.get("more_body", False):
                self._complete = True
                self._answered.set()
                await self._closed.wait()  # what it does after its answer comes after it
                return
            if self._watch is None:
                self._watch = asyncio.ensure_future(self._notice_leaving())
                if not self._listens:
                    self.leave()
        await self._flush()

    def _keep(self, body: bytes) -> None:
        if self._kept is not None:
            self._kept += body
            if len(self._kept) > self._most:
                self._kept = None

    async def _flush(self) -> None:
        held, self._held = self._held, []
        for message in held:
            if not self._listens:
                return
            try:
                await self._to_client(message)
            except OSError:
                self.leave()

    async def _notice_leaving(self) -> None:
        with suppress(OSError):
            while (await self._from_client())["type"] != "http.disconnect":
                pass
        self.leave()
