"""Many runs at once on one lease: exactly one command."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

import holdfast
from tests.children import NONE, PATIENCE, eventually, rows
from tests.cli.command import IMPORTED, PROGRAM, SCRIPT, environment
from tests.cli.runs import alive, gone
from tests.fork_server import Forked

LONG = 2 * PATIENCE
"""Seconds for so many processes on a machine that is busy with other tests."""
WAITING = f"""
import os
os.nice(10)
os.read(0, 1)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
{PROGRAM}
"""
"""Everything is imported before the gate opens, so that all ask for the lease at the same moment."""


@pytest.mark.timeout(3 * LONG)
@pytest.mark.parametrize(("engine", "runs"), [("sqlite", 20), ("postgres", 10)])
def test_of_many_concurrent_runs_exactly_one_starts_its_command(
    request: pytest.FixtureRequest, tmp_path: Path, engine: str, runs: int
) -> None:
    """Each waits at a gate until all are there, so that none has ended before the last has begun. The winner holds the
    lease while all the others go. They are nice, to leave something to the tests beside them."""
    url = request.getfixturevalue(f"{engine}_url")
    with holdfast.Client(url) as client:
        client.migrate()
    began = tmp_path / "began"
    command = [SCRIPT, "run", "--skip", "--ttl", "600", "sweep", "--"]
    command += ["sh", "-c", f"echo $$ >> {began}; exec sleep 1000"]
    processes: list[Forked] = []

    def running() -> list[Forked]:
        return [each for each in processes if each.poll() is None]

    def kill_all() -> None:
        for each in processes:
            each.kill()
        for each in processes:
            each.wait(PATIENCE)

    with ExitStack() as stack, open(os.devnull, "w") as nowhere:  # noqa: PTH123
        gate, opening = os.pipe()
        stack.callback(os.close, gate)
        opens = stack.enter_context(os.fdopen(opening, "wb"))
        stack.callback(kill_all)
        options = {"streams": (gate, nowhere.fileno(), nowhere.fileno()), "env": environment(HOLDFAST_URL=url)}
        processes.extend(
            Forked(WAITING, *command, buffered=True, also=IMPORTED, new_session=True, **options)  # type: ignore[arg-type]
            for _ in range(runs)
        )
        assert len(running()) == runs
        opens.close()
        eventually(lambda: len(running()) <= 1, "all but one have ended", LONG)
        [winner] = running()
        assert {each.returncode for each in processes if each is not winner} == {0}
        eventually(lambda: began.exists() and began.read_text().endswith("\n"), "its command has begun")
        [pid] = map(int, began.read_text().split())
        assert alive(pid)
        winner.send_signal(signal.SIGTERM)
        assert winner.wait(PATIENCE) == 128 + signal.SIGTERM
        gone([pid])
        assert rows(url) == NONE
