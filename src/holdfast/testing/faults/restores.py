"""Faults that restore a backup: it is made when they begin, and what was committed since then is lost when they heal.

Stop or refuse the clients of a database before its backup is restored: these faults do.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from holdfast.testing.faults.fault import Fault
from holdfast.testing.postgres import Postgres
from holdfast.testing.server_user import server_user


def restore_copy(server: Postgres) -> Fault:
    """Copy the files of the server in one instant, as a snapshot of its volume does; to heal, kill it, and start it
    with the copy."""
    copies: list[Path] = []

    def begin() -> None:
        folder = Path(tempfile.mkdtemp(prefix="copy-", dir=server.folder)) / "data"
        server.pause()
        try:
            shutil.copytree(server.data, folder)
        finally:
            server.resume()
        copies.append(folder)

    def heal() -> None:
        while copies:
            server.kill()
            put_back(server, copies[-1])
            server.start()
            shutil.rmtree(copies.pop().parent)

    return Fault("restore_copy", server, begin, heal)


def restore_dump(server: Postgres, database: str) -> Fault:
    """Dump the database; to heal, load the dump into a new database, and give that the name of the old one."""
    dump, restored = server.folder / f"{database}.sql", f"{database}_restored"

    def begin() -> None:
        server.binaries.run("pg_dump", f"--dbname={_url(server, database)}", f"--file={dump}")

    def heal() -> None:
        server.database(restored)
        options = ("--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1")
        server.binaries.run("psql", f"--dbname={_url(server, restored)}", *options, f"--file={dump}")
        _replace(server, database, restored)

    return Fault("restore_dump", server, begin, heal)


def restore_template(server: Postgres, database: str) -> Fault:
    """Copy the database with CREATE DATABASE … TEMPLATE; to heal, give the copy the name of the old one."""
    restored = f"{database}_copy"

    def begin() -> None:
        _without_clients(server, database, lambda: server.database(restored, like=_url(server, database)))

    return Fault("restore_template", server, begin, lambda: _replace(server, database, restored))


def put_back(server: Postgres, copy: Path) -> None:
    """Replace the files of a server that is not running by a copy of them."""
    shutil.rmtree(server.data)
    shutil.copytree(copy, server.data)
    (server.data / "postmaster.pid").unlink(missing_ok=True)
    for path in (server.data, *server.data.rglob("*")):
        server_user().own(path)
    server.data.chmod(0o700)


def _replace(server: Postgres, database: str, restored: str) -> None:
    def rename() -> None:
        server.execute(f'drop database "{database}"')
        server.execute(f'alter database "{restored}" rename to "{database}"')

    _without_clients(server, database, rename)


def _without_clients(server: Postgres, database: str, work: Callable[[], object]) -> None:
    """Call ``work`` while the database has no connections and accepts none. The name may be of another one then."""
    server.execute(f'alter database "{database}" allow_connections false')
    server.execute("select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s", database)
    try:
        work()
    finally:
        server.execute(f'alter database "{database}" allow_connections true')


def _url(server: Postgres, database: str) -> str:
    return f"{server.url.rpartition('/')[0]}/{database}"
