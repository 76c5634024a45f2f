"""Real PostgreSQL servers for tests, started in a fraction of a second.

    with Postgres.create() as postgres:
        client = holdfast.Client(postgres.database())

Each server has its own data folder, a free port on 127.0.0.1 and a superuser `postgres` without a password: every user
of the machine can connect, so never store anything of value in one. All servers of one PostgreSQL version start from a
copy of the same data folder and therefore have the same system identifier.

No server outlives the process that created it, even if that process is killed: `child_watchdog` runs between the two.
A server is started directly and not by pg_ctl, which checks only every 100 ms whether it is ready.
"""

import atexit
import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote, unquote, urlsplit

from holdfast.testing import binaries, child_watchdog, server_folder
from holdfast.testing.resource import Resource
from holdfast.testing.server import HOST, LIMIT, launch, reserve_port, until
from holdfast.testing.server_user import server_user

ShutdownMode = Literal["smart", "fast", "immediate"]

_SETTINGS: Mapping[str, object] = {
    "dynamic_shared_memory_type": "mmap",  # in the data folder: a crash leaves nothing in /dev/shm
    "hot_standby": "on",
    "log_line_prefix": "%m [%p] %a ",
    "log_timezone": "UTC",
    "max_connections": 200,
    "max_wal_senders": 8,
    "shared_buffers": "32MB",
    "timezone": "UTC",
    "unix_socket_directories": "",
    "wal_keep_size": "256MB",
    "wal_level": "replica",
    "wal_log_hints": "on",  # required by pg_rewind
    "wal_retrieve_retry_interval": "100ms",
}
_NOT_DURABLE: Mapping[str, object] = {"fsync": "off", "full_page_writes": "off"}
_WITHOUT_TIMEOUTS = "-c statement_timeout=0 -c idle_session_timeout=0 -c idle_in_transaction_session_timeout=0"
_SHUTDOWN_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_PORT_TAKEN = "could not create any TCP/IP sockets"


class Postgres(Resource):
    """A PostgreSQL server that belongs to this process. Start one with `create()`."""

    def __init__(self, programs: binaries.Binaries, folder: Path | str | None) -> None:
        self._folder_lock: int | None = None
        """Descriptor of a temporary folder; None for a folder that stays."""
        if folder is None:
            self.folder, self._folder_lock = server_folder.create_temporary()
        else:
            self.folder = Path(folder).absolute()
            self.folder.mkdir(parents=True, exist_ok=True)
            server_user().own(self.folder)
        self.binaries = programs
        self.data = self.folder / "data"
        self.environment: dict[str, str] = {}
        """Variables that the server gets in addition to ours, from its next start on."""
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._started_before = False
        self._reservation = reserve_port()
        self.port: int = self._reservation.getsockname()[1]
        """The TCP port on 127.0.0.1. It stays the same, and reserved, while the server is down."""
        self._owner = os.getpid()
        self._standbys: list[Postgres] = []
        self._closed = False
        atexit.register(self.close)

    @classmethod
    def create(
        cls,
        folder: Path | str | None = None,
        *,
        bin: Path | str | None = None,
        major: int | None = None,
        settings: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        durable: bool = False,
    ) -> Self:
        """Start a new server from the programs in `bin`, or of version `major`, or of the newest version installed.

        Its files are kept in `folder`, or in a temporary folder that is removed with it. Unless it is `durable` it runs
        without fsync: fast, and safe against its own crash but not against one of the machine. `environment` is added
        to ours, for it and for standbys created from it.
        """
        postgres = cls(binaries.find(bin, major), folder)
        postgres.environment.update(environment or {})
        try:
            server_folder.create_data(postgres.binaries, postgres.data)
            defaults = {**_SETTINGS, **({} if durable else _NOT_DURABLE)}
            postgres._configure({**defaults, **(settings or {})}, "postgresql.conf")
            postgres.start()
        except BaseException:
            postgres.close()
            raise
        return postgres

    def __repr__(self) -> str:
        return f"<Postgres {self.binaries.version} in {self.folder}>"

    # Databases and statements

    @property
    def url(self) -> str:
        """URL of the database `postgres`, as superuser."""
        return self._url("postgres")

    def database(self, name: str | None = None, *, like: str | None = None) -> str:
        """Create a database and return its URL. It is empty, or a copy of ``like``, which must have no connections."""
        name = name or f"test_{secrets.token_hex(6)}"
        template = "template1" if like is None else _database_name(like)
        strategy = " strategy file_copy" if self.binaries.major >= 15 else ""  # the default copies it through the WAL
        self.execute(f"create database {_identifier(name)} template {_identifier(template)}{strategy}")
        return self._url(name)

    def drop(self, url: str) -> None:
        """Drop a database and end its connections. One takes about 8 MB of disk."""
        self.execute(f"drop database {_identifier(_database_name(url))} with (force)")

    def execute(self, statement: str, *parameters: object, dbname: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement on a new connection and return its rows, if it has any. No timeout applies."""
        import psycopg

        url = self._url(dbname)
        with psycopg.connect(url, autocommit=True, connect_timeout=60, options=_WITHOUT_TIMEOUTS) as connection:
            cursor = connection.execute(statement.encode(), parameters or None)
            return cursor.fetchall() if cursor.description else []

    def alter(self, setting: str, value: str) -> None:
        """Change a setting that needs no restart."""
        self.execute(f"alter system set {setting} = '{value}'")
        self.execute("select pg_reload_conf()")

    # Processes

    @property
    def running(self) -> bool:
        """Whether any process of the server lives, paused or not."""
        return self._watchdog is not None and self._watchdog.poll() is None

    @property
    def pid(self) -> int:
        """The pid of the postmaster. Raises RuntimeError when the server is down."""
        lines = self._lock_file()
        if not self.running or not lines:
            raise RuntimeError(f"{self} is not running")
        return int(lines[0])

    def log(self, lines: int = 50) -> str:
        """The last lines of the server's log."""
        try:
            return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def start(self) -> None:
        """Start the server and wait until it accepts connections. Does nothing when it runs."""
        while not self.running:
            self.forget_crash()
            self._launch()
            until(lambda: self._is_ready() or not self.running, what=f"{self} is ready")
            if self.running:
                self._started_before = True
            elif _PORT_TAKEN in self.log(5) and not self._started_before:
                self._reservation.close()
                self._reservation = reserve_port()
                self.port = self._reservation.getsockname()[1]
            else:
                raise RuntimeError(f"{self} did not start. Its log:\n{self.log()}")

    def stop(self, mode: ShutdownMode = "fast") -> None:
        """Shut the server down and wait until its last process has ended. Does nothing when it is down."""
        if mode not in _SHUTDOWN_SIGNALS:
            raise ValueError(f"mode={mode!r}: must be one of {', '.join(_SHUTDOWN_SIGNALS)}")
        if self._watchdog is None or not self.running:
            return
        self.resume()
        child_watchdog.send_signal([self.pid], _SHUTDOWN_SIGNALS[mode])
        try:
            self._watchdog.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self} did not end within {LIMIT:g} s. Its log:\n{self.log()}") from None

    def restart(self, mode: ShutdownMode = "fast") -> None:
        """Stop and start, on the same port."""
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """Crash: SIGKILL to all processes of the server at once."""
        if self._watchdog is not None and self.running:
            until(self._try_kill, what=f"{self} is killed")
            self.forget_crash()

    def pause(self) -> None:
        """Stop all processes of the server (SIGSTOP): the kernel accepts connections, but the server never answers."""
        until(self._try_pause, what=f"{self} is paused")

    def resume(self) -> None:
        """Let a paused server continue. Does nothing when it is not paused."""
        if self._watchdog is not None and self.running:
            child_watchdog.send_signal(list(child_watchdog.descendants(self._watchdog.pid)), signal.SIGCONT)

    def forget_crash(self) -> None:
        """Remove what a killed server left: its lock file and its segment of System V shared memory."""
        if not self.running and len(lines := self._lock_file()) > 6:
            ctypes.CDLL(None).shmctl(int(lines[6].split()[1]), 0, None)
        if not self.running:
            (self.data / "postmaster.pid").unlink(missing_ok=True)

    def close(self) -> None:
        """End the server and its standbys, and remove its temporary folder. Does nothing when it is closed already.

        Does nothing, too, in a process that was forked after the server was created: the parent owns it.
        """
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            for standby in self._standbys:
                standby.close()
        finally:
            with contextlib.suppress(RuntimeError, TimeoutError):
                self.stop("fast" if self._folder_lock is None else "immediate")
            self.kill()
            self.forget_crash()
            self._reservation.close()
            if self._folder_lock is not None:
                shutil.rmtree(self.folder, ignore_errors=True)
                os.close(self._folder_lock)

    # Replication

    @property
    def is_primary(self) -> bool:
        """Whether it accepts writes, rather than following another server."""
        return self.execute("select not pg_is_in_recovery()") == [(True,)]

    def standby(self, synchronous: bool = False, name: str = "standby1") -> "Postgres":
        """Start a server that follows this one, and wait until it streams. It is closed together with this one.

        With `synchronous`, from then on each commit here waits until the standby has it.
        """
        _check_standby_name(name)
        standby = Postgres(self.binaries, None)
        standby.environment.update(self.environment)
        self._standbys.append(standby)
        try:
            source = ["-D", str(standby.data), "-d", self._conninfo(name)]
            self.binaries.run("pg_basebackup", *source, "--checkpoint=fast", "--no-sync", "--no-manifest")
            standby._follow(self, name, synchronous)
        except BaseException:
            standby.close()
            raise
        return standby

    def promote(self) -> None:
        """Turn a standby into a primary, and wait until it accepts writes. It has no synchronous standby then."""
        self.execute("select pg_promote(false)")
        until(lambda: self.is_primary, what=f"{self} is promoted")

    def rewind(self, source: "Postgres", synchronous: bool = False, name: str = "standby1") -> None:
        """Make this stopped or killed server a standby of `source`, which was promoted in its place, and start it.

        Its commits that `source` never received are undone.
        """
        _check_standby_name(name)
        if self.running:
            raise RuntimeError(f"{self} is running: stop() or kill() it before rewind()")
        source.alter("full_page_writes", "on")  # required by pg_rewind
        source.execute("checkpoint")  # until then the control file of the source has the old timeline
        self.forget_crash()
        self.binaries.run(
            *("pg_rewind", "--no-sync", "--target-pgdata", str(self.data)),
            *("--source-server", source._conninfo(name) + " dbname=postgres"),
        )
        self._follow(source, name, synchronous)

    def _follow(self, source: "Postgres", name: str, synchronous: bool) -> None:
        replication = {"primary_conninfo": source._conninfo(name), "synchronous_standby_names": ""}
        self._configure(replication, "postgresql.auto.conf")
        self._configure({}, "standby.signal")
        self.start()
        if synchronous:
            source.alter("synchronous_standby_names", f'"{name}"')
        states = "select state, sync_state from pg_stat_replication where application_name = %s"
        wanted = ("streaming", "sync" if synchronous else "async")
        until(lambda: wanted in source.execute(states, name), what=f"{name} streams from {source}")

    def _launch(self) -> None:
        variables = ["env", *(f"{name}={value}" for name, value in self.environment.items())]
        server = [*variables, str(self.binaries.folder / "postgres"), "-D", str(self.data)]
        network = ["-c", f"listen_addresses={HOST}", "-c", f"port={self.port}"]
        folder = None if self._folder_lock is None else self.folder
        self._watchdog = launch([*server, *network], self._reservation, log=self.folder / "log", folder=folder)

    def _is_ready(self) -> bool:
        lines = self._lock_file()
        return len(lines) > 7 and lines[7].strip() == "ready"

    def _lock_file(self) -> list[str]:
        try:
            return (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return []

    def _try_pause(self) -> bool:
        """Stop all processes that run, the postmaster first: it could start another. True when all are stopped."""
        if self._watchdog is None or not self.running:
            raise RuntimeError(f"{self} is not running")
        states = child_watchdog.descendants(self._watchdog.pid)
        child_watchdog.send_signal([pid for pid, state in states.items() if state not in "Tt"], signal.SIGSTOP)
        return all(state in "Tt" for state in states.values())

    def _try_kill(self) -> bool:
        """Kill all processes there are. One that was just being forked appears later: call it until it is true."""
        assert self._watchdog is not None
        child_watchdog.send_signal(list(child_watchdog.descendants(self._watchdog.pid)), signal.SIGKILL)
        return not self.running

    def _configure(self, settings: Mapping[str, object], file: str) -> None:
        """Append settings to a file of the data folder, which is created if need be. The server uses the last line of a
        setting."""
        path = self.data / file
        with path.open("a") as lines:
            for setting, value in settings.items():
                quoted = str(value).replace("'", "''")
                lines.write(f"{setting} = '{quoted}'\n")
        server_user().own(path)

    def _url(self, dbname: str) -> str:
        return f"postgresql://postgres@{HOST}:{self.port}/{quote(dbname, safe='')}"

    def _conninfo(self, name: str) -> str:
        return f"host={HOST} port={self.port} user=postgres application_name={name}"


def _database_name(url: str) -> str:
    return unquote(urlsplit(url).path.removeprefix("/"))


def _identifier(name: str) -> str:
    quoted = name.replace('"', '""')
    return f'"{quoted}"'


def _check_standby_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,62}", name):
        raise ValueError(f"name={name!r}: a standby's name is made of lower-case letters, digits and _")
