"""holdfast run on a terminal: the command reads it, Ctrl-C is the command's alone, a shell can stop and resume both.

The shell is a real one, and what it does with process groups is what people's shells do.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

import holdfast
from tests.children import NONE, PATIENCE, eventually, rows
from tests.cli.command import PROGRAM, SCRIPT
from tests.cli.runs import JUMP, alive, children, gone, state
from tests.cli.screen import Screen

BASH = shutil.which("bash")
needs_a_shell = pytest.mark.skipif(BASH is None, reason="no bash here")
RUN = f"{SCRIPT} run --ttl 600 job --"
CTRL_C, CTRL_D, CTRL_Z = "\x03", "\x04", "\x1a"


def shell(url: str) -> Screen:
    assert BASH is not None
    return Screen(BASH, "--norc", "--noprofile", "--noediting", "-i", url=url)


def test_an_interactive_command_reads_the_terminal(sqlite_url: str) -> None:
    with Screen(*RUN.split(), sys.executable, "-i", "-q", url=sqlite_url) as screen:
        screen.sees(">>> ")
        screen.keys("6 * 7\n")
        screen.sees("42")
        screen.keys(CTRL_C)
        screen.sees("KeyboardInterrupt")
        screen.sees(">>> ")
        screen.keys("import os; os.isatty(0), os.getpgrp() == os.getpid() == os.tcgetpgrp(0)\n")
        screen.sees("(True, True)")
        screen.keys("raise SystemExit(7)\n")
        assert screen.process.wait(PATIENCE) == 7
    assert rows(sqlite_url) == NONE


def test_ctrl_c_ends_a_command_that_does_not_care_and_the_code_says_so(sqlite_url: str) -> None:
    with Screen(*RUN.split(), "sh", "-c", "echo ready; cat", url=sqlite_url) as screen:
        screen.sees("ready")
        screen.keys("hello\n")
        screen.sees("hello")  # cat reads: a shell that is just starting it may miss the key, with or without us
        screen.keys(CTRL_C)
        assert screen.process.wait(PATIENCE) == 128 + signal.SIGINT
    assert rows(sqlite_url) == NONE


def test_without_a_shell_that_could_resume_it_ctrl_z_stops_nothing(sqlite_url: str) -> None:
    """As the entry point of a container with a terminal: who would continue it?"""
    with Screen(*RUN.split(), "cat", url=sqlite_url) as screen:
        screen.keys("before\n")
        screen.sees("before")
        screen.keys(CTRL_Z)
        screen.keys("after\n")
        screen.sees("after")
        screen.keys(CTRL_D)
        assert screen.process.wait(PATIENCE) == 0


@needs_a_shell
def test_a_shell_stops_and_resumes_both(sqlite_url: str) -> None:
    with shell(sqlite_url) as screen:
        screen.keys(f"{RUN} sh -c 'echo pid $$; exec cat'\n")
        pid = screen.number("pid ")
        [holdfast] = [each for each in children(screen.process.pid) if pid in children(each)]
        screen.keys("one\n")
        screen.sees("one")
        screen.keys(CTRL_Z)
        screen.sees("Stopped")
        eventually(lambda: [state(pid), state(holdfast)] == ["T", "T"], "both are stopped")
        screen.keys("echo the shell $((1 + 1))\n")
        screen.sees("the shell 2")
        screen.keys("fg\n")
        eventually(lambda: screen.foreground() == pid, "it is in the foreground")
        screen.keys("two\n")
        screen.sees("two")
        screen.keys(CTRL_D)
        screen.keys("echo code $?\n")
        assert screen.number("code ") == 0


@needs_a_shell
def test_a_command_in_the_background_waits_until_it_is_brought_to_the_foreground(sqlite_url: str) -> None:
    with shell(sqlite_url) as screen:
        screen.keys(f"{RUN} sh -c 'echo pid $$; exec cat' &\n")
        pid = screen.number("pid ")
        [holdfast] = [each for each in children(screen.process.pid) if pid in children(each)]
        eventually(lambda: [state(pid), state(holdfast)] == ["T", "T"], "it wants to read, and both are stopped")
        screen.keys("echo the shell $((1 + 1))\n")
        screen.sees("the shell 2")
        screen.keys("fg\n")
        eventually(lambda: screen.foreground() == pid, "it is in the foreground")
        screen.keys("mine\n")
        screen.sees("mine")
        screen.keys(CTRL_C)
        screen.keys("\necho code $?\n")
        assert screen.number("code ") == 128 + signal.SIGINT


@needs_a_shell
def test_a_running_background_command_gets_the_terminal_with_fg(sqlite_url: str, tmp_path: Path) -> None:
    """A shell tells us nothing of it: it is the first read that does."""
    program, go = tmp_path / "program.py", tmp_path / "go"
    program.write_text(
        f"import os, time\nprint('pid', os.getpid(), flush=True)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint('got', input())"
    )
    with shell(sqlite_url) as screen:
        screen.keys(f"{RUN} {sys.executable} {program} &\n")
        pid = screen.number("pid ")
        own = screen.foreground()
        screen.keys("fg\n")
        eventually(lambda: screen.foreground() != own, "the shell has put it in the foreground")
        go.touch()
        eventually(lambda: screen.foreground() == pid, "the command is in the foreground")
        screen.keys("it\n")
        assert "Stopped" not in screen.sees("got it")


@needs_a_shell
def test_in_a_pipeline_the_command_can_still_ask_the_terminal(sqlite_url: str) -> None:
    """As a pager does, or a password prompt."""
    with shell(sqlite_url) as screen:
        screen.keys(f"echo piped | {RUN} sh -c 'cat; echo ask; read -r answer < /dev/tty; echo got $answer' | cat\n")
        screen.sees("piped")
        screen.sees("ask")
        screen.keys("this\n")
        screen.sees("got this")
        screen.keys("echo the shell $((1 + 1))\n")
        screen.sees("the shell 2")


@needs_a_shell
def test_one_that_is_stopped_for_longer_than_its_ttl_is_ended_and_says_so(sqlite_url: str, tmp_path: Path) -> None:
    """Of ten minutes, which pass at once by the clocks of holdfast and its watchdog."""
    program, jump = tmp_path / "program.py", tmp_path / "jump"
    program.write_text(f"{JUMP}\n{PROGRAM}")
    with shell(sqlite_url) as screen:
        screen.keys(f"JUMP={jump} {sys.executable} {program} run --ttl 600 job -- sh -c 'echo pid $$; exec cat'\n")
        pid = screen.number("pid ")
        screen.keys(CTRL_Z)
        screen.sees("Stopped")
        jump.touch()
        gone([pid])
        screen.keys("fg\n")
        screen.sees("the command was ended")
        screen.keys("echo code $?\n")
        assert screen.number("code ") in (128 + signal.SIGTERM, 128 + signal.SIGKILL, 128 + signal.SIGHUP)


@needs_a_shell
def test_an_orphan_that_wants_the_terminal_is_hung_up_instead_of_tried_for_ever(sqlite_url: str) -> None:
    with shell(sqlite_url) as screen:
        screen.keys(f"({RUN} sh -c 'echo pid $$; exec cat < /dev/tty' &)\n")
        pid = screen.number("pid ")
        gone([pid])
        screen.keys("echo the shell $((1 + 1))\n")
        screen.sees("the shell 2")
        eventually(lambda: rows(sqlite_url) == NONE, "the lease is released")
    assert not alive(pid)


@needs_a_shell
def test_ctrl_c_while_it_waits_for_the_lease_ends_it(sqlite_url: str) -> None:
    with shell(sqlite_url) as screen:
        screen.keys(f"{RUN} sh -c 'echo pid $$; exec sleep 1000' &\n")
        first = screen.number("pid ")
        screen.keys(f"{SCRIPT} run --ttl 600 --wait job -- echo never\n")
        eventually(lambda: screen.foreground() != os.getsid(screen.process.pid), "it is in the foreground")
        waiting = screen.foreground()
        with holdfast.Client(sqlite_url) as client:
            eventually(lambda: client.leases.get("job").waiting == 1, "it waits")  # type: ignore[union-attr]
        below = children(waiting)
        screen.keys(CTRL_C)
        screen.keys("\necho code $?\n")
        assert screen.number("code ") == 128 + signal.SIGINT
        gone([waiting, *below])
        assert alive(first)
