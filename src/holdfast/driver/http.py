"""The part of HTTP/1.1 that the driver needs. Ambiguous requests are refused, and everything is bounded.

A body needs a Content-Length. An error is answered as a Problem, never a traceback.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from holdfast.problem_json import MEDIA_TYPE, Problem

HEAD_BYTES, BODY_BYTES = 16_384, 2**20
READ_WITHIN, IDLE, POLL_EVERY = 10.0, 75.0, 0.5
CONNECTIONS, STREAMS, STRANGERS = 512, 256, 256
"""At a time; how many of them may be streams, which may have no end and must not block other requests; and how many may
be without an admitted request yet. If there are too many, the oldest is closed."""
ADMITTED_WITHIN = 10.0
"""Seconds until the head of the first request is complete."""
_REQUEST = re.compile(rb"([A-Z]{1,16}) (/[\x21-\x7e]*) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\x80-\xff\t]*?)[ \t]*")


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
            return json.loads(self.body, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates)
        except (ValueError, RecursionError) as error:
            raise Problem(400, f"the body is not valid JSON: {error}") from None


@dataclass
class Response:
    status: int
    value: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    stream: AsyncIterator[bytes] | None = None


Handler = Callable[[Request], Awaitable[Response]]
Admit = Callable[[Request], None]


class HttpServer:
    """Serves connections, each in a task, until it is closed. ``admit`` raises Problem for a request that is not
    allowed, whatever it is for; its body is not read then. ``on_error`` is called for unexpected errors."""

    def __init__(self, admit: Admit, handle: Handler, on_error: Callable[[Request, Exception], None]) -> None:
        self._admit, self._handle, self._on_error = admit, handle, on_error
        self._strangers: dict[asyncio.Task[None], None] = {}
        """Connections without an admitted request yet, the oldest first."""
        self._streams = 0
        self._tasks: dict[asyncio.Task[None], bool] = {}
        """The tasks of connections, and whether one may be cancelled: it is idle, or a stream."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = True
        self._strangers[task] = None
        if len(self._strangers) > STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        try:
            if len(self._tasks) > CONNECTIONS:
                await _send(writer, _problem(Problem(503, "too many connections")), close=True)
                return
            while await self._exchange(reader, writer, task):
                self._tasks[task] = True
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has gone, or the server is closing
        finally:
            del self._tasks[task]
            self._strangers.pop(task, None)
            writer.close()

    async def close(self, within: float) -> None:
        """Wait for running requests, at most ``within`` seconds, and cancel idle connections and streams at once."""
        for task, is_cancellable in self._tasks.items():
            if is_cancellable:
                task.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=within)
            for task in late:
                task.cancel()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> bool:
        """Serve one request; whether another may follow."""
        try:
            async with asyncio.timeout(ADMITTED_WITHIN if task in self._strangers else None):
                head = await _head(reader)
            if head is None:
                return False
            request, keep = _parse(head)
            self._admit(request)
            self._strangers.pop(task, None)
            self._tasks[task] = False
            await _read_body(request, reader, writer)
        except Problem as problem:
            await _send(writer, _problem(problem), close=True)
            self._tasks[task] = True
            await _discard_body(reader, writer)
            return False
        try:
            response = await self._handle(request)
        except Problem as problem:
            response = _problem(problem, request.id)
        except Exception as error:
            self._on_error(request, error)
            response = _problem(Problem(500, "the driver failed; its log says more"), request.id)
        if response.stream is not None and self._streams >= STREAMS:
            keep, response = (
                False,
                _problem(Problem(503, "too many watches and logs", headers={"Retry-After": "1"}), request.id),
            )
        response.headers["X-Request-Id"] = request.id
        if response.stream is None:
            await _send(writer, response, close=not keep, without_body=request.method == "HEAD")
            return keep
        self._tasks[task] = True
        async with self._cancel_on_disconnect(task, reader):
            await _send(writer, response, close=not keep)
        return keep

    @asynccontextmanager
    async def _cancel_on_disconnect(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader
    ) -> AsyncIterator[None]:
        """Cancel a stream when its client disconnects: the log of a quiet sandbox writes nothing, so no write fails."""

        async def poll() -> None:
            while not reader.at_eof():  # noqa: ASYNC110
                await asyncio.sleep(POLL_EVERY)
            task.cancel()

        polling, self._streams = asyncio.create_task(poll()), self._streams + 1
        try:
            yield
        finally:
            polling.cancel()
            self._streams -= 1


async def _head(reader: asyncio.StreamReader) -> bytes | None:
    """The head of the next request; None when the client closes the connection."""
    try:
        async with asyncio.timeout(IDLE):
            first = await reader.read(1)
        if not first:
            return None
        head = bytearray(first)
        async with asyncio.timeout(READ_WITHIN):
            while not head.endswith(b"\r\n\r\n"):
                head += await reader.readuntil(b"\n")
                if not head.endswith(b"\r\n"):
                    raise Problem(400, "a line of the head ends without CR")
                if len(head) > HEAD_BYTES:
                    raise asyncio.LimitOverrunError("", 0)
        return bytes(head)
    except asyncio.LimitOverrunError:
        raise Problem(431, f"the head is larger than {HEAD_BYTES} bytes") from None


def _parse(head: bytes) -> tuple[Request, bool]:
    first, *lines = head[:-4].split(b"\r\n")
    match = _REQUEST.fullmatch(first)
    if match is None:
        raise Problem(400, "this is no request of HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise Problem(400, "a header is malformed")
        name = header[1].decode("ascii").lower()
        if name in headers and name in ("host", "content-length", "authorization", "transfer-encoding"):
            raise Problem(400, f"{name} is given twice")
        headers[name] = header[2].decode("latin-1")
    if match[3] == b"1" and "host" not in headers:
        raise Problem(400, "Host is missing")
    if "transfer-encoding" in headers:
        raise Problem(501, "the body must come with its Content-Length")
    path, _, query = match[2].decode("ascii").partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, errors="strict") if query else []
    except ValueError:
        raise Problem(400, "the parameters are malformed") from None
    if len(dict(pairs)) != len(pairs):
        raise Problem(400, "a parameter is given twice")
    keep = match[3] == b"1" and "close" not in headers.get("connection", "").lower()
    return Request(match[1].decode("ascii"), path, dict(pairs), headers), keep


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


async def _discard_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read the rest of the body: a client that is cut off while it sends never reads the response."""
    writer.write_eof()
    async with asyncio.timeout(READ_WITHIN):
        while await reader.read(HEAD_BYTES):
            pass


async def _send(writer: asyncio.StreamWriter, response: Response, *, close: bool, without_body: bool = False) -> None:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **response.headers}
    body = b""
    if response.stream is not None:
        headers["Transfer-Encoding"] = "chunked"
    elif response.value is not None:
        body = json.dumps(response.value).encode() + b"\n"
        headers.setdefault("Content-Type", "application/json")
    if response.stream is None and response.status != HTTPStatus.NO_CONTENT:
        headers["Content-Length"] = str(len(body))
    if close:
        headers["Connection"] = "close"
    lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + (b"" if without_body else body))
    if response.stream is not None:
        async for chunk in response.stream:
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
    await writer.drain()


def _problem(problem: Problem, request_id: str | None = None) -> Response:
    return Response(problem.status, problem.document(request_id), {"Content-Type": MEDIA_TYPE, **problem.headers})


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name is given twice in one object")
    return dict(pairs)
