"""What a newcomer runs first: it has to be true, and to leave nothing behind whenever it is interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from holdfast.testing.child_watchdog import descendants
from holdfast.testing.server import until
from tests.children import HANG
from tests.cli.screen import Screen

ROOT = Path(__file__).resolve().parents[2]
DEMO, RECORDING = ROOT / "examples" / "demo.py", ROOT / "docs" / "demo.svg"
pytestmark = pytest.mark.timeout(900)  # it may be run again
ENGINES = pytest.mark.parametrize(
    "options",
    [pytest.param([], id="sqlite"), pytest.param(["--postgres"], id="postgres", marks=pytest.mark.realtime)],
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder that the account of the PostgreSQL server may enter, too."""
    with tempfile.TemporaryDirectory(prefix="demo-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def demo(options: list[str], folder: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """The demo in a process group of its own. Its workers share its stderr, which ends only with the last of them."""
    environment = {**os.environ, "TERM": "dumb", **({"TMPDIR": str(folder)} if folder else {})}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores Ctrl-C
    process = subprocess.Popen(
        [sys.executable, str(DEMO), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def leftovers(folder: Path) -> list[str]:
    """Everything below the temporary folder but the initialised data folder that later runs copy."""
    found = [*folder.glob("holdfast-demo-*"), *folder.glob("holdfast-postgres-*/server-*")]
    return [str(each) for each in found]


def played(options: list[str]) -> tuple[int, str, str]:
    """Its exit status and output. Its leases are to be lost within seconds, so a machine that stands still spoils it:
    when it says that, and only then, it is run again."""
    for _ in range(3):
        with demo(options) as process:
            said, complaints = process.communicate(timeout=HANG)
        if process.returncode == 0 or "the machine stood still for " not in complaints:
            break
    return process.returncode, said, complaints


@ENGINES
def test_the_demo_is_true_and_its_output_readable_without_a_terminal(options: list[str]) -> None:
    status, said, complaints = played(options)
    assert status == 0, said + complaints
    assert complaints == ""
    assert "\x1b" not in said
    assert "NOT TRUE" not in said
    assert re.match(
        r"holdfast \S+ on " + ("PostgreSQL" if options else r"SQLite [\d.]+, in a temporary folder\n"), said
    )
    assert re.search(r"^ +A \(pid \d+\) +B \(pid \d+\)$", said, re.MULTILINE)
    assert re.search(r"= +\* takes over after [\d.]+ s", said)
    assert "  without protection: ACCEPTED  " in said
    assert "  with grant.transaction: REFUSED  " in said
    assert "FencedOut: lease 'nightly-import' has passed on" in said
    assert "run 5 times: 1 row, 4 replays of its result" in said
    assert "5 times with one Idempotency-Key: 1 sandbox" in said
    assert re.search(r"replica-\d \(pid \d+\).* leads \d+ ms after the kill", said)
    verdict, _, late, cost = said.splitlines()[-4:]
    assert verdict.startswith("Everything above was true: 6 processes")
    assert late == "1 late commit without protection  0 with holdfast"
    survival = r"\d+ ms from kill -9 to the next leader" if options else "0 sandboxes lost with the killed leader"
    assert re.fullmatch(rf"{survival}  1 row from 5 tries", cost)
    assert "dashboard" not in said, "it stays open only where a person watches"
    assert masked(said, options) <= masked(recording(), options), (
        "run scripts/recording.py: the demo prints other lines"
    )


def recording() -> str:
    """The text of the recording in the README."""
    root = ET.parse(RECORDING).getroot()
    return "\n".join("".join(line.itertext()) for line in root.iter("{http://www.w3.org/2000/svg}text"))


def masked(said: str, options: list[str]) -> set[str]:
    """The lines about the lease, without numbers; on PostgreSQL, as in the recording, all lines above the figures."""
    lines = said.partition("\n1. ")[2].partition("Everything above" if options else "2. ")[0].splitlines()
    return {re.sub(r"\d+(\.\d+)?", "N", " ".join(line.split())) for line in lines if line.strip()}


def test_the_recording_is_small_and_needs_nothing_but_itself() -> None:
    text = RECORDING.read_text(encoding="utf-8")
    assert len(text) < 20_000
    assert re.findall(r"https?://[^\"]+|url\(|/tmp\S*|/home\S*", text) == ["http://www.w3.org/2000/svg"]
    assert "make demo ARGS=--postgres" in recording()
    assert "NOT TRUE" not in text


def test_on_a_terminal_it_leaves_the_dashboard_open_until_ctrl_c(folder: Path) -> None:
    with Screen(sys.executable, str(DEMO), "--gateway", url="", TMPDIR=str(folder)) as screen:
        screen.sees("The dashboard is open: ")
        address = screen.sees("   Ctrl-C").removesuffix("   Ctrl-C")
        with urllib.request.urlopen(address, timeout=HANG) as reply:
            assert b"<!doctype html>" in reply.read()
        born = list(descendants(screen.process.pid))
        screen.keys("\x03")
        assert screen.process.wait(HANG) == 0
        screen.sees("no process and no folder is left behind")
    assert born
    until(lambda: not any(alive(pid) for pid in born), what="every process of the demo is gone")
    assert leftovers(folder) == []


@pytest.mark.parametrize(
    ("options", "moment"),
    [([], "holdfast"), (["--postgres"], "is paused")],
    ids=["sqlite-starting", "postgres-paused"],
)
def test_ctrl_c_leaves_no_process_and_no_folder(options: list[str], moment: str, folder: Path) -> None:
    for _ in range(5):  # until it is hit: a test that was held up may find that it is over
        with demo(options, folder) as process:
            reached = comes_to(process, moment)
            born = list(descendants(process.pid))
            os.killpg(process.pid, signal.SIGINT)
            _, complaints = process.communicate(timeout=HANG)
        if reached and process.returncode != 0 and (born or moment == "holdfast"):
            break
    assert reached, f"the demo ended before {moment!r}"
    assert born or moment == "holdfast"
    assert process.returncode == 130, complaints
    assert complaints.strip() == "interrupted; no process and no folder is left behind"
    until(lambda: not any(alive(pid) for pid in born), what="every process of the demo is gone")
    assert leftovers(folder) == []


INTERRUPTED_IMPORT = """
import os, signal, sys
import demo

def show(*_):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt as error:
        raise RuntimeError("in a class body of a module that is being imported") from error

demo.show, sys.argv = show, ["demo"]
sys.exit(demo.main())
"""


def test_ctrl_c_in_the_midst_of_an_import_is_told_as_such() -> None:
    """Before Python 3.12 it comes out of there as a RuntimeError."""
    command = [sys.executable, "-c", INTERRUPTED_IMPORT]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=DEMO.parent, timeout=HANG)
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted; no process and no folder is left behind")


INTERRUPTED_START = """
import os, signal, subprocess, sys, threading, time
import demo

threading.Thread(target=threading.Event().wait, daemon=True).start()  # gets the signal, which the main thread blocks
popen = subprocess.Popen

def start_and_interrupt(*arguments, **options):
    process = popen(["sleep", "1000"], **options)
    os.kill(os.getpid(), signal.SIGINT)
    while not demo.started.interrupts:
        time.sleep(0.001)
    return process

def show(*_):
    try:
        demo.Process("sqlite:///unused.db")
    finally:
        print(len(demo.started), demo.started[0].process.poll())
        demo.end_workers()

subprocess.Popen, demo.show, sys.argv = start_and_interrupt, show, ["demo"]
sys.exit(demo.main())
"""


def test_ctrl_c_while_a_process_is_started_ends_that_process_too() -> None:
    command = [sys.executable, "-c", INTERRUPTED_START]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=DEMO.parent, timeout=HANG)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (
        130,
        "1 None\n",
        "interrupted; no process and no folder is left behind",
    )


def comes_to(process: subprocess.Popen[str], moment: str) -> bool:
    """False when it has ended before: on a machine that stood still it may."""
    assert process.stdout is not None
    return any(moment in line for line in process.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel to end a process with its parent")
@pytest.mark.parametrize(
    ("options", "moment"), [([], "is paused"), (["--gateway"], "its log")], ids=["paused", "serving"]
)
def test_a_demo_that_is_killed_takes_its_workers_with_it(options: list[str], folder: Path, moment: str) -> None:
    """Paused ones, too: nobody would ever resume them; and a driver ends its sandboxes."""
    for _ in range(5):
        with demo(options, folder) as process:
            reached = comes_to(process, moment)
            born = list(descendants(process.pid))
            process.kill()
        if reached and born:
            break
    assert reached, f"the demo ended before {moment!r}"
    assert born
    until(lambda: not any(alive(pid) for pid in born), what="every worker is gone")


def test_without_postgresql_it_says_what_to_install() -> None:
    code = (
        "import runpy, sys; sys.modules['holdfast.testing.binaries'] = type(sys)('none');"
        "sys.modules['holdfast.testing.binaries'].available = dict;"
        f"sys.argv = ['demo', '--postgres']; runpy.run_path({str(DEMO)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stderr
    assert "skipped" in done.stdout
    assert "pip install 'holdfast[postgres,testing]'" in done.stdout


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
