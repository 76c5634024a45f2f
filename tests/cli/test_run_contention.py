"""Two hundred runs at once on one file: exactly one command."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.children import NONE, eventually, rows
from tests.cli.command import SCRIPT, environment
from tests.cli.runs import PATIENCE, alive, gone

RUNS, AT_ONCE = 200, 20


def running(processes: list[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    return [each for each in processes if each.poll() is None]


def test_of_200_concurrent_runs_exactly_one_starts_its_command(sqlite_url: str, tmp_path: Path) -> None:
    """They are started as fast as the machine bears, and nobody is told who will win: whoever does holds it, while all
    the others come and go."""
    began = tmp_path / "began"
    command = ["run", "--skip", "sweep", "--", "sh", "-c", f"echo $$ >> {began}; exec sleep 1000"]
    nowhere = subprocess.DEVNULL
    quietly: dict[str, Any] = {"stdin": nowhere, "stderr": nowhere, "env": environment(HOLDFAST_URL=sqlite_url)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(RUNS):
            processes.append(subprocess.Popen([SCRIPT, *command], **quietly))
            eventually(lambda: len(running(processes)) <= AT_ONCE, "some have ended")
        eventually(lambda: len(running(processes)) <= 1, "all but one have ended")
        [winner] = running(processes)
        assert {each.returncode for each in processes if each is not winner} == {0}
        [pid] = map(int, began.read_text().split())
        assert alive(pid)
        winner.terminate()
        assert winner.wait(PATIENCE) == 128 + signal.SIGTERM
        gone([pid])
        assert rows(sqlite_url) == NONE
    finally:
        for each in processes:
            each.kill()
            each.wait(PATIENCE)
