"""One driver a folder: it locks the folder, adopts what runs there, listens, and leaves it running when it goes."""

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
from holdfast.driver.daemon_signals import is_loopback, told_to_end
from holdfast.driver.http import CONNECTIONS, HEAD_BYTES, Request, Server
from holdfast.driver.runs import Runs

FINISH_WITHIN = 5.0
LONGEST_SOCKET = 107
SHORTEST_TOKEN = 16
TOLD_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SPARE_FILES = 64
"""For all but sandboxes and connections: folders that are read, logs, the loop itself."""


class Refused(Exception):
    """It cannot start here, and why; ``code`` to exit with: 2 where it never could."""

    def __init__(self, why: str, code: int = 1) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True)
class Settings:
    """ValueError for what contradicts itself: all of it is checked before anything is done."""

    folder: Path
    socket: Path | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    token: str | None = None
    most: int = 1000
    end_sandboxes: bool = False
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.token is not None and (len(self.token) < SHORTEST_TOKEN or not self.token.isascii()):
            raise ValueError(f"the token must be at least {SHORTEST_TOKEN} ASCII characters long")
        if self.port is not None and not self.loopback and self.token is None:
            raise ValueError(
                f"{self.host} is not a loopback address: whoever reaches it could run programs. Set a token"
            )
        if self.port is None and len(os.fsencode(self.path)) > LONGEST_SOCKET:
            raise ValueError(
                f"the path of the socket is longer than {LONGEST_SOCKET} bytes: give a shorter --socket or folder"
            )

    @property
    def path(self) -> Path:
        return (self.socket or self.folder / "driver.sock").absolute()

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)


def run(settings: Settings) -> int:
    """Until it is told to end; the exit code."""
    if sys.platform != "linux":
        raise Refused("the process driver needs Linux")
    usual = _make_room(settings.most)
    with _opened(settings.folder) as lock:
        _lock(settings.folder, lock)
        os.umask(0o077)
        return asyncio.run(_serve(settings, usual))


def _opened(folder: Path) -> TextIO:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return (folder / "driver.lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise _unusable(folder, error) from None


def _unusable(folder: Path, error: OSError) -> Refused:
    return Refused(f"cannot write to the folder {folder}: {error.strerror}. Give another --folder", 2)


def _make_room(most: int) -> int:
    """Descriptors for each sandbox and connection; how many there was room for, which is what sandboxes get."""
    usual, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = most + CONNECTIONS + SPARE_FILES
    if hard not in (resource.RLIM_INFINITY, max(hard, needed)):
        raise Refused(
            f"{most} sandboxes need {needed} open files, and this process may have {hard}: raise the limit "
            "(ulimit -Hn, LimitNOFILE=), or give a smaller --most"
        )
    if usual not in (resource.RLIM_INFINITY, max(usual, needed)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return usual


def _lock(folder: Path, lock: TextIO) -> None:
    """A driver that was killed a moment ago may just be on its way out."""
    for _ in range(50):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.02)
    else:
        lock.seek(0)
        raise Refused(f"another driver has {folder}: pid {lock.read().strip() or 'unknown'}")
    with suppress(OSError):  # for people; on a full disk it does without
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()


async def _serve(settings: Settings, open_files: int) -> int:
    told = told_to_end(TOLD_BY)
    listening = _listen(settings)
    say = _sayer(settings.as_json)
    try:
        runs = Runs(settings.folder.absolute(), settings.most, say, open_files)
        await runs.open()
    except OSError as error:
        raise _unusable(settings.folder, error) from None
    hosts = frozenset({settings.host, "localhost", "127.0.0.1", "[::1]"}) if settings.loopback else None
    api = Api(runs, token=settings.token, hosts=hosts if settings.port is not None else None)
    server = Server(api.handle, lambda request, error: say(_failure(request, error)))
    if settings.port is None:
        listener: asyncio.Server = await asyncio.start_unix_server(server.serve, sock=listening, limit=HEAD_BYTES)
    else:
        listener = await asyncio.start_server(server.serve, sock=listening, limit=HEAD_BYTES)
    _ready(settings, listening, runs)
    await told.wait()
    listener.close()
    if settings.end_sandboxes:
        await runs.end_all()
    await server.close(FINISH_WITHIN)
    await runs.close()
    if settings.port is None:
        settings.path.unlink(missing_ok=True)
    return 0


def _listen(settings: Settings) -> socket.socket:
    if settings.port is not None:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place: Any = (settings.host, settings.port)
    else:
        _clear(settings.path)
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        place = str(settings.path)
    try:
        found.bind(place)  # a socket's file gets what the umask leaves: 0600
        if settings.port is None:
            settings.path.chmod(0o600)
        found.listen(256)
    except OSError as error:
        where = place if settings.port is None else f"{settings.host} port {settings.port}"
        raise Refused(f"cannot listen on {where}: {error.strerror}") from None
    found.setblocking(False)
    return found


def _clear(path: Path) -> None:
    """The socket of a driver that was killed; one that answers is somebody's."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise Refused(f"{path} is there, and is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise Refused(f"cannot listen on {path}: {error.strerror}") from None
    raise Refused(f"somebody listens on {path} already")


def address(settings: Settings, listening: socket.socket) -> str:
    if settings.port is None:
        return f"unix:{settings.path}"
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _ready(settings: Settings, listening: socket.socket, runs: Runs) -> None:
    where, found = address(settings, listening), runs.list()
    running = sum(each["conditions"][0]["status"] is True for each in found)
    if settings.as_json:
        ready = {"address": where, "pid": os.getpid(), "folder": str(settings.folder.absolute())}
        line = json.dumps({"kind": "ready", **ready, "sandboxes": len(found), "running": running})
    else:
        line = f"holdfast driver: listening on {where}; {len(found)} sandboxes, {running} running"
    print(line, flush=True)
    if settings.port is not None and settings.token is None:
        print("holdfast: no token: every user of this machine can run programs as you", file=sys.stderr, flush=True)


def _sayer(as_json: bool) -> Any:
    """A line on stderr for everything that happens: what a sandbox was given to run is not repeated."""

    def say(event: Mapping[str, Any]) -> None:
        event = {name: value for name, value in event.items() if name not in ("cursor", "sandbox") and value != ""}
        if as_json:
            line = json.dumps({"at": round(time.time(), 3), **event})
        else:
            words = [str(event.get(name, "")) for name in ("id", "kind", "reason", "message")]
            line = "holdfast: " + " ".join(ascii(word)[1:-1] for word in words if word)
        with suppress(OSError):  # whoever listened is gone
            print(line, file=sys.stderr, flush=True)

    return say


def _failure(request: Request, error: Exception) -> dict[str, Any]:
    import traceback

    at = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(at.filename).name}:{at.lineno}"
    message = f"{request.method} {request.path}: {type(error).__name__}: {error} ({where})"
    return {"kind": "failure", "id": request.id, "message": message}
