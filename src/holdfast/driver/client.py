# Generated from client_async.py by scripts/unasync.py. Do not edit.
"""The client of the process driver, the daemon that `holdfast driver` starts.

Every call has a connection of its own, so many tasks may call at once. Nothing is retried here: a caller that got no
answer may call again, because the same create twice is one sandbox.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from holdfast import DriverError
from holdfast.driver import driver_json
from holdfast.driver.dial import DriverConnection, connect
from holdfast.driver.http_reply import HttpReply, build_request, parse_address
from holdfast.reconciler import Backend, DriverEvent

T = TypeVar("T")

_POLL_EVERY = 1.0
_MAX_SILENCE = 20.0
"""Seconds without a line after which a watch is broken: the driver sends a bookmark every 5."""


class ProcessDriver:
    """``address`` is ``unix:/path/to/driver.sock`` or ``http://host:port``, else $HOLDFAST_DRIVER; ``token`` else
    $HOLDFAST_DRIVER_TOKEN. Every answer must come within ``timeout`` seconds.

    Methods raise DriverError: with the HTTP ``status`` when the driver refuses, with None when there is no answer or
    an invalid one."""

    def __init__(self, address: str | None = None, *, token: str | None = None, timeout: float = 10.0) -> None:
        address = address or os.environ.get("HOLDFAST_DRIVER")
        if not address:
            raise ValueError("no address and no HOLDFAST_DRIVER: where is the driver?")
        self.address, self._timeout = address, _check_timeout(timeout)
        self._host, self._port = parse_address(address)
        token = token or os.environ.get("HOLDFAST_DRIVER_TOKEN", "").strip()  # strip: it may come from a file
        if token and not (token.isascii() and token.isprintable()):  # the message does not repeat the secret
            raise ValueError("token must be printable ASCII")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def list(self) -> Sequence[Backend]:
        """All sandboxes, those that have ended among them."""
        return self._call(driver_json.backends, "GET", "/v1/sandboxes")

    def get(self, id: str) -> Backend | None:
        """None when there is certainly no such sandbox."""
        try:
            return self._call(driver_json.backend, "GET", _path(id))
        except DriverError as error:
            if error.status == 404:
                return None
            raise

    def create(
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
        """Run a program. The same arguments again return the same sandbox; others raise DriverError 409.

        ``cwd``: by default a folder of its own, deleted with it. ``limits``: memory_bytes, cpu_seconds, open_files,
        processes. ``grace``: seconds between TERM and KILL when it is deleted, 10. ``log_bytes``: how much of
        its output is kept, 10 MiB. ``owner``: any text, returned in its details."""
        given = {
            "env": env, "cwd": cwd, "limits": limits, "grace": grace, "log_bytes": log_bytes, "owner": owner
        }  # fmt: skip
        if isinstance(argv, str):  # its letters would be the arguments
            raise TypeError(f'argv must be a list of strings; for a shell command: ["sh", "-c", {argv[:80]!r}]')
        spec = {"argv": [*argv], **{name: value for name, value in given.items() if value is not None}}
        return self._call(driver_json.backend, "PUT", _path(id), json.dumps(spec).encode())

    def delete(self, id: str, *, grace: float | None = None, wait: float = 0.0, run: str | None = None) -> bool:
        """End all its processes, TERM and after ``grace`` KILL, and delete it. True when it has ended or never was,
        False when it is still ending after ``wait`` seconds; a watch reports its end.

        ``run``: only if ``details["run"]`` is still that, else DriverError 409."""
        given = {"grace": grace, "wait": wait, "run": run}
        query = urlencode({name: value for name, value in given.items() if value is not None})
        try:
            return self._call(driver_json.has_ended, "DELETE", f"{_path(id)}?{query}", extra_time=wait)
        except DriverError as error:
            if error.status == 404:
                return True
            raise

    def watch(self, *, since: str | None = None) -> DriverWatch:
        """The events after ``since``, the ``cursor`` of an earlier watch. By default those from the first ``next`` on:
        it starts the watch, and returns None because the driver first sends a bookmark, which has only a cursor.

        Raises DriverError 410 when events are missing: the driver keeps only the latest, was restarted, or this watch
        was read too slowly. Then begin a new watch without ``since``, and list all sandboxes after its first None."""
        return DriverWatch(self, since)

    def log(
        self, id: str, *, offset: int | None = None, tail: int | None = None, follow: bool = False
    ) -> Iterator[bytes]:
        """Its output in pieces: all that is kept, or from the byte ``offset`` on, or the last ``tail`` lines; with
        ``follow`` until it ends."""
        given = {"offset": offset, "tail": tail, "follow": "true" if follow else None}
        query = urlencode({name: value for name, value in given.items() if value is not None})
        connection, reply = self._open("GET", f"{_path(id)}/log?{query}")
        try:
            while True:
                if data := reply.take():
                    yield data
                if reply.complete:
                    return
                try:
                    reply.feed(connection.receive(_POLL_EVERY if follow else self._timeout))
                except TimeoutError:
                    if not follow:
                        raise self._timeout_error() from None
        except (OSError, ValueError) as error:
            raise self._connection_error(error) from error
        finally:
            connection.close()

    def _call(
        self, parse: Callable[[Any], T], method: str, path: str, body: bytes = b"", *, extra_time: float = 0.0
    ) -> T:
        until = time.monotonic() + self._timeout + extra_time
        connection, reply = self._open(method, path, body, until)
        try:
            data = self._read_body(connection, reply, until)
        except TimeoutError:
            raise self._timeout_error() from None
        except (OSError, ValueError) as error:
            raise self._connection_error(error) from error
        finally:
            connection.close()
        return self._parse(parse, b"null" if reply.status == 204 else data)

    def _open(
        self, method: str, path: str, body: bytes = b"", until: float | None = None
    ) -> tuple[DriverConnection, HttpReply]:
        """Send a request, and read the head of its answer. Raises DriverError unless the status is 2xx."""
        host = "localhost" if self._port is None else f"{self._host}:{self._port}"
        until = time.monotonic() + self._timeout if until is None else until
        try:
            connection = connect(self._host, self._port, self._timeout)
        except TimeoutError:
            raise self._timeout_error() from None
        except OSError as error:
            reason = error.strerror or error
            raise DriverError(
                f"the driver at {self.address} cannot be reached: {reason}. Is it running? 'holdfast driver' starts one"
            ) from error
        try:
            connection.send(build_request(method, path, host, self._headers, body), self._timeout)
            reply = HttpReply()
            while not reply.status:
                reply.feed(connection.receive(_remaining(until)))
            if reply.status >= 300:
                raise self._refusal(reply.status, self._read_body(connection, reply, until))
            return connection, reply
        except TimeoutError:
            connection.close()
            raise self._timeout_error() from None
        except (OSError, ValueError) as error:
            connection.close()
            raise self._connection_error(error) from error
        except BaseException:
            connection.close()
            raise

    def _read_body(self, connection: DriverConnection, reply: HttpReply, until: float) -> bytes:
        while not reply.complete:
            reply.feed(connection.receive(_remaining(until)))
        return reply.take()

    def _refusal(self, status: int, data: bytes) -> DriverError:
        """A 404 without "missing" is not from the driver, but from a proxy in front of it while the driver is away."""
        try:
            problem = {**json.loads(data)}
        except (ValueError, TypeError):
            problem = {}
        if status == 404 and "missing" not in problem:
            return DriverError(f"what answers at {self.address} is not the driver: 404")
        return DriverError(f"the driver refused: {problem.get('detail') or status}", status=status)

    def _parse(self, parse: Callable[[Any], T], data: bytes) -> T:
        try:
            return parse(json.loads(data))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DriverError(f"the driver at {self.address} sent an invalid answer: {error!r}") from error

    def _timeout_error(self) -> DriverError:
        return DriverError(f"the driver at {self.address} did not answer within {self._timeout:g} s")

    def _connection_error(self, error: Exception) -> DriverError:
        return DriverError(f"the driver at {self.address} was cut off: {error}")


class DriverWatch:
    """Yields events, and None about every second without one. ``cursor``: from where another watch can continue."""

    def __init__(self, driver: ProcessDriver, since: str | None) -> None:
        self._driver, self.cursor = driver, since
        self._connection: DriverConnection | None = None
        self._reply = HttpReply()
        self._rest, self._silence = b"", 0.0

    def __iter__(self) -> DriverWatch:
        return self

    def __next__(self) -> DriverEvent | None:
        if self._connection is None:
            query = f"?{urlencode({'since': self.cursor})}" if self.cursor else ""
            self._connection, self._reply = self._driver._open("GET", f"/v1/watch{query}")
            self._rest = self._reply.take()
        while True:
            text, end, rest = self._rest.partition(b"\n")
            if end:
                self._rest = rest
                try:
                    self.cursor, event = self._driver._parse(driver_json.event, text)
                except DriverError:
                    self.close()
                    raise
                return event
            if self._reply.complete:  # the driver ends a watch that is too slow
                self.close()
                raise DriverError(
                    "this watch fell too far behind, and events were dropped: list the sandboxes, and watch again",
                    status=410,
                )
            if not self._receive_more(self._connection):
                return None

    def close(self) -> None:
        """Close the connection. Another watch can continue from ``cursor``."""
        if self._connection is not None:
            self._connection.close()

    def _receive_more(self, connection: DriverConnection) -> bool:
        try:
            self._reply.feed(connection.receive(_POLL_EVERY))
        except TimeoutError:
            self._silence += _POLL_EVERY
            if self._silence >= _MAX_SILENCE:
                self.close()
                raise self._driver._timeout_error() from None
            return False
        except (OSError, ValueError) as error:
            self.close()
            raise self._driver._connection_error(error) from error
        self._silence, self._rest = 0.0, self._rest + self._reply.take()
        return True


def _remaining(until: float) -> float:
    """Seconds until then. Raises TimeoutError when it has passed."""
    if (seconds := until - time.monotonic()) <= 0:
        raise TimeoutError
    return seconds


def _check_timeout(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"timeout must be a number of seconds, not {type(value).__name__}")
    if not 0.001 <= value <= 86400:  # also true of NaN
        raise ValueError(f"timeout must be between 0.001 and 86400 seconds, not {value!r}")
    return float(value)


def _path(id: str) -> str:
    return f"/v1/sandboxes/{quote(id, safe='')}"
