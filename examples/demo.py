"""Two processes and one lease: the first is paused, the second takes over, and the late commit of the first is refused,
beside the same commit without protection, which is accepted. Then the gateway: replicas that run sandboxes, an
operation that is retried and applied once, and a leader that is killed.

    python examples/demo.py              on an SQLite file in a temporary folder
    python examples/demo.py --postgres   on a real PostgreSQL, started for the demo
    python examples/demo.py --gateway    the second half alone

Every process is real, every number was measured in this run, and the exit status is 0 only if everything that is
printed was true. On a terminal the dashboard stays open until Ctrl-C, which at any moment leaves no process and no
folder behind.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import logging
import os
import secrets
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

import holdfast

TTL = 2.0
PATIENCE = 60.0
NAME = "nightly-import"


def connect(url: str) -> Any:
    """The application's own connection: holdfast protects transactions on it, and never closes it."""
    if url.startswith("sqlite"):
        return sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, timeout=10)
    import psycopg

    return psycopg.connect(url, autocommit=True)


# -- a worker: a process that acquires the lease, and executes commands from a pipe ----------------------------------


class Worker:
    def __init__(self, url: str) -> None:
        self.client = holdfast.Client(url)
        self.connection = connect(url)
        self.grant: Any = None

    def acquire(self, timeout: float, at: float = 0.0) -> dict[str, Any]:
        while time.monotonic() < at:  # all contenders call acquire() at the same instant
            pass
        lease = self.client.lease(NAME, ttl=TTL, timeout=timeout, on_lost=self.lost)
        try:
            self.grant = lease.acquire()
        except holdfast.NotAcquired as refusal:
            return {"fence": None, "error": str(refusal)}
        return {"fence": self.grant.fence}

    def check(self) -> dict[str, Any]:
        self.grant.check()
        return {"remaining": self.grant.remaining()}

    def write(self, how: str) -> dict[str, Any]:
        try:
            if how == "protected":
                with self.grant.transaction(self.connection):
                    self.insert(how)
            else:
                self.insert(how)
        except holdfast.FencedOut as refusal:
            return {"written": False, "error": str(refusal)}
        return {"written": True}

    def insert(self, how: str) -> None:
        self.connection.execute(f"insert into import_log values ({os.getpid()}, {self.grant.fence}, '{how}')")

    def release(self) -> dict[str, Any]:
        return {"done": self.grant.release()}

    def lost(self, grant: Any) -> None:
        """Called in the background thread."""
        send({"kind": "lost"})


def send(message: dict[str, Any]) -> None:
    os.write(1, json.dumps({"at": time.monotonic(), **message}).encode() + b"\n")


def work(url: str) -> None:
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: even a paused worker ends when the demo is killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)  # losing the lease is part of the show
    worker = Worker(url)
    send({"kind": "ready"})
    for line in sys.stdin:
        order = json.loads(line)
        action = order.pop("do")
        send({"kind": action, **getattr(worker, action)(**order)})


# -- the demo --------------------------------------------------------------------------------------------------------


class Process:
    """A worker, as the demo controls it."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, __file__, "--worker", url]
        with started.starting():
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            started.append(self)
        self.pid = self.process.pid
        self._unread = b""
        self._kept: list[dict[str, Any]] = []

    def order(self, action: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": action, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self, kind: str) -> dict[str, Any]:
        """The next reply of this kind. Raises RuntimeError if there is none in time."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + PATIENCE
        while True:
            for message in self._kept:
                if message["kind"] == kind:
                    self._kept.remove(message)
                    return message
            if not select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise RuntimeError(f"process {self.pid} did not reply to {kind!r} within {PATIENCE:.0f} s")
            read = os.read(self.process.stdout.fileno(), 65536)
            if not read:
                raise RuntimeError(f"process {self.pid} ended before it replied to {kind!r}")
            *lines, self._unread = (self._unread + read).split(b"\n")
            self._kept += [json.loads(line) for line in lines]

    def ask(self, action: str, **arguments: Any) -> dict[str, Any]:
        self.order(action, **arguments)
        return self.receive(action)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Started(list[Any]):
    """The processes that the demo has to end."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupts: list[int] = []
        self._is_starting = False

    def interrupt(self, number: int, _: object) -> None:
        """The handler of Ctrl-C and SIGTERM."""
        self.interrupts.append(number)
        if not self._is_starting:
            raise KeyboardInterrupt

    @contextmanager
    def starting(self) -> Iterator[None]:
        """A block that starts a process and appends it: an interrupt is raised afterwards. The process starts with the
        signals blocked, because the demo ends it. That alone does not keep the handler away: another thread gets the
        signal, and Python calls the handler in this one."""
        self._is_starting = True
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._is_starting = False
        if self.interrupts:
            raise KeyboardInterrupt


started = Started()
began = time.monotonic()


class Story:
    """Prints each step and its results, and remembers whether all of them held."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(highlight=False, soft_wrap=True)
        self.true = True
        self._number = 0

    def step(self, text: str) -> None:
        self._number += 1
        self.console.print(f"\n[bold]{self._number}. {text}[/bold]\n")

    def report(self, text: str, holds: bool = True) -> None:
        self.true = self.true and holds
        self.console.print(f"   {'[green]ok[/green]  ' if holds else '[red]NOT TRUE[/red] '}", end="")
        self.console.print(text, markup=False)

    def check(self, text: str, holds: bool) -> None:
        """Report it only if it does not hold."""
        if not holds:
            self.report(text, holds=False)

    def figures(self, *pairs: tuple[int, str]) -> None:
        """A line of figures with their captions: in large digits where the terminal has the characters."""
        from rich.text import Text

        if not self.console.is_terminal or self.console.options.ascii_only:
            self.console.print("  ".join(f"{figure} {caption}" for figure, caption in pairs), markup=False)
            return
        lines = [Text() for _ in range(3)]
        for figure, caption in pairs:
            for number, line in enumerate(lines):
                digits = " ".join(_DIGITS[int(digit)][number * 3 : number * 3 + 3] for digit in str(figure))
                line.append(f"   {digits}", "bold green")
                line.append(f"  {caption}" if number == 1 else " " * (len(caption) + 2), "bold")
        self.console.print(Text("\n").join(lines))


_DIGITS = (
    "┏━┓┃ ┃┗━┛", " ╻  ┃  ╹ ", "╺━┓┏━┛┗━╸", "╺━┓╺━┫╺━┛", "╻ ╻┗━┫  ╹", "┏━╸┗━┓╺━┛", "┏━╸┣━┓┗━┛", "╺━┓  ┃  ╹", "┏━┓┣━┫┗━┛",
    "┏━┓┗━┫╺━┛",
)  # fmt: skip
"""Three lines of three characters each."""


class Lanes:
    """Two columns, one for each process. A row is printed when it has happened; in between, on a terminal, a last row
    counts the seconds."""

    WIDTH = 40

    def __init__(self, story: Story, start: float, first: Process, second: Process) -> None:
        self._console, self._start = story.console, start
        self._console.print(self._line("", f"A (pid {first.pid})", f"B (pid {second.pid})"), style="bold")

    def row(self, at: float, left: str, right: str, style: str = "") -> None:
        self._console.print(self._line(f"{at - self._start:.2f} s", left, right, style))

    def _line(self, at: str, left: str, right: str, style: str = "") -> Any:
        from rich.text import Text

        line = Text.assemble((f"{at:>9}   ", "dim"), (f"{left:<{self.WIDTH}}", style), right)
        line.rstrip()
        return line

    @contextmanager
    def waiting(self, left: str, right: str) -> Iterator[None]:
        if not sys.stdout.isatty():
            yield
            return
        from rich.live import Live

        def line() -> Any:
            return self._line(f"{time.monotonic() - self._start:.2f} s", left, right, "dim")

        with Live(console=self._console, get_renderable=line, refresh_per_second=12, transient=True):
            yield


def run(url: str, story: Story, folder: Path, *, gateway: bool) -> str:
    """The whole demo. Returns the address of the dashboard."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from examples import demo_gateway

    late: dict[str, int] = {}
    with closing(connect(url)) as connection, holdfast.Client(url) as client:
        client.migrate()
        if not gateway:
            late = pause_and_take_over(url, story, connection, client)
        result = demo_gateway.run(url, story, folder, started, connection)
    verdict = "Everything above was true" if story.true else "NOT everything above was true"
    seconds = time.monotonic() - began
    story.console.print(f"\n{verdict}: {len(started)} processes, {seconds:.1f} s.\n")
    if late:
        story.figures((late["bare"], "late commit without protection"), (late["protected"], "with holdfast"))
    story.figures(result.survival, (result.rows, f"row from {result.runs} tries"))
    return result.address


def pause_and_take_over(url: str, story: Story, connection: Any, client: Any) -> dict[str, int]:
    """Returns how many stale rows the application's table has, without protection and with it."""
    connection.execute("create table import_log (pid int, fence bigint, how text)")
    story.step(f"Two processes want the lease {NAME!r} (ttl={TTL:g}).")
    contenders = [Process(url), Process(url)]
    for process in contenders:
        process.receive("ready")
    start = time.monotonic() + 0.1
    for process in contenders:
        process.order("acquire", timeout=0, at=start)
    answers = [(process, process.receive("acquire")) for process in contenders]
    answers.sort(key=lambda answer: answer[1]["fence"] is None)
    (first, won), (second, refused) = answers
    lanes = Lanes(story, start, first, second)
    rows = [(won["at"], "* gets the lease", "", "green"), (refused["at"], "", "is refused, and waits for it", "")]
    for row in sorted(rows):
        lanes.row(*row)
    story.check("one of two has the lease", won["fence"] is not None and refused["fence"] is None)
    second.order("acquire", timeout=PATIENCE)
    checked = first.ask("check")
    lanes.row(checked["at"], f"| checks it: {checked['remaining']:.2f} s of trust left", "")
    paused_at = pause(first, connection)
    lanes.row(paused_at, "= is paused (SIGSTOP), about to write", "", "yellow")
    with lanes.waiting("= is paused", "waits"):
        got = second.receive("acquire")
    lanes.row(got["at"], "=", f"* takes over after {got['at'] - paused_at:.2f} s", "yellow")
    story.check("its fence is higher", (got["fence"] or 0) > won["fence"])
    written = second.ask("write", how="protected")
    lanes.row(written["at"], "=", "| commits its row", "yellow")
    story.check("the holder may commit", written["written"])
    resume_late(story, lanes, first)
    lanes.row(time.monotonic(), "", "| releases it")
    story.check("the second process still holds the lease", second.ask("release")["done"])
    return count_late_rows(story, connection, client)


def resume_late(story: Story, lanes: Lanes, process: Process) -> None:
    """The paused process continues with its write: once without protection, once with it."""
    process.order("write", how="bare")
    process.order("write", how="protected")
    resumed_at = time.monotonic()
    process.process.send_signal(signal.SIGCONT)
    bare, protected, lost = process.receive("write"), process.receive("write"), process.receive("lost")
    rows = [
        (resumed_at, "  is resumed, and commits late:", ""),
        (bare["at"], "  without protection: ACCEPTED", "bold red"),
        (protected["at"], "  with grant.transaction: REFUSED", "bold green"),
        (lost["at"], "  notices by itself that it has lost", ""),
    ]
    for at, text, style in sorted(rows):
        lanes.row(at, text, "|", style)
    story.check("without protection the late commit is accepted", bare["written"])
    story.check("with protection the late commit is refused", not protected["written"])
    for line in wrap(f"FencedOut: {protected.get('error')}", 84):
        story.console.print(f"{'':12}{line}", style="dim", markup=False)


def count_late_rows(story: Story, connection: Any, client: Any) -> dict[str, int]:
    rows = connection.execute("select fence, how from import_log").fetchall()
    newest = max(fence for fence, _ in rows)
    late = {how: sum(kind == how and fence < newest for fence, kind in rows) for how in ("bare", "protected")}
    story.check(f"late rows in the application's table: {late}", late == {"bare": 1, "protected": 0})
    past = sorted(client.leases.history(NAME), key=lambda grant: grant.acquired_at)
    story.check("each fence is higher than the one before", all(a.fence < b.fence for a, b in pairwise(past)))
    outcomes = [grant.outcome for grant in past]
    story.check(f"the history of the lease: {', '.join(outcomes)}", outcomes == ["expired", "released"])
    return late


def pause(holder: Process, connection: Any) -> float:
    """Stop it. A process that is stopped during a heartbeat blocks the SQLite file: resume it, and try again."""
    while True:
        at = time.monotonic()
        holder.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        if not isinstance(connection, sqlite3.Connection):
            return at
        try:
            connection.execute("pragma busy_timeout = 200")
            connection.execute("begin immediate")
            connection.execute("rollback")
            return at
        except sqlite3.OperationalError:
            holder.process.send_signal(signal.SIGCONT)


def no_postgres() -> str | None:
    from holdfast.testing import available

    if importlib.util.find_spec("psycopg") is None or not available():
        return "skipped: no PostgreSQL here; install one with: pip install 'holdfast[postgres,testing]'"
    return None


def show(postgres: bool, gateway: bool) -> int:
    from holdfast.testing.standstill import Standstill

    story = Story()
    folder = Path(tempfile.gettempdir(), f"holdfast-demo-{secrets.token_hex(6)}")
    with ExitStack() as at_end:
        pauses = at_end.enter_context(Standstill())
        at_end.callback(tidy, folder)
        folder.mkdir()
        if postgres:
            from holdfast.testing import Postgres

            server = at_end.enter_context(Postgres.create())
            url, engine = server.database(), f"PostgreSQL {server.binaries.version}"
        else:
            url, engine = f"sqlite:///{folder / 'demo.db'}", f"SQLite {sqlite3.sqlite_version}, in a temporary folder"
        at_end.callback(end_workers)
        story.console.print(f"holdfast {holdfast.__version__} on {engine}")
        try:
            address = run(url, story, folder, gateway=gateway)
        except Exception:
            explain(pauses)
            raise
        if sys.stdin.isatty() and sys.stdout.isatty():
            leave_open(story, address)
    if not story.true:
        explain(pauses)
    return 0 if story.true else 1


def leave_open(story: Story, address: str) -> None:
    """For a person who watches: the dashboard is there until Ctrl-C."""
    story.console.print(f"\nThe dashboard is open: {address}/   Ctrl-C ends the demo.")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        story.console.print("no process and no folder is left behind")


def explain(pauses: Any) -> None:
    """Report a pause of the machine: it loses a lease of two seconds, and then holdfast is not to blame."""
    if (longest := max(pauses.pauses(), default=0.0)) > TTL / 4:
        print(f"the machine stood still for {longest:.1f} s", file=sys.stderr)


def end_workers() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not stop the cleanup
    for process in started:
        process.end()


def tidy(folder: Path) -> None:
    end_workers()
    shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--postgres", action="store_true", help="on a real PostgreSQL instead of SQLite")
    parser.add_argument("--gateway", action="store_true", help="only the second half: the gateway")
    parser.add_argument("--worker", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker)
        return 0
    if arguments.postgres and (reason := no_postgres()):
        print(reason)
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, started.interrupt)
    try:
        return show(arguments.postgres, arguments.gateway)
    except BaseException:  # an interrupt during an import is raised as another error
        if not started.interrupts:
            raise
        print("\ninterrupted; no process and no folder is left behind", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
