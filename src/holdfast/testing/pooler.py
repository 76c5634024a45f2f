"""A PgBouncer in front of a server, where it is installed: the thing that moves clients between server sessions.

    with Pooler(postgres.database()) as pooler, holdfast.Client(pooler.url) as client:
        ...

In transaction mode each transaction may run in another session than the one before, so whatever lives in a session is
lost or shared. It runs as the account that servers run under, because PgBouncer refuses to be root.
"""

import os
import shutil
from typing import Literal
from urllib.parse import urlsplit

from holdfast.testing import folders
from holdfast.testing.account import account
from holdfast.testing.closing import Closing
from holdfast.testing.server import HOST, launch, reserve_port, until

Mode = Literal["transaction", "session", "statement"]

_CONFIG = """
[databases]
* = host={behind.hostname} port={server_port} user={user}
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
    """Where PgBouncer is on this machine; None when it is not. Packages put it where only root looks."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin"])
    return shutil.which("pgbouncer", path=path)


class Pooler(Closing):
    """``url`` leads to the database of ``url_behind`` through at most ``size`` sessions of the server.

    LookupError where PgBouncer is not installed; see ``find()``.
    """

    def __init__(self, url_behind: str, *, mode: Mode = "transaction", size: int = 2) -> None:
        program = find()
        if program is None:
            raise LookupError("there is no PgBouncer on this machine: install the system's package pgbouncer")
        behind = urlsplit(url_behind)
        user = behind.username or "postgres"
        self._reservation = reserve_port()
        port = self._reservation.getsockname()[1]
        self.url = behind._replace(netloc=f"{user}@{HOST}:{port}").geturl()
        self._folder, self._claim = folders.temporary()
        config = self._folder / "pgbouncer.ini"
        places = {"behind": behind, "server_port": behind.port or 5432, "host": HOST, "port": port}
        config.write_text(_CONFIG.format(**places, user=user, mode=mode, size=size))
        account().own(config)
        try:
            command = [program, str(config)]
            self._process = launch(command, self._reservation, log=self._folder / "log", removed=self._folder)
            until(lambda: self._process.poll() is not None or self._listens(), what=f"{self} listens")
            if self._process.poll() is not None:
                raise RuntimeError(f"PgBouncer did not start. It said:\n{self.log()}")
        except BaseException:
            self.close()
            raise

    def log(self) -> str:
        """What it wrote."""
        return (self._folder / "log").read_text(errors="replace")

    def close(self) -> None:
        """End it, and every connection through it. Harmless when closed."""
        if self._claim < 0:
            return
        process = getattr(self, "_process", None)
        if process is not None:
            process.terminate()
            process.wait()
        self._reservation.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._claim)
        self._claim = -1

    def __repr__(self) -> str:
        return f"<Pooler {self.url}>"

    def _listens(self) -> bool:
        return "process up" in self.log()
