"""Hostile files: a sandbox puts them in the place of the driver's, another user in the place of SQLite's."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import holdfast
from holdfast.testing.server import until
from proof.attack.tally import Tally
from proof.attack.targets import PATIENCE, DriverTarget

_FILES = (
    "spec.json", "deleting", "started.json", "exit.json", "running", "lock", "orders", "life", "log.0", "log.007",
    "log.999999999999999999",
    "supervisor.err", "deleting.new", "exit.json.new",
)  # fmt: skip
_SIDE_FILES = ("", "-wal", "-shm", "-journal", ".holdfast-turn", ".holdfast-live", "-locks")
_TEXTS = (
    b"",
    b"{",
    b"[" * 100_000,
    b'{"grace": NaN}',
    b'{"grace": 1e999}',
    b'{"pid": -1, "supervisor": 1, "started_at": 1}',
    b"\xff" * 4096,
)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 << 30)


def _state(client: holdfast.reconciler.ProcessDriver, id: str) -> str:
    found = client.get(id)
    return found.conditions[0].reason if found else "removed"


class FileAttacker:
    STRIKES = 1
    """In a round."""

    def __init__(self, driver: DriverTarget, folder: Path, tally: Tally, random: random.Random) -> None:
        self._driver, self._folder, self._tally, self._random = driver, folder, tally, random
        self._numbers = count()
        self._kinds: dict[str, Callable[[Path], object]] = {
            "fifo": os.mkfifo, "folder": Path.mkdir, "sparse": _sparse,
            "endless link": lambda path: path.symlink_to("/dev/zero"),
            "dangling link": lambda path: path.symlink_to("nothing"), "loop": lambda path: path.symlink_to(path.name),
            "content": lambda path: path.write_bytes(self._random.choice(_TEXTS)),
        }  # fmt: skip
        self.attacks: list[Callable[[], None]] = [self.replace_file_of_driver, self.replace_file_of_sqlite]

    def close(self) -> None:
        """Delete all that it has made. A sandbox that resists is a violation."""
        client = self._driver.client
        ids = [sandbox.id for sandbox in client.list() if sandbox.id.startswith("hostile-")]
        for id in ids:
            client.delete(id, grace=0)
        for id in ids:
            if not client.delete(id, grace=0, wait=PATIENCE):
                self._tally.report(f"driver: the sandbox {id} is not ended")

    def replace_file_of_driver(self) -> None:
        id, client = f"hostile-{next(self._numbers)}", self._driver.client
        client.create(id, self._random.choice([["true"], ["sleep", "1000"]]), grace=0.1)
        until(lambda: _state(client, id) != "Starting", what=f"{id} starts", timeout=PATIENCE)
        box, kind, answer = self._driver.folder / "sandboxes" / id, self._random.choice([*self._kinds]), "removed"
        with suppress(FileNotFoundError, FileExistsError):
            for name in self._random.sample(_FILES, self._random.choice([1, 1, 2])):
                path = box / name
                if os.path.lexists(path):
                    path.rename(box / f"away-{name}")
                self._kinds[kind](path)
        with suppress(holdfast.DriverError):
            answer = _state(client, id)
            b"".join(client.log(id, tail=2))
        self._tally.note(f"driver: {kind}", answer)
        with suppress(holdfast.DriverError):
            client.delete(id)

    def replace_file_of_sqlite(self) -> None:
        """A command has to end, with an error or without."""
        file = self._folder / f"hostile-{next(self._numbers)}.db"
        kind, side = self._random.choice([*self._kinds]), self._random.choice(_SIDE_FILES)
        self._kinds[kind](file.with_name(file.name + side))
        environment = os.environ | {"HOLDFAST_URL": f"sqlite:///{file}"}
        command = [sys.executable, "-m", "holdfast", "ls"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                output, errors = process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                output, errors = process.communicate()
                self._tally.report(f"sqlite: ls with a {kind} as {file.name + side} does not end")
        if b"Traceback" in errors:
            self._tally.report(f"sqlite: ls with a {kind} as {file.name + side}: {errors[-500:]!r}")
        self._tally.note(f"sqlite: {kind}", f"exit code {process.returncode}")
        self._tally.check_secrets("sqlite", kind, output + errors)
