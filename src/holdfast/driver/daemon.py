"""The daemon: locks its folder, loads the sandboxes there, listens, and leaves them running when it ends."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from holdfast.driver.api import Api
from holdfast.driver.daemon_signals import is_loopback, stop_on_signals
from holdfast.driver.http import CONNECTIONS, HEAD_BYTES, HttpServer, Request
from holdfast.driver.orphans import Subreaper
from holdfast.driver.reconcile_folder import FolderReconciler

FINISH_WITHIN = 5.0
MAX_SOCKET_PATH = 107
MIN_TOKEN = 16
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SPARE_FILES = 64
"""Descriptors for everything but sandboxes and connections: folders, logs, the event loop."""


class DriverStartRefused(Exception):
    """The driver cannot start here. ``code`` is the exit code: 2 when a retry cannot help."""

    def __init__(self, reason: str, code: int = 1) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True)
class DriverSettings:
    """Raises ValueError for contradictions, before anything is done."""

    folder: Path
    socket: Path | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    token: str | None = None
    limit: int = 1000
    end_sandboxes: bool = False
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.token is not None and (len(self.token) < MIN_TOKEN or not self.token.isascii()):
            raise ValueError(f"the token must be at least {MIN_TOKEN} ASCII characters long")
        if self.port is not None and not self.loopback and self.token is None:
            raise ValueError(
                f"{self.host} is not a loopback address: every client that reaches it could run programs. Set a token"
            )
        if self.port is None and len(os.fsencode(self.path)) > MAX_SOCKET_PATH:
            raise ValueError(
                f"the path of the socket is longer than {MAX_SOCKET_PATH} bytes: give a shorter --socket or folder"
            )

    @property
    def path(self) -> Path:
        return (self.socket or self.folder / "driver.sock").absolute()

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)


def run(settings: DriverSettings) -> int:
    """Serve until a signal ends it, and return the exit code. Raises DriverStartRefused."""
    if sys.platform != "linux":
        raise DriverStartRefused("the process driver needs Linux")
    open_files = _raise_file_limit(settings.limit)
    with _open_lock(settings.folder) as lock:
        _lock(settings.folder, lock)
        os.umask(0o077)
        return asyncio.run(_serve(settings, open_files))


def _open_lock(folder: Path) -> TextIO:
    """The lock file, in a folder that only this user may write to: the driver runs what the folder contains."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (folder, folder / "sandboxes", folder / "work"):
            with suppress(FileNotFoundError):
                _check_private(each, each.stat() if each is folder else each.lstat())
        lock = open(folder / "driver.lock", "a+", encoding="utf-8", opener=_open_file)  # noqa: SIM115
        if not stat.S_ISREG(os.fstat(lock.fileno()).st_mode):
            raise DriverStartRefused(f"{folder / 'driver.lock'} is not a file. Remove it, or give another --folder", 2)
        return lock
    except OSError as error:
        raise _unusable(folder, error) from None


def _open_file(path: str, flags: int) -> int:
    """Not the target of a link, and without waiting for the other end of a FIFO."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _check_private(folder: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        problem = "is a link"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to the user with id {status.st_uid}"
    elif status.st_mode & 0o022:
        problem = f"can be written to by other users (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return
    raise DriverStartRefused(
        f"{folder} {problem}, and the driver would run the programs that are in it. Give another --folder", 2
    )


def _unusable(folder: Path, error: OSError) -> DriverStartRefused:
    return DriverStartRefused(f"cannot write to the folder {folder}: {error.strerror}. Give another --folder", 2)


def _raise_file_limit(limit: int) -> int:
    """Raise the soft limit of open files as far as needed, and return the old one, which sandboxes get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = limit + CONNECTIONS + SPARE_FILES
    if hard not in (resource.RLIM_INFINITY, max(hard, needed)):
        raise DriverStartRefused(
            f"{limit} sandboxes need {needed} open files, and this process may have {hard}: raise the limit "
            "(ulimit -Hn, LimitNOFILE=), or give a smaller --limit"
        )
    if soft not in (resource.RLIM_INFINITY, max(soft, needed)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return soft


def _lock(folder: Path, lock: TextIO) -> None:
    """Lock the folder; a driver that was killed a moment ago gets a second to end."""
    for _ in range(50):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.02)
    else:
        lock.seek(0)
        raise DriverStartRefused(f"another driver has {folder}: pid {lock.read().strip() or 'unknown'}")
    with suppress(OSError):  # the pid is for messages only: a full disk does not matter
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()


async def _serve(settings: DriverSettings, open_files: int) -> int:
    stop = stop_on_signals(STOP_SIGNALS)
    listening = _listen(settings)
    log = _event_printer(settings.as_json)
    try:
        sandboxes = FolderReconciler(settings.folder.absolute(), settings.limit, log, open_files, Subreaper())
        await sandboxes.open()
    except OSError as error:
        raise _unusable(settings.folder, error) from None
    hosts = frozenset({settings.host, "localhost", "127.0.0.1", "[::1]"}) if settings.loopback else None
    api = Api(sandboxes, token=settings.token, hosts=hosts if settings.port is not None else None)
    server = HttpServer(api.admit, api.handle, lambda request, error: log(_failure(request, error)))
    if settings.port is None:
        listener: asyncio.Server = await asyncio.start_unix_server(server.serve, sock=listening, limit=HEAD_BYTES)
    else:
        listener = await asyncio.start_server(server.serve, sock=listening, limit=HEAD_BYTES)
    _print_ready(settings, listening, sandboxes)
    await stop.wait()
    listener.close()
    if settings.end_sandboxes:
        await sandboxes.end_all()
    await server.close(FINISH_WITHIN)
    await sandboxes.close()
    if settings.port is None:
        settings.path.unlink(missing_ok=True)
    return 0


def _listen(settings: DriverSettings) -> socket.socket:
    if settings.port is not None:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        target: Any = (settings.host, settings.port)
    else:
        _remove_stale_socket(settings.path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target = str(settings.path)
    try:
        listening.bind(target)  # the umask makes the file of a socket 0600
        if settings.port is None:
            settings.path.chmod(0o600)
        listening.listen(256)
    except OSError as error:
        where = target if settings.port is None else f"{settings.host} port {settings.port}"
        raise DriverStartRefused(f"cannot listen on {where}: {error.strerror}") from None
    listening.setblocking(False)
    return listening


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket of a driver that was killed. Raises DriverStartRefused when a process listens on it."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise DriverStartRefused(f"{path} exists, and is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise DriverStartRefused(f"cannot listen on {path}: {error.strerror}") from None
    raise DriverStartRefused(f"another process listens on {path} already")


def address(settings: DriverSettings, listening: socket.socket) -> str:
    if settings.port is None:
        return f"unix:{settings.path}"
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _print_ready(settings: DriverSettings, listening: socket.socket, sandboxes: FolderReconciler) -> None:
    url, descriptions = address(settings, listening), sandboxes.list()
    running = sum(each["conditions"][0]["status"] is True for each in descriptions)
    if settings.as_json:
        ready = {"address": url, "pid": os.getpid(), "folder": str(settings.folder.absolute())}
        line = json.dumps({"kind": "ready", **ready, "sandboxes": len(descriptions), "running": running})
    else:
        line = f"holdfast driver: listening on {url}; {len(descriptions)} sandboxes, {running} running"
    print(line, flush=True)
    if settings.port is not None and settings.token is None:
        print("holdfast: no token: every user of this machine can run programs as you", file=sys.stderr, flush=True)


def _event_printer(as_json: bool) -> Any:
    """A function that prints an event as a line on stderr, without the spec of the sandbox."""

    def print_event(event: Mapping[str, Any]) -> None:
        event = {name: value for name, value in event.items() if name not in ("cursor", "sandbox") and value != ""}
        if as_json:
            line = json.dumps({"at": round(time.time(), 3), **event})
        else:
            words = [str(event.get(name, "")) for name in ("id", "kind", "reason", "message")]
            line = "holdfast: " + " ".join(ascii(word)[1:-1] for word in words if word)
        with suppress(OSError):  # the reader of stderr is gone
            print(line, file=sys.stderr, flush=True)

    return print_event


def _failure(request: Request, error: Exception) -> dict[str, Any]:
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    message = f"{request.method} {request.path}: {type(error).__name__}: {error} ({where})"
    return {"kind": "failure", "id": request.id, "message": message}
