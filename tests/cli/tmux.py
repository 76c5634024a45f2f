"""A program in a real terminal: tmux shows what a person would see."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.children import HANG, PATIENCE, eventually
from tests.cli.command import environment

needs_tmux = pytest.mark.skipif(
    shutil.which("tmux") is None, reason="tmux is not installed: apt-get install tmux"
)  # fmt: skip


class Tmux:
    """A shell in a terminal of ``columns`` by ``lines``, on a tmux server of its own."""

    def __init__(self, folder: Path, *, columns: int = 120, lines: int = 40, **more: str) -> None:
        self._socket = str(folder / "tmux")
        self._environment = environment(
            **{"LC_ALL": "C.UTF-8", "SHELL": "/bin/sh", "PS1": "shell$ ", "ENV": "", **more}
        )
        size = ("-x", str(columns), "-y", str(lines))
        self._call("-f", "/dev/null", "new-session", "-d", *size, "exec sh")

    def _call(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, *words], env=self._environment, capture_output=True, text=True, check=False,
            timeout=HANG,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, *command: str) -> None:
        """Start a command in the shell."""
        self.keys(shlex.join(command), "Enter")

    def keys(self, *keys: str) -> None:
        """Press keys, by their names in tmux; other words are typed."""
        for key in keys:
            self._call("send-keys", *(() if key in _NAMED or key.startswith("C-") else ("-l",)), key)

    def resize(self, columns: int, lines: int) -> None:
        self._call("resize-window", "-x", str(columns), "-y", str(lines))

    def screen(self) -> str:
        return self._call("capture-pane", "-p")

    def shows(self, name: str) -> str:
        """A variable of tmux about the terminal, such as cursor_flag."""
        return self._call("display-message", "-p", f"#{{{name}}}").strip()

    def sees(self, *texts: str) -> str:
        """Wait until the screen has them all; returns it."""
        eventually(lambda: all(text in self.screen() for text in texts), f"{texts} on the screen", PATIENCE)
        return self.screen()

    def misses(self, text: str) -> None:
        """Wait until the screen does not have it."""
        eventually(lambda: text not in self.screen(), f"no {text!r} on the screen", PATIENCE)

    def pid(self, program: str) -> int:
        """Of the program that runs in the shell."""
        [shell] = self._call("list-panes", "-F", "#{pane_pid}").split()
        children = Path(f"/proc/{shell}/task/{shell}/children").read_text(encoding="ascii").split()
        [pid] = [pid for pid in children if program in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")]
        return int(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        screen = self.screen() if error is not None else ""
        self._call("kill-server")
        if error is not None:
            error.add_note(f"the screen:\n{screen}")


_NAMED = ("Enter", "Escape", "Up", "Down", "Left", "Right", "Home", "End", "PPage", "NPage", "Tab", "BTab", "BSpace")
