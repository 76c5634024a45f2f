"""Real replicas: `holdfast serve` in processes of their own, to be asked, stopped and killed; none is left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from textwrap import dedent
from types import TracebackType
from typing import Any, Self

import httpx

from tests.children import PATIENCE
from tests.cli.command import PROGRAM, SCRIPT, SERVED, environment
from tests.driver.daemon import Daemon, clean
from tests.fork_server import Forked

_PATIENT = """
from holdfast.database.engine_async import AsyncEngine
from holdfast.gateway import health
from holdfast.dashboard import snapshot
AsyncEngine.call.__kwdefaults__["timeout"] = health._CHECK_WITHIN = snapshot.READ_WITHIN = 60.0
health.TTL = 600.0
"""
"""Run before a replica starts: however slow the machine is, a replica does not take its database for one that is away,
and does not lose the lease on its own name."""
_WITH_FEATURE = """
import types
from fastapi import APIRouter
from holdfast.gateway import app, context
feature = types.SimpleNamespace(router=APIRouter())
{feature}
app.FEATURES += (feature,)
from holdfast.cli import main
main()
"""


class Replica:
    """``options`` are flags of `holdfast serve`, ``more`` variables of its environment. Without ``driver=`` it starts
    one beside itself, on ``folder / "d"``. ``feature`` is Python that runs before, and may add to ``feature``.

    However slow the machine, it is given the time to end: one that does not end by itself is never overdue here."""

    def __init__(
        self, url: str, folder: Path, *options: str, name: str = "replica", driver: str | None = None,
        feature: str | None = None, **more: str,
    ) -> None:  # fmt: skip
        self.url, self.folder, self.name = url, folder, name
        beside = ["--driver-folder", str(folder / "d")] if driver is None else ["--driver", driver]
        self._program = _PATIENT + (PROGRAM if feature is None else _WITH_FEATURE.format(feature=dedent(feature)))
        self._arguments = [SCRIPT, "serve", "--port", "0", "--json", "--stop-within", "600", *beside, *options]
        self._environment = environment(HOLDFAST_URL=url, HOLDFAST_REPLICA_ID=name, **more)
        self.log = folder / f"{name}.log"
        self.begin()

    def begin(self) -> None:
        """Without waiting until it answers."""
        reader, writer = os.pipe()
        with self.log.open("ab") as errors, open(os.devnull) as nothing, os.fdopen(writer, "wb"):  # noqa: PTH123
            streams = (nothing.fileno(), writer, errors.fileno())
            self.process = Forked(
                self._program, *self._arguments, streams=streams, buffered=True, also=SERVED,
                cwd=self.folder, env=self._environment, new_session=True,
            )  # fmt: skip
        self._stdout = os.fdopen(reader, "rb")

    def ready(self) -> Self:
        line = self._stdout.readline()
        assert line, self.log.read_text(encoding="utf-8")
        self.told: dict[str, Any] = json.loads(line)
        self.address: str = self.told["address"]
        self.http = httpx.Client(base_url=self.address, timeout=PATIENCE)
        return self

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        """What it logged, or those of one name."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [each for each in found if event in (None, each.get("event"))]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit code; nothing went wrong inside that nobody handled."""
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        self._close()
        return code

    def restart(self, *options: str) -> Self:
        """``options`` are further flags, from now on."""
        if self.process.returncode is None:
            self.end()
        self._arguments += options
        self.begin()
        return self.ready()

    def _close(self) -> None:
        self._stdout.close()
        if hasattr(self, "http"):
            self.http.close()

    def __enter__(self) -> Self:
        return self.ready()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE)
        self._close()
        clean(self.folder / "d")


@contextmanager
def fleet(
    url: str, folder: Path, *options: str, count: int = 3, feature: str | None = None, **more: str
) -> Iterator[list[Replica]]:
    """So many replicas on one database, with one driver that survives them; started side by side."""
    with ExitStack() as stack:
        driver = stack.enter_context(Daemon(folder / "d"))
        made = [
            Replica(url, folder, *options, name=f"replica-{number}", driver=driver.address, feature=feature, **more)
            for number in range(1, count + 1)
        ]
        try:
            yield [stack.enter_context(each) for each in made]
        finally:
            for each in made:
                if each.process.poll() is None:
                    each.process.send_signal(signal.SIGTERM)
