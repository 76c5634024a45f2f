"""The client of the process driver, the daemon that `holdfast driver` starts.

Every call has a connection of its own, so calls may come from many tasks at once. Nothing is retried here: a caller
that got no answer asks again, which does no harm, because the same create twice is one sandbox.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from holdfast.driver import driver_json as driven
from holdfast.driver.dial_async import Line, dial
from holdfast.driver.http_reply import Reply, place, request
from holdfast.errors import DriverError
from holdfast.names import MAX_TTL, check_seconds
from holdfast.reconciler import Backend, DriverEvent
from holdfast.runtime.clock import now

T = TypeVar("T")

_LOOK_EVERY = 1.0
_SILENCE = 20.0
"""Seconds after which a watch that says nothing is dead: the driver says something every 5."""


class AsyncProcessDriver:
    """``address`` is ``unix:/path/to/driver.sock`` or ``http://host:port``, else $HOLDFAST_DRIVER; ``token`` else
    $HOLDFAST_DRIVER_TOKEN. Any answer must come within ``timeout`` seconds.

    DriverError when the driver refuses (``status`` says how) or gives no answer, or none that makes sense (``status``
    is None)."""

    def __init__(self, address: str | None = None, *, token: str | None = None, timeout: float = 10.0) -> None:
        address = address or os.environ.get("HOLDFAST_DRIVER")
        if not address:
            raise ValueError("no address and no HOLDFAST_DRIVER: where is the driver?")
        self.address, self._timeout = address, check_seconds(timeout, "timeout", 0.001, MAX_TTL)
        self._host, self._port = place(address)
        token = token or os.environ.get("HOLDFAST_DRIVER_TOKEN", "").strip()  # a file's, with the end of its line
        if token and not (token.isascii() and token.isprintable()):  # its value is not repeated: it is a secret
            raise ValueError("token must be printable ASCII")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def list(self) -> Sequence[Backend]:
        """All sandboxes, those that have ended among them."""
        return await self._ask(driven.backends, "GET", "/v1/sandboxes")

    async def get(self, id: str) -> Backend | None:
        """None when there is certainly no such sandbox."""
        try:
            return await self._ask(driven.backend, "GET", _path(id))
        except DriverError as error:
            if error.status == 404:
                return None
            raise

    async def create(
        self,
        id: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Mapping[str, int] | None = None,
        grace: float | None = None,
        log_bytes: int | None = None,
        owner: str | None = None,
    ) -> Backend:
        """Have it run. Asked again with the same arguments it is the same sandbox; with others, DriverError 409.

        ``cwd``: else a folder of its own, which goes with it. ``limits``: memory_bytes, cpu_seconds, open_files,
        processes. ``grace``: seconds between TERM and KILL when it is deleted, 10. ``log_bytes``: how much is kept of
        what it writes, 10 MiB. ``owner``: whose it is, told in its details."""
        given = {
            "env": env, "cwd": cwd, "limits": limits, "grace": grace, "log_bytes": log_bytes, "owner": owner
        }  # fmt: skip
        if isinstance(argv, str):  # its letters would be the arguments
            raise TypeError(f'argv must be a list of strings: ["sh", "-c", {argv[:80]!r}] for a shell to take it apart')
        spec = {"argv": [*argv], **{name: value for name, value in given.items() if value is not None}}
        return await self._ask(driven.backend, "PUT", _path(id), json.dumps(spec).encode())

    async def delete(self, id: str, *, grace: float | None = None, wait: float = 0.0, run: str | None = None) -> bool:
        """End all its processes, TERM and after ``grace`` KILL, and forget it. True when it is gone (or never was),
        False when it is still being ended after ``wait`` seconds; that goes on, and a watch tells its end.

        ``run``: only if it is still that one (``details["run"]``), else DriverError 409."""
        given = {"grace": grace, "wait": wait, "run": run}
        query = urlencode({name: value for name, value in given.items() if value is not None})
        try:
            return await self._ask(driven.gone, "DELETE", f"{_path(id)}?{query}", patience=wait)
        except DriverError as error:
            if error.status == 404:
                return True
            raise

    def watch(self, *, since: str | None = None) -> AsyncWatch:
        """What happens from its first ``next`` on, which gives None, or since a ``cursor`` of an earlier watch;
        DriverError 410 when the driver does not remember that far, or was started anew, or when nobody has read
        here for so long that something would be missed: list then, and watch from now on."""
        return AsyncWatch(self, since)

    async def log(
        self, id: str, *, offset: int | None = None, tail: int | None = None, follow: bool = False
    ) -> AsyncIterator[bytes]:
        """What it wrote, in pieces: all that is kept, or from the byte ``offset`` on, or the last ``tail`` lines;
        with ``follow`` also what it will write, to its end."""
        given = {"offset": offset, "tail": tail, "follow": "true" if follow else None}
        query = urlencode({name: value for name, value in given.items() if value is not None})
        line, reply = await self._open("GET", f"{_path(id)}/log?{query}")
        try:
            while True:
                if data := reply.take():
                    yield data
                if reply.complete:
                    return
                try:
                    reply.feed(await line.receive(_LOOK_EVERY if follow else self._timeout))
                except TimeoutError:
                    if not follow:
                        raise self._silent() from None
        except (OSError, ValueError) as error:
            raise self._broken(error) from error
        finally:
            line.close()

    async def _ask(
        self, understand: Callable[[Any], T], method: str, path: str, body: bytes = b"", *, patience: float = 0.0
    ) -> T:
        until = now() + self._timeout + patience
        line, reply = await self._open(method, path, body, until)
        try:
            data = await self._all(line, reply, until)
        except TimeoutError:
            raise self._silent() from None
        except (OSError, ValueError) as error:
            raise self._broken(error) from error
        finally:
            line.close()
        return self._understood(understand, b"null" if reply.status == 204 else data)

    async def _open(self, method: str, path: str, body: bytes = b"", until: float | None = None) -> tuple[Line, Reply]:
        """With the head of the answer, which is a good one."""
        host = "localhost" if self._port is None else f"{self._host}:{self._port}"
        until = now() + self._timeout if until is None else until
        try:
            line = await dial(self._host, self._port, self._timeout)
        except TimeoutError:
            raise self._silent() from None
        except OSError as error:
            why = error.strerror or error
            raise DriverError(
                f"the driver at {self.address} cannot be reached: {why}. Is it running? 'holdfast driver' starts one"
            ) from error
        try:
            await line.send(request(method, path, host, self._headers, body), self._timeout)
            reply = Reply()
            while not reply.status:
                reply.feed(await line.receive(_left(until)))
            if reply.status >= 300:
                raise self._refusal(reply.status, await self._all(line, reply, until))
            return line, reply
        except TimeoutError:
            line.close()
            raise self._silent() from None
        except (OSError, ValueError) as error:
            line.close()
            raise self._broken(error) from error
        except BaseException:
            line.close()
            raise

    async def _all(self, line: Line, reply: Reply, until: float) -> bytes:
        while not reply.complete:
            reply.feed(await line.receive(_left(until)))
        return reply.take()

    def _refusal(self, status: int, data: bytes) -> DriverError:
        """Whatever stands in the driver's place while it is away may say that it knows no such page: only the driver
        itself says that a sandbox is missing."""
        try:
            problem = {**json.loads(data)}
        except (ValueError, TypeError):
            problem = {}
        if status == 404 and "missing" not in problem:
            return DriverError(f"what answers at {self.address} is not the driver: 404")
        return DriverError(f"the driver refused: {problem.get('detail') or status}", status=status)

    def _understood(self, understand: Callable[[Any], T], data: bytes) -> T:
        try:
            return understand(json.loads(data))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DriverError(f"the driver at {self.address} said what makes no sense: {error!r}") from error

    def _silent(self) -> DriverError:
        return DriverError(f"the driver at {self.address} did not answer within {self._timeout:g} s")

    def _broken(self, error: Exception) -> DriverError:
        return DriverError(f"the driver at {self.address} was cut off: {error}")


class AsyncWatch:
    """Events, and None about every second in which there is none. ``cursor`` is where another watch can go on."""

    def __init__(self, driver: AsyncProcessDriver, since: str | None) -> None:
        self._driver, self.cursor = driver, since
        self._line: Line | None = None
        self._reply = Reply()
        self._rest, self._silent = b"", 0.0

    def __aiter__(self) -> AsyncWatch:
        return self

    async def __anext__(self) -> DriverEvent | None:
        if self._line is None:
            query = f"?{urlencode({'since': self.cursor})}" if self.cursor else ""
            self._line, self._reply = await self._driver._open("GET", f"/v1/watch{query}")
            self._rest = self._reply.take()
        while True:
            text, end, rest = self._rest.partition(b"\n")
            if end:
                self._rest = rest
                try:
                    self.cursor, event = self._driver._understood(driven.event, text)
                except DriverError:
                    await self.aclose()
                    raise
                return event
            if self._reply.complete:  # the driver keeps so much and no more
                await self.aclose()
                raise DriverError("this watch fell too far behind: list, and watch from now on", status=410)
            if not await self._more(self._line):
                return None

    async def aclose(self) -> None:
        """Hang up; ``cursor`` says where another watch can go on."""
        if self._line is not None:
            self._line.close()

    async def _more(self, line: Line) -> bool:
        try:
            self._reply.feed(await line.receive(_LOOK_EVERY))
        except TimeoutError:
            self._silent += _LOOK_EVERY
            if self._silent >= _SILENCE:
                await self.aclose()
                raise self._driver._silent() from None
            return False
        except (OSError, ValueError) as error:
            await self.aclose()
            raise self._driver._broken(error) from error
        self._silent, self._rest = 0.0, self._rest + self._reply.take()
        return True


def _left(until: float) -> float:
    """Seconds; TimeoutError when there are none."""
    if (left := until - now()) <= 0:
        raise TimeoutError
    return left


def _path(id: str) -> str:
    return f"/v1/sandboxes/{quote(id, safe='')}"
