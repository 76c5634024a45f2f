"""The operating system user that servers run as.

PostgreSQL and PgBouncer refuse to run as root. Where user namespaces are allowed, root maps itself to an ordinary user
inside one: the kernel still checks permissions as root, so the server can read a clone or a virtual environment below
/root. Elsewhere the server runs as `nobody`, and every file it needs must be accessible to that user.

Each command of a prefix ends with exec, so that the server is a direct child of the process that started the prefix.
"""

import functools
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_NAMESPACE = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
_SET_USER = """
import os, sys, warnings  # execvp imports warnings, which may be unreadable once the user has changed
uid, gid, *command = sys.argv[1:]
os.setgroups([])
os.setgid(int(gid))
os.setuid(int(uid))
os.execvp(command[0], command)
"""
_DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "QUIT")


@dataclass(frozen=True)
class ServerUser:
    """A user, and the command prefix that runs a program as that user."""

    uid: int
    gid: int
    prefix: tuple[str, ...]

    def own(self, path: Path) -> None:
        """Make this user the owner of `path`, which this process has created."""
        if self.uid != os.geteuid():
            os.chown(path, self.uid, self.gid)

    def environment(self) -> dict[str, str]:
        """The environment of this process without settings of PostgreSQL (PGDATA, PGPORT, …) and locales."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
        return kept | {"LC_ALL": "C"}


@functools.cache
def server_user() -> ServerUser:
    """The user of the servers that this process starts."""
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0:
        return ServerUser(uid, gid, _with_death_signal(()))
    if _works(_NAMESPACE):
        return ServerUser(uid, gid, _with_death_signal(_NAMESPACE))
    nobody = pwd.getpwnam("nobody")
    set_user = (sys.executable, "-I", "-S", "-c", _SET_USER, str(nobody.pw_uid), str(nobody.pw_gid))
    return ServerUser(nobody.pw_uid, nobody.pw_gid, _with_death_signal(set_user))


def _with_death_signal(prefix: tuple[str, ...]) -> tuple[str, ...]:
    """Add the command that ends the server when its watchdog is killed, if the machine has it.

    It comes last, because the kernel clears the parent-death signal when the user changes.
    """
    return (*prefix, *_DIE_WITH_PARENT) if _works((*prefix, *_DIE_WITH_PARENT)) else prefix


def _works(prefix: Sequence[str]) -> bool:
    if shutil.which(prefix[0]) is None:
        return False
    return subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
