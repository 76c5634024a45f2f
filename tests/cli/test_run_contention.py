"""Many runs at once on one lease: exactly one command."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.children import NONE, eventually, rows
from tests.cli.command import SCRIPT, environment
from tests.cli.runs import PATIENCE, alive, gone

LONG = 180.0
"""Seconds for so many starts of Python on a machine that is busy with other tests."""


def running(processes: list[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    return [each for each in processes if each.poll() is None]


@pytest.mark.timeout(2 * LONG)
@pytest.mark.parametrize(("engine", "runs"), [("sqlite", 200), ("postgres", 60)])
def test_of_many_concurrent_runs_exactly_one_starts_its_command(
    request: pytest.FixtureRequest, tmp_path: Path, engine: str, runs: int
) -> None:
    """Each waits at a gate until all are there, so that none has ended before the last has begun. Nobody is told who
    will win, and whoever does holds it while all the others go.

    They are nice: two hundred at once would leave nothing to the tests beside them. On PostgreSQL fewer: a start costs
    some 0.4 s of processor time there, with libpq and a backend of its own."""
    url = request.getfixturevalue(f"{engine}_url")
    with holdfast.Client(url) as client:
        client.migrate()
    began = tmp_path / "began"
    command = [SCRIPT, "run", "--skip", "--ttl", "120", "sweep", "--"]
    command += ["sh", "-c", f"echo $$ >> {began}; exec sleep 1000"]
    nowhere = subprocess.DEVNULL
    quietly: dict[str, Any] = {"stdout": nowhere, "stderr": nowhere, "env": environment(HOLDFAST_URL=url)}
    processes: list[subprocess.Popen[bytes]] = []
    gate, opens = os.pipe()
    try:
        for _ in range(runs):
            wait = ["sh", "-c", 'read line; exec nice "$@" </dev/null', "sh", *command]
            processes.append(subprocess.Popen(wait, stdin=gate, **quietly))
        assert len(running(processes)) == runs
        os.close(opens)
        opens = -1
        eventually(lambda: len(running(processes)) <= 1, "all but one have ended", LONG)
        [winner] = running(processes)
        assert {each.returncode for each in processes if each is not winner} == {0}
        eventually(began.exists, "its command has begun")
        [pid] = map(int, began.read_text().split())
        assert alive(pid)
        winner.terminate()
        assert winner.wait(PATIENCE) == 128 + signal.SIGTERM
        gone([pid])
        assert rows(url) == NONE
    finally:
        for each in processes:
            each.kill()
        for each in processes:
            each.wait(PATIENCE)
        os.close(gate)
        with suppress(OSError):
            os.close(opens)
