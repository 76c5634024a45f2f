"""tests.fork_server: processes forked off one that has imported what they need."""

from __future__ import annotations

import os
import signal

import pytest

from tests.children import Child

WAITS = "import sys; print('up', flush=True); sys.stdin.read()"


def test_a_process_is_waited_for_although_another_was_stopped_as_it_was_forked() -> None:
    """That one has copies of all descriptors of the fork server."""
    for _ in range(20):
        with Child(WAITS) as first:
            first.expect("up")
            with Child(WAITS) as second:
                second.signal(signal.SIGSTOP)
                first.kill()
                second.signal(signal.SIGCONT)
                second.expect("up")


def test_a_process_that_has_no_group_yet_is_ended_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_none(group: int, number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "killpg", has_none)
    with Child(WAITS) as child:
        pass
    assert child.process.returncode == -signal.SIGKILL
