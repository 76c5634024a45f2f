"""A real driver in a process of its own, to be killed and started again; and nothing of it is left at the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import holdfast
from holdfast.driver import store
from tests.children import PATIENCE, eventually
from tests.cli.command import PROGRAM, SCRIPT, environment
from tests.fork_server import Forked


class Daemon:
    """``options`` are flags of `holdfast driver`, ``more`` variables of its environment. ``before`` is Python that is
    executed before the command line is."""

    def __init__(self, folder: Path, *options: str, before: str = "", **more: str) -> None:
        self.folder, self._options, self._more = folder, options, more
        self._program = f"{before}\n{PROGRAM}"
        self.start()

    def start(self) -> None:
        words = [SCRIPT, "driver", "--json", "--folder", str(self.folder), *self._options]
        reader, writer = os.pipe()
        with self.folder.with_suffix(".err").open("ab") as errors, Path(os.devnull).open() as nothing:
            streams = (nothing.fileno(), writer, errors.fileno())
            self.process = Forked(
                self._program, *words, streams=streams, buffered=True, env=environment(**self._more), new_session=True
            )
        os.close(writer)
        self._stdout = os.fdopen(reader, "rb")
        line = self._stdout.readline()
        assert line, self.said()
        self.ready: dict[str, Any] = json.loads(line)
        self.address: str = self.ready["address"]

    def said(self) -> str:
        return self.folder.with_suffix(".err").read_text(encoding="utf-8")

    def client(self, **options: Any) -> holdfast.reconciler.ProcessDriver:
        return holdfast.reconciler.ProcessDriver(self.address, **{"timeout": PATIENCE, **options})

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        self._stdout.close()
        assert "Traceback" not in self.said()
        assert '"failure"' not in self.said(), self.said()
        return code

    def box(self, id: str) -> Path:
        return self.folder / "sandboxes" / id

    def work(self, id: str) -> Path:
        """Where its program starts."""
        return self.folder / "work" / id

    def supervisor(self, id: str) -> int:
        return int(json.loads((self.box(id) / "started.json").read_text(encoding="utf-8"))["supervisor"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.returncode is None:
            self.end()
        clean(self.folder)


def clean(folder: Path) -> None:
    """End every sandbox there, with no driver's help."""
    for box in (folder / "sandboxes").glob("[!.]*"):

        def gone(box: Path = box) -> bool:
            with contextlib.suppress(FileNotFoundError):
                if not store.has_supervisor(box):
                    return True
                with contextlib.suppress(OSError):  # not there yet
                    orders = os.open(box / "orders", os.O_WRONLY | os.O_NONBLOCK)
                    os.write(orders, b"end 0\n")
                    os.close(orders)
                return False
            return True

        eventually(gone, f"{box.name} ends")


def state(client: holdfast.reconciler.ProcessDriver, id: str) -> str:
    """The reason of its condition; `gone` when it is."""
    found = client.get(id)
    return found.conditions[0].reason if found else "gone"


def reaches(client: holdfast.reconciler.ProcessDriver, id: str, *wanted: str) -> holdfast.reconciler.Backend:
    """Wait for one of these states."""
    eventually(lambda: state(client, id) in wanted, f"{id} is {wanted}")
    found = client.get(id)
    assert found is not None
    return found


def text(client: holdfast.reconciler.ProcessDriver, id: str, **options: Any) -> str:
    return b"".join(client.log(id, **options)).decode()


def runs(pid: int) -> bool:
    """More than a zombie, which may wait for its parent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(") ")[2][0] not in "ZX"
