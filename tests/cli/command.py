"""The console script as a process: in a pipe, or on a terminal of a given width."""

from __future__ import annotations

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
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jsonschema

from tests.children import PATIENCE, eventually
from tests.fork_server import finish

ROOT = Path(__file__).resolve().parent.parent.parent
SCHEMAS = ROOT / "docs" / "reference" / "json"
SCRIPT = str(Path(sys.executable).with_name("holdfast"))
PROGRAM = "import sys; from holdfast.cli import main; sys.exit(main())"  # as in the script
SERVED = ("fastapi", "jinja2", "uvicorn")
"""Modules that `holdfast serve` imports as well: they take two seconds of CPU time."""
_LEFT_OUT = ("HOLDFAST_", "_HOLDFAST_", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_", "TERM", "PG")

Finished = subprocess.CompletedProcess[str]


def environment(**more: str) -> dict[str, str]:
    """The environment of the tests without the variables that would change the output."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_LEFT_OUT)}
    return {**kept, "TERM": "xterm-256color", **more}


def call(*arguments: str, cwd: Path | None = None, **more: str) -> Finished:
    """Run it in a pipe, to its end. Fails if it prints a traceback."""
    done = _finish([SCRIPT, *arguments], cwd, environment(**more), SERVED if "serve" in arguments else ())
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


def valid(schema: str, text: str) -> Any:
    """The JSON in ``text``. Fails unless it is valid by the schema in docs/reference/json."""
    value = json.loads(text)
    rules = json.loads((SCHEMAS / f"{schema}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(rules).validate(value)
    return value


class Running:
    """A command that runs until it is ended: in a pipe, or on a terminal of ``columns`` columns."""

    def __init__(self, *arguments: str, columns: int | None = None, cwd: Path | None = None, **more: str) -> None:
        self.text = ""
        reader, writer = os.pipe() if columns is None else pty.openpty()
        if columns is not None:
            fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self.process = subprocess.Popen(
            [SCRIPT, *arguments], stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, text=True,
            cwd=cwd, env=environment(**more), start_new_session=True,
        )  # fmt: skip
        os.close(writer)
        self._output = reader
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while received := os.read(self._output, 65536):
                self.text += received.decode("utf-8", "replace")
        except OSError:  # the end of a terminal: no process writes to it any more
            pass

    def until_it_says(self, text: str) -> None:
        eventually(lambda: text in self.text or self.process.poll() is not None, f"it says {text!r}")
        assert text in self.text, f"it ended with {self.process.returncode}, having said {self.text!r}"

    def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """Its exit code and stderr; ``text`` is complete then."""
        if number is not None:
            self.process.send_signal(number)
        _, problems = self.process.communicate(timeout=PATIENCE)
        self._thread.join(PATIENCE)
        assert "Traceback" not in problems, problems
        return self.process.returncode, problems

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)
        self._thread.join(PATIENCE)
        os.close(self._output)


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
