"""One node of the cluster: Patroni, the PostgreSQL server that it manages, and the proxies in front of both.

Patroni and PostgreSQL run as the server user below one watchdog, so that both are killed, stopped and continued
together, as if their machine was. Every connection to the node and from it to etcd passes a proxy, so that it can be
partitioned; Patroni reaches its own server directly, as on one machine.
"""

import ctypes
import http.client
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from holdfast.testing import child_watchdog, server_folder
from holdfast.testing.binaries import Binaries
from holdfast.testing.proxy import Proxy
from holdfast.testing.resource import Resource
from holdfast.testing.server import HOST, launch, reserve_port, until
from holdfast.testing.server_user import server_user

SCOPE = "holdfast"
TTL, LOOP_WAIT, RETRY_TIMEOUT = 20, 2, 3
"""Seconds: the lowest TTL of the leader that Patroni accepts; its default is 30."""
Cut = Literal["stall", "reset", "half_open"]
_USER = {"username": "postgres"}
_DYNAMIC: Mapping[str, Any] = {
    "ttl": TTL,
    "loop_wait": LOOP_WAIT,
    "retry_timeout": RETRY_TIMEOUT,
    "synchronous_mode": True,
    "postgresql": {
        "use_pg_rewind": True,
        "use_slots": True,
        "parameters": {
            "hot_standby": "on",
            "max_connections": 200,
            "max_wal_senders": 8,
            "wal_keep_size": "256MB",
            "wal_level": "replica",
            "wal_log_hints": "on",
        },
    },
}
_PARAMETERS: Mapping[str, Any] = {
    "dynamic_shared_memory_type": "mmap",
    "fsync": "off",  # a killed process loses nothing that it has written; only a machine that fails would
    "log_line_prefix": "%m [%p] %a ",
    "log_timezone": "UTC",
    "shared_buffers": "32MB",
    "timezone": "UTC",
    "unix_socket_directories": "",
    "wal_receiver_timeout": "5s",
    "wal_retrieve_retry_interval": "500ms",
    "wal_sender_timeout": "5s",
}


class PatroniNode(Resource):
    """``start()`` returns at once. ``environment`` is added to ours for PostgreSQL, and not for Patroni: with the clock
    of libfaketime, ``time.sleep`` of Python fails."""

    def __init__(self, name: str, binaries: Binaries, etcd_port: int, environment: Mapping[str, str]) -> None:
        self.name = name
        self._closed = False
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._resources = ExitStack()
        self._folder, self._folder_lock = server_folder.create_temporary()
        self.data = self._folder / "data"
        self._ports = [self._resources.enter_context(reserve_port()) for _ in range(2)]
        self.port, self._rest_port = (port.getsockname()[1] for port in self._ports)
        self.clients, self._peers = self._proxy(self.port), self._proxy(self.port)
        self._rest, self._etcd = self._proxy(self._rest_port), self._proxy(etcd_port)
        self._server = self._create_file("postgres", _script(binaries.folder / "postgres", environment), 0o700)
        self._configuration = self._create_file("patroni.yml", json.dumps(self._configure(binaries)))  # JSON is YAML

    @property
    def address(self) -> str:
        """Host and port for clients."""
        return _netloc(self.clients)

    @property
    def running(self) -> bool:
        return self._watchdog is not None and self._watchdog.poll() is None

    def start(self) -> None:
        command = [sys.executable, "-m", "patroni", str(self._configuration)]
        self._watchdog = launch(command, self._ports[0], log=self._folder / "log", folder=self._folder)

    def kill(self) -> None:
        """SIGKILL to Patroni and PostgreSQL at once, as if the machine had lost its power."""
        until(self._try_kill, what=f"{self.name} is killed")

    def pause(self) -> None:
        """SIGSTOP to Patroni and PostgreSQL: connections stay open, and none is answered."""
        until(self._try_pause, what=f"{self.name} is paused")

    def resume(self) -> None:
        child_watchdog.send_signal(list(self._processes()), signal.SIGCONT)

    def isolate(self, cut: Cut, *, from_clients: bool) -> None:
        """Cut it off from etcd and from the other nodes, and from clients if asked to."""
        for proxy in (self._etcd, self._rest, self._peers, *([self.clients] if from_clients else [])):
            getattr(proxy, cut)()

    def heal(self) -> None:
        for proxy in (self._etcd, self._rest, self._peers, self.clients):
            proxy.heal()

    def call(self, method: str, path: str, body: object = None, *, timeout: float = 3.0) -> tuple[int, str] | None:
        """Call Patroni's REST API directly: status and text. None if there is no answer."""
        connection = http.client.HTTPConnection(HOST, self._rest_port, timeout=timeout)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def log(self, lines: int = 1_000_000) -> str:
        """The last lines of the log of Patroni and PostgreSQL."""
        with suppress(FileNotFoundError):
            return "\n".join((self._folder / "log").read_text(errors="replace").splitlines()[-lines:])
        return ""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self.running:
                self.kill()
            self._free_shared_memory()
        finally:
            self._resources.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._folder_lock)

    def _proxy(self, port: int) -> Proxy:
        return self._resources.enter_context(Proxy(f"postgresql://{HOST}:{port}"))

    def _create_file(self, name: str, text: str, mode: int = 0o600) -> Path:
        path = self._folder / name
        path.write_text(text)
        path.chmod(mode)
        server_user().own(path)
        return path

    def _configure(self, binaries: Binaries) -> dict[str, Any]:
        return {
            "scope": SCOPE,
            "name": self.name,
            "restapi": {"listen": f"{HOST}:{self._rest_port}", "connect_address": _netloc(self._rest)},
            "etcd3": {"hosts": _netloc(self._etcd), "use_proxies": True},  # do not look for etcd's own address
            "bootstrap": {"dcs": _DYNAMIC},
            "postgresql": {
                "listen": f"{HOST}:{self.port}",
                "connect_address": _netloc(self._peers),
                "data_dir": str(self.data),
                "bin_dir": str(binaries.folder),
                "bin_name": {"postgres": str(self._server)},
                "pgpass": str(self._folder / "pgpass"),
                "authentication": {"superuser": _USER, "replication": _USER, "rewind": _USER},
                "parameters": _PARAMETERS,
                "pg_hba": [f"host {databases} all {HOST}/32 trust" for databases in ("all", "replication")],
                "create_replica_methods": ["basebackup"],
                "basebackup": [{"checkpoint": "fast"}, "no-sync", "no-manifest"],
                "remove_data_directory_on_rewind_failure": True,
                "remove_data_directory_on_diverged_timelines": True,
            },
            "watchdog": {"mode": "off"},  # that of the kernel, which would restart the machine
        }  # fmt: skip

    def _processes(self) -> dict[int, str]:
        return {} if self._watchdog is None else child_watchdog.descendants(self._watchdog.pid)

    def _try_kill(self) -> bool:
        """One that was just being forked appears later: call it until it is true."""
        child_watchdog.send_signal(list(self._processes()), signal.SIGKILL)
        return not self.running

    def _try_pause(self) -> bool:
        states = self._processes()
        child_watchdog.send_signal([pid for pid, state in states.items() if state not in "Tt"], signal.SIGSTOP)
        return all(state in "Tt" for state in states.values())

    def _free_shared_memory(self) -> None:
        """Remove the segment of System V shared memory that a killed server left."""
        with suppress(FileNotFoundError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            if len(lines) > 6 and len(words := lines[6].split()) > 1:
                ctypes.CDLL(None).shmctl(int(words[1]), 0, None)


def _script(program: Path, environment: Mapping[str, str]) -> str:
    """A program that becomes ``program`` with these variables."""
    variables = (f"{name}={value}" for name, value in environment.items())
    return f'#!/bin/sh\nexec env {shlex.join([*variables, str(program)])} "$@"\n'


def _netloc(proxy: Proxy) -> str:
    return urlsplit(proxy.url).netloc
