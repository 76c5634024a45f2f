"""As much of HTTP/1.1 as the driver needs, and strict about it: what is ambiguous is refused, everything is bounded.

A body comes with a length or not at all. An error is `application/problem+json`, never a traceback.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

HEAD_BYTES, BODY_BYTES = 16_384, 2**20
READ_WITHIN, IDLE, LOOK_EVERY = 10.0, 75.0, 0.5
CONNECTIONS, STREAMS = 512, 256
"""At a time; and how many of them may be streams, which may have no end: whoever has a question gets through."""
_REQUEST = re.compile(rb"([A-Z]{1,16}) (/[\x21-\x7e]*) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\x80-\xff\t]*?)[ \t]*")


class Problem(Exception):
    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None, **more: Any) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers, self.more = status, detail, headers or {}, more


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = b""
    id: str = field(default_factory=lambda: os.urandom(8).hex())

    def json(self) -> Any:
        if self.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Problem(415, "the body must be application/json")
        try:
            return json.loads(self.body, parse_constant=_no_constant, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise Problem(400, f"the body is not valid JSON: {error}") from None


@dataclass
class Answer:
    status: int
    value: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    stream: AsyncIterator[bytes] | None = None


Handler = Callable[[Request], Awaitable[Answer]]


class Server:
    """Serves connections, each a task, until it is closed. ``failed`` is told of errors nobody expected."""

    def __init__(self, handle: Handler, failed: Callable[[Request, Exception], None]) -> None:
        self._handle, self._failed = handle, failed
        self._streams = 0
        self._tasks: dict[asyncio.Task[None], bool] = {}
        """Those that serve a connection, and whether one may be cut: it is idle, or a stream that has no end."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = True
        try:
            if len(self._tasks) > CONNECTIONS:
                await _send(writer, _problem(Problem(503, "too many connections")), close=True)
                return
            while await self._exchange(reader, writer, task):
                self._tasks[task] = True
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the other side is gone, or so are we
        finally:
            del self._tasks[task]
            writer.close()

    async def close(self, within: float) -> None:
        """Answers that are being made are finished, the rest is cut."""
        for task, may_be_cut in self._tasks.items():
            if may_be_cut:
                task.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=within)
            for task in late:
                task.cancel()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> bool:
        """One request and its answer; whether another may follow."""
        try:
            head = await _head(reader)
            if head is None:
                return False
            request, keep = _parse(head)
            self._tasks[task] = False
            await _read_body(request, reader, writer)
        except Problem as problem:
            await _send(writer, _problem(problem), close=True)
            self._tasks[task] = True
            await _hear_out(reader, writer)
            return False
        try:
            answer = await self._handle(request)
        except Problem as problem:
            answer = _problem(problem, request.id)
        except Exception as error:
            self._failed(request, error)
            answer = _problem(Problem(500, "the driver failed; its log says more"), request.id)
        if answer.stream is not None and self._streams >= STREAMS:
            keep, answer = False, _problem(Problem(503, "too many watches and logs", {"Retry-After": "1"}), request.id)
        answer.headers["X-Request-Id"] = request.id
        if answer.stream is None:
            await _send(writer, answer, close=not keep, bare=request.method == "HEAD")
            return keep
        self._tasks[task] = True
        async with self._heard(task, reader):
            await _send(writer, answer, close=not keep)
        return keep

    @asynccontextmanager
    async def _heard(self, task: asyncio.Task[None], reader: asyncio.StreamReader) -> AsyncIterator[None]:
        """A stream, as long as somebody hears it: one with nothing to tell, the log of a quiet sandbox, would never
        learn that nobody does."""

        async def listen() -> None:
            while not reader.at_eof():  # noqa: ASYNC110
                await asyncio.sleep(LOOK_EVERY)
            task.cancel()

        listening, self._streams = asyncio.create_task(listen()), self._streams + 1
        try:
            yield
        finally:
            listening.cancel()
            self._streams -= 1


async def _head(reader: asyncio.StreamReader) -> bytes | None:
    """None when the other side has nothing more to ask."""
    try:
        async with asyncio.timeout(IDLE):
            first = await reader.read(1)
        if not first:
            return None
        async with asyncio.timeout(READ_WITHIN):
            return first + await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise Problem(431, f"the head is larger than {HEAD_BYTES} bytes") from None


def _parse(head: bytes) -> tuple[Request, bool]:
    first, *lines = head[:-4].split(b"\r\n")
    asked = _REQUEST.fullmatch(first)
    if asked is None:
        raise Problem(400, "this is no request of HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        found = _HEADER.fullmatch(line)
        if found is None:
            raise Problem(400, "a header is malformed")
        name = found[1].decode("ascii").lower()
        if name in headers and name in ("host", "content-length", "authorization", "transfer-encoding"):
            raise Problem(400, f"{name} stands there twice")
        headers[name] = found[2].decode("latin-1")
    if asked[3] == b"1" and "host" not in headers:
        raise Problem(400, "there is no Host")
    if "transfer-encoding" in headers:
        raise Problem(501, "the body must come with its Content-Length")
    path, _, query = asked[2].decode("ascii").partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, errors="strict") if query else []
    except ValueError:
        raise Problem(400, "the parameters are malformed") from None
    if len(dict(pairs)) != len(pairs):
        raise Problem(400, "a parameter stands there twice")
    keep = asked[3] == b"1" and "close" not in headers.get("connection", "").lower()
    return Request(asked[1].decode("ascii"), path, dict(pairs), headers), keep


async def _read_body(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal() and len(length) < 16):
        raise Problem(400, "Content-Length must be a number")
    if int(length) > BODY_BYTES:
        raise Problem(413, f"the body is larger than {BODY_BYTES} bytes")
    if int(length):
        if request.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        async with asyncio.timeout(READ_WITHIN):
            request.body = await reader.readexactly(int(length))


async def _hear_out(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Whoever is cut off in the middle of a body that is too large never reads why: what is left of it is let go by."""
    writer.write_eof()
    async with asyncio.timeout(READ_WITHIN):
        while await reader.read(HEAD_BYTES):
            pass


async def _send(writer: asyncio.StreamWriter, answer: Answer, *, close: bool, bare: bool = False) -> None:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **answer.headers}
    body = b""
    if answer.stream is not None:
        headers["Transfer-Encoding"] = "chunked"
    elif answer.value is not None:
        body = json.dumps(answer.value).encode() + b"\n"
        headers.setdefault("Content-Type", "application/json")
    if answer.stream is None and answer.status != HTTPStatus.NO_CONTENT:
        headers["Content-Length"] = str(len(body))
    if close:
        headers["Connection"] = "close"
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + (b"" if bare else body))
    if answer.stream is not None:
        async for part in answer.stream:
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
    await writer.drain()


def _problem(problem: Problem, request_id: str | None = None) -> Answer:
    value = {
        "type": "about:blank",
        "title": HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": problem.detail,
        **problem.more,
    }
    if request_id:
        value["requestId"] = request_id
    return Answer(problem.status, value, {"Content-Type": "application/problem+json", **problem.headers})


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name stands there twice in one object")
    return dict(pairs)
