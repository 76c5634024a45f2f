"""A PgBouncer in front of a PostgreSQL server, if it is installed.

    with Pooler(postgres.database()) as pooler, holdfast.Client(pooler.url) as client:
        ...

In transaction mode each transaction may run in another server session, so session state is lost or shared between
clients. PgBouncer runs as the server user, because it refuses to run as root.
"""

import os
import shutil
import subprocess
from typing import Literal
from urllib.parse import urlsplit

from holdfast.testing import server_folder
from holdfast.testing.resource import Resource
from holdfast.testing.server import HOST, launch, reserve_port, until
from holdfast.testing.server_user import server_user

Mode = Literal["transaction", "session", "statement"]

_CONFIG = """
[databases]
* = host={server.hostname} port={server_port} user={user}
[pgbouncer]
listen_addr = {host}
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {size}
ignore_startup_parameters = extra_float_digits
server_login_retry = 0.2
"""


def find() -> str | None:
    """The path of PgBouncer, or None if it is not installed. Packages install it outside of the PATH of users."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin"])
    return shutil.which("pgbouncer", path=path)


class Pooler(Resource):
    """``url`` is the database of ``url_behind``, reached through at most ``size`` server sessions.

    Raises LookupError if PgBouncer is not installed (see ``find()``).
    """

    def __init__(self, url_behind: str, *, mode: Mode = "transaction", size: int = 2) -> None:
        program = find()
        if program is None:
            raise LookupError("there is no PgBouncer on this machine: install the system's package pgbouncer")
        server = urlsplit(url_behind)
        user = server.username or "postgres"
        self._process: subprocess.Popen[bytes] | None = None
        self._reservation = reserve_port()
        port = self._reservation.getsockname()[1]
        self.url = server._replace(netloc=f"{user}@{HOST}:{port}").geturl()
        self._folder, self._folder_lock = server_folder.create_temporary()
        config = self._folder / "pgbouncer.ini"
        addresses = {"server": server, "server_port": server.port or 5432, "host": HOST, "port": port}
        config.write_text(_CONFIG.format(**addresses, user=user, mode=mode, size=size))
        server_user().own(config)
        try:
            self._start([program, str(config)])
        except BaseException:
            self.close()
            raise

    def log(self) -> str:
        """The log of PgBouncer."""
        return (self._folder / "log").read_text(errors="replace")

    def close(self) -> None:
        """End PgBouncer and every connection through it. Does nothing when it is closed already."""
        if self._folder_lock < 0:
            return
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._reservation.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._folder_lock)
        self._folder_lock = -1

    def __repr__(self) -> str:
        return f"<Pooler {self.url}>"

    def _start(self, command: list[str]) -> None:
        self._process = process = launch(command, self._reservation, log=self._folder / "log", folder=self._folder)
        until(lambda: process.poll() is not None or "process up" in self.log(), what=f"{self} listens")
        if process.poll() is not None:
            raise RuntimeError(f"PgBouncer did not start. Its log:\n{self.log()}")
