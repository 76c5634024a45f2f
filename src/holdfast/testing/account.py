"""The account a PostgreSQL server runs under.

PostgreSQL refuses to run as root. Where a user namespace can be had, root only *looks* like an ordinary user to the
server: the kernel still sees root, so the server may read a clone or a virtual environment below /root. Without one,
the server really becomes `nobody`, and everything it touches has to be open to that user.

No command here may stand between the server and its parent: each one ends by turning into the next.
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
_BECOME = """
import os, sys, warnings  # execvp imports it, when Python itself may be out of reach
uid, gid, *command = sys.argv[1:]
os.setgroups([])
os.setgid(int(gid))
os.setuid(int(uid))
os.execvp(command[0], command)
"""
_DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "QUIT")


@dataclass(frozen=True)
class Account:
    """Who owns the server's files, and the words that go in front of its commands."""

    uid: int
    gid: int
    prefix: tuple[str, ...]

    def own(self, path: Path) -> None:
        """Give `path`, made by this process, to the account."""
        if self.uid != os.geteuid():
            os.chown(path, self.uid, self.gid)

    def environment(self) -> dict[str, str]:
        """This process's environment without what would reach into a server or its tools (PGDATA, PGPORT, ...)."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
        return clean | {"LC_ALL": "C"}


@functools.cache
def account() -> Account:
    """The account for servers started by this process."""
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0:
        return Account(uid, gid, _dying(()))
    if _works(_NAMESPACE):
        return Account(uid, gid, _dying(_NAMESPACE))
    nobody = pwd.getpwnam("nobody")
    become = (sys.executable, "-I", "-S", "-c", _BECOME, str(nobody.pw_uid), str(nobody.pw_gid))
    return Account(nobody.pw_uid, nobody.pw_gid, _dying(become))


def _dying(prefix: tuple[str, ...]) -> tuple[str, ...]:
    """Add what ends the server when its watcher is killed, where there is such a thing.

    It comes last, because the kernel forgets the wish when the user changes.
    """
    return (*prefix, *_DIES_WITH_PARENT) if _works((*prefix, *_DIES_WITH_PARENT)) else prefix


def _works(prefix: Sequence[str]) -> bool:
    if shutil.which(prefix[0]) is None:
        return False
    return subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
