"""Processes contend for one lease, are killed and paused, and the database decides which may write. Then the gateway:
replicas that run sandboxes, an operation that is retried and applied once, and a leader that is killed.

    python examples/demo.py              on an SQLite file in a temporary folder
    python examples/demo.py --postgres   on a real PostgreSQL, started for the demo
    python examples/demo.py --gateway    the second half alone

Every process is real, every number was measured in this run, and the exit status is 0 only if everything that is
printed was true. Ctrl-C at any moment leaves no process and no folder behind.
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

    def acquire(self, name: str, timeout: float, failover: Any = "ttl", at: float = 0.0) -> dict[str, Any]:
        while time.monotonic() < at:  # all contenders call acquire() at the same instant
            pass
        lease = self.client.lease(name, ttl=TTL, timeout=timeout, failover=failover, on_lost=self.lost)
        try:
            self.grant = lease.acquire()
        except holdfast.NotAcquired as refusal:
            return {"fence": None, "error": str(refusal), "at": time.monotonic()}
        return {"fence": self.grant.fence, "at": time.monotonic()}

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
        send({"kind": "lost", "at": time.monotonic()})


def send(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


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

    def __init__(self, letter: str, url: str) -> None:
        command = [sys.executable, __file__, "--worker", url]
        with started.starting():
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            started.append(self)
        self.letter, self.pid = letter, self.process.pid
        self._unread = b""
        self._kept: list[dict[str, Any]] = []

    def __str__(self) -> str:
        return f"{self.letter} (pid {self.pid})"

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
                raise RuntimeError(f"{self} did not reply to {kind!r} within {PATIENCE:.0f} s")
            read = os.read(self.process.stdout.fileno(), 65536)
            if not read:
                raise RuntimeError(f"{self} ended before it replied to {kind!r}")
            *lines, self._unread = (self._unread + read).split(b"\n")
            self._kept += [json.loads(line) for line in lines]

    def ask(self, action: str, **arguments: Any) -> dict[str, Any]:
        self.order(action, **arguments)
        return self.receive(action)

    def kill(self) -> float:
        at = time.monotonic()
        self.process.kill()
        self.process.wait()
        return at

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


class Story:
    """Prints each step and its results, and remembers whether all of them held."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(highlight=False, soft_wrap=True)
        self.true = True
        self._number = 0

    def step(self, text: str) -> None:
        self._number += 1
        self.console.print(f"\n[bold]{self._number}. {text}[/bold]")

    def report(self, text: str, holds: bool = True) -> None:
        self.true = self.true and holds
        self.console.print(f"   {'[green]ok[/green]  ' if holds else '[red]NOT TRUE[/red] '}", end="")
        self.console.print(text, markup=False)


def run(url: str, story: Story, folder: Path, *, gateway: bool) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from examples import demo_gateway

    with closing(connect(url)) as connection, holdfast.Client(url) as client:
        client.migrate()
        if not gateway:
            contend_for_leases(url, story, connection, client)
        demo_gateway.run(url, story, folder, started, connection)


def contend_for_leases(url: str, story: Story, connection: Any, client: Any) -> None:
    connection.execute("create table import_log (pid int, fence bigint, how text)")
    first, second = Process("A", url), Process("B", url)
    contenders = [first, second]
    for process in contenders:
        process.receive("ready")
    holder, fence = contend(story, contenders)
    standby = second if holder is first else first
    later = [Process(letter, url) for letter in "CDE"]  # they start while the standby waits
    standby, fence = kill_holder(story, holder, standby, fence)
    kill_session(story, *later[:2])
    successor = pause_holder(story, later[2], connection, standby, fence)
    show_numbers(story, client, connection, successor)


def contend(story: Story, contenders: list[Process]) -> tuple[Process, int]:
    names = " and ".join(str(process) for process in contenders)
    story.step(f"Two processes, {names}, try to acquire the lease {NAME!r} at the same instant.")
    start = time.monotonic() + 0.1
    for process in contenders:
        process.order("acquire", name=NAME, timeout=0, at=start)
    answers = [(process, process.receive("acquire")) for process in contenders]
    winners = [(process, answer) for process, answer in answers if answer["fence"] is not None]
    story.report(f"{len(winners)} of {len(answers)} has it", len(winners) == 1)
    [(winner, won)] = winners
    story.report(f"{winner} got it in {(won['at'] - start) * 1000:.1f} ms, with fence {won['fence']}")
    [refusal] = [answer for _, answer in answers if answer["fence"] is None]
    story.report(f"the other got the error: {refusal['error']}")
    return winner, won["fence"]


def kill_holder(story: Story, holder: Process, standby: Process, fence: int) -> tuple[Process, int]:
    story.step(f"{standby} waits for it, and {holder} is killed with SIGKILL, so it cannot release the lease.")
    standby.order("acquire", name=NAME, timeout=PATIENCE)
    time.sleep(0.2)
    killed_at = holder.kill()
    got = standby.receive("acquire")
    story.report(
        f"{standby} took over {got['at'] - killed_at:.2f} s after the kill (ttl={TTL:g}, since the last heartbeat)",
        got["fence"] is not None and got["at"] > killed_at,
    )
    story.report(f"its fence is higher: {got['fence']} > {fence}", (got["fence"] or 0) > fence)
    return standby, got["fence"]


def kill_session(story: Story, holder: Process, standby: Process) -> None:
    story.step('The same with failover="session": a standby does not wait for the TTL if the process has ended.')
    for process in (holder, standby):
        process.receive("ready")
    held = holder.ask("acquire", name="session-import", timeout=0, failover="session")
    standby.order("acquire", name="session-import", timeout=PATIENCE, failover="session")
    time.sleep(0.2)
    killed_at = holder.kill()
    got = standby.receive("acquire")
    story.report(
        f"{standby} took over from {holder} {(got['at'] - killed_at) * 1000:.0f} ms after the kill",
        got["at"] > killed_at and got["fence"] > held["fence"],
    )
    story.report("and released it", standby.ask("release")["done"])


def pause_holder(story: Story, successor: Process, connection: Any, holder: Process, fence: int) -> Process:
    successor.receive("ready")
    story.step(f"{holder} checks its lease and is about to write, when it is paused with SIGSTOP. {successor} waits.")
    story.report(f"the check returned: {holder.ask('check')['remaining']:.2f} s of trust left")
    paused_at = pause(holder, connection)
    got = successor.ask("acquire", name=NAME, timeout=PATIENCE)
    story.report(
        f"{successor} took over {got['at'] - paused_at:.2f} s after the pause began, fence {got['fence']}",
        got["fence"] is not None and got["fence"] > fence,
    )
    written = successor.ask("write", how="protected")["written"]
    story.report(f"{successor} writes in a protected transaction, which is allowed: it holds the lease", written)

    story.step(f"{holder} is resumed and continues with its write, once without protection, once with it.")
    holder.order("write", how="bare")
    holder.order("write", how="protected")
    resumed_at = time.monotonic()
    holder.process.send_signal(signal.SIGCONT)
    bare, protected = holder.receive("write"), holder.receive("write")
    story.report(
        "without protection the database accepted the write of a process that no longer holds the lease",
        bare["written"],
    )
    story.report(
        f"with grant.transaction(conn) it refused: FencedOut: {protected.get('error')}", not protected["written"]
    )
    lost_at = holder.receive("lost")["at"]
    story.report(
        f"{holder} noticed the loss by itself {(lost_at - resumed_at) * 1000:.0f} ms after it was resumed (on_lost)"
    )
    return successor


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


def show_numbers(story: Story, client: holdfast.Client, connection: Any, holder: Process) -> None:
    from rich.table import Table

    story.step("The contents of the tables.")
    rows = connection.execute("select pid, fence, how from import_log").fetchall()
    newest = max(fence for _, fence, _ in rows)
    stale = {how: sum(1 for _, fence, kind in rows if kind == how and fence < newest) for how in ("bare", "protected")}
    story.report(
        f"stale writes in the application's table: {stale['bare']} without protection, {stale['protected']} with it",
        stale == {"bare": 1, "protected": 0},
    )
    held = client.leases.list()
    mine = [(lease.name, lease.pid) for lease in held] == [(NAME, holder.pid)]
    story.report(f"client.leases.list(): {', '.join(f'{lease.name} held by pid {lease.pid}' for lease in held)}", mine)
    story.report(f"{holder} releases it", holder.ask("release")["done"])
    past = client.leases.history()[::-1]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("lease", "fence", "process", "held for", "ended"):
        table.add_column(column, justify="right" if column in ("fence", "held for") else "left")
    letters = {process.pid: process.letter for process in started}
    for grant in past:
        seconds = (grant.ended_at - grant.acquired_at).total_seconds()
        who = f"{letters.get(grant.pid or 0, '?')} (pid {grant.pid})"
        table.add_row(grant.name, str(grant.fence), who, f"{seconds:.2f} s", grant.outcome)
    story.console.print("   client.leases.history(), oldest first:")
    story.console.print(table)
    fences = [grant.fence for grant in sorted(past, key=lambda grant: grant.acquired_at)]
    story.report(
        f"{len(fences)} grants, {len(set(fences))} different fences, each higher than the one before",
        all(earlier < later for earlier, later in pairwise(fences)),
    )
    outcomes = [grant.outcome for grant in past if grant.name == NAME]
    story.report(f"{NAME}: {', '.join(outcomes)}", outcomes == ["expired", "expired", "released"])


def no_postgres() -> str | None:
    from holdfast.testing import available

    if importlib.util.find_spec("psycopg") is None or not available():
        return "skipped: no PostgreSQL here; install one with: pip install 'holdfast[postgres,testing]'"
    return None


def show(postgres: bool, gateway: bool) -> int:
    from holdfast.testing.standstill import Standstill

    story, began = Story(), time.monotonic()
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
            file = folder / "demo.db"
            url, engine = f"sqlite:///{file}", f"SQLite {sqlite3.sqlite_version}, in {file}"
        at_end.callback(end_workers)
        story.console.print(f"holdfast {holdfast.__version__} on {engine}")
        try:
            run(url, story, folder, gateway=gateway)
        except Exception:
            explain(pauses)
            raise
        count = len(started)
    if not story.true:
        explain(pauses)
    verdict = "Everything above was true" if story.true else "NOT everything above was true"
    story.console.print(f"\n{verdict}: {count} processes, {time.monotonic() - began:.1f} s.")
    return 0 if story.true else 1


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
