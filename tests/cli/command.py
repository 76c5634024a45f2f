"""The console script: as a process in a pipe or on a terminal of a given width, or within the test process."""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping
from contextlib import chdir, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jsonschema
from click.testing import CliRunner

from holdfast.cli.app import COMMANDS, app
from tests.children import PATIENCE, eventually
from tests.fork_server import Forked, finish

ROOT = Path(__file__).resolve().parent.parent.parent
SCHEMAS = ROOT / "docs" / "reference" / "json"
SCRIPT = str(Path(sys.executable).with_name("holdfast"))
PROGRAM = "import sys; from holdfast.cli import main; sys.exit(main())"  # as in the script
IMPORTED = (
    "holdfast.cli.exit", "holdfast.cli.output", "holdfast.cli.run_options", "holdfast.cli.settings",
    "holdfast.cli.watch_mode", "holdfast.commands.execute", "rich.live",
    *sorted({place.partition(":")[0] for name, place in COMMANDS.items() if name not in ("driver", "serve")}),
)  # fmt: skip
"""Modules of the command line: imported before the fork, they are not imported by each process."""
SERVED = (
    "fastapi", "jinja2", "uvicorn", "uvicorn.protocols.websockets.auto",
    "holdfast.cli.app", "holdfast.cli.serve", "holdfast.gateway.app", "holdfast.gateway.server",
    "holdfast.driver.client_async", "holdfast.objects.objects_async",
    "holdfast.recipes.elector_async", "holdfast.recipes.reconciler_async", "holdfast.recipes.slots_async",
)  # fmt: skip
"""Modules that `holdfast serve` imports as well: they take three seconds of CPU time."""
_LEFT_OUT = ("HOLDFAST_", "_HOLDFAST_", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_", "TERM", "PG")

Finished = subprocess.CompletedProcess[str]


def environment(**more: str) -> dict[str, str]:
    """The environment of the tests without the variables that would change the output."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_LEFT_OUT)}
    return {**kept, "TERM": "xterm-256color", **more}


def _modules(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The modules to import before the fork."""
    return SERVED if "serve" in arguments else IMPORTED


def call(*arguments: str, cwd: Path | None = None, **more: str) -> Finished:
    """Run it in a pipe, to its end. Fails if it prints a traceback."""
    done = _finish([SCRIPT, *arguments], cwd, environment(**more), _modules(arguments))
    assert "Traceback" not in done.stderr, done.stderr
    return done


def _finish(command: list[str], cwd: Path | None, env: dict[str, str], also: tuple[str, ...]) -> Finished:
    """Forked from a process that has done its imports; with PYTHON* variables, in an interpreter of its own."""
    if any(name.startswith("PYTHON") and value != os.environ.get(name) for name, value in env.items()):
        return subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", timeout=PATIENCE * 2, check=False, cwd=cwd,
            env=env, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    return finish(PROGRAM, *command, timeout=PATIENCE * 2, cwd=cwd, env=env, also=also)


def ask(*arguments: str, cwd: Path | None = None, **more: str) -> str:
    """Its stdout. Fails unless its exit code is 0."""
    done = call(*arguments, cwd=cwd, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def invoke(*arguments: str, cwd: Path | None = None, **more: str) -> Finished:
    """The same as ``call`` within this process, which takes a tenth of the time: for tests of what a command prints.
    `run`, terminals, signals and streams need a process. An exception that no command may raise is raised here."""
    wanted = environment(**more)
    env = {name: wanted.get(name) for name in {*os.environ, *wanted}}
    with chdir(cwd) if cwd else nullcontext():
        result = CliRunner().invoke(app, arguments, env=env, catch_exceptions=False, prog_name="holdfast")
    return Finished(arguments, result.exit_code, result.stdout, result.stderr)


def printed(*arguments: str, cwd: Path | None = None, **more: str) -> str:
    """The stdout of ``invoke``. Fails unless its exit code is 0."""
    done = invoke(*arguments, cwd=cwd, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def valid(schema: str, text: str) -> Any:
    """The JSON in ``text``. Fails unless it is valid by the schema in docs/reference/json."""
    value = json.loads(text)
    rules = json.loads((SCHEMAS / f"{schema}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(rules).validate(value)
    return value


class Running:
    """A command that runs until it is ended: in a pipe, or on a terminal of ``columns`` columns. ``text`` is its stdout
    so far, ``problems`` its stderr."""

    def __init__(self, *arguments: str, columns: int | None = None, cwd: Path | None = None, **more: str) -> None:
        self.text = self.problems = ""
        reader, writer = os.pipe() if columns is None else pty.openpty()
        if columns is not None:
            fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        error_reader, error_writer = os.pipe()
        with open(os.devnull) as nothing:  # noqa: PTH123
            self.process = Forked(
                PROGRAM, SCRIPT, *arguments, streams=(nothing.fileno(), writer, error_writer), buffered=True,
                also=_modules(arguments), cwd=cwd, env=environment(**more), new_session=True,
            )  # fmt: skip
        os.close(writer)
        os.close(error_writer)
        self._outputs = {"text": reader, "problems": error_reader}
        self._readers = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._outputs]
        for thread in self._readers:
            thread.start()

    def _read(self, name: str) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            while received := os.read(self._outputs[name], 65536):
                setattr(self, name, getattr(self, name) + decoder.decode(received))
        except OSError:  # the end of a terminal: no process writes to it any more
            pass

    def until_it_says(self, text: str) -> None:
        eventually(lambda: text in self.text or self.process.poll() is not None, f"it says {text!r}")
        assert text in self.text, f"it ended with {self.process.returncode}, having said {self.text!r}"

    def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """Its exit code and stderr; ``text`` is complete then."""
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        for thread in self._readers:
            thread.join(PATIENCE)
        assert "Traceback" not in self.problems, self.problems
        return code, self.problems

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        for thread in self._readers:
            thread.join(PATIENCE)
        for output in self._outputs.values():
            os.close(output)


def on_terminal(*arguments: str, columns: int, cwd: Path | None = None, **more: str) -> str:
    """What it writes to a terminal of that width. Fails unless its exit code is 0."""
    with Running(*arguments, columns=columns, cwd=cwd, **more) as running:
        code, problems = running.end()
        assert code == 0, problems
        return running.text.replace("\r\n", "\n")


def at(url: str, *arguments: str) -> tuple[str, ...]:
    return ("--url", url, *arguments)


def columns_of(text: str) -> list[Mapping[str, str]]:
    """The rows of a table, by the headings of its columns."""
    head, *lines = text.splitlines()
    starts = [0] + [i for i in range(2, len(head)) if head[i - 2 : i] == "  " and head[i] != " "]
    ends = [*starts[1:], None]
    return [{head[a:b].strip(): line[a:b].strip() for a, b in zip(starts, ends, strict=True)} for line in lines]
