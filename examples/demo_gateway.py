"""The second act of the demo: the gateway. Replicas, sandboxes, an operation that is retried, a leader that is killed.

Every number is measured here, over real HTTP, against real processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import holdfast

PATIENCE = 60.0
_START = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, getattr(signal, sys.argv[1]))  # PR_SET_PDEATHSIG: it ends when the demo is killed
signal.pthread_sigmask(signal.SIG_SETMASK, [])
os.execv(sys.executable, [sys.executable, "-m", "holdfast", *sys.argv[2:]])
"""


class Server:
    """A replica or the driver: a process in its own session, so that Ctrl-C reaches only the demo."""

    def __init__(self, name: str, folder: Path, started: Any, *words: str, with_demo: str = "SIGKILL") -> None:
        self.name, self._log = name, folder / f"{name}.log"
        environment = {**os.environ, "HOLDFAST_REPLICA_ID": name}
        with self._log.open("ab") as log, started.starting():
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, with_demo, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=log, cwd=folder, env=environment, start_new_session=True,
            )  # fmt: skip
            started.append(self)
        self.pid = self.process.pid

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    def listens(self) -> dict[str, Any]:
        """Wait until it listens; returns what it printed, with its address."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self} did not start:\n{self.log()}")
        ready: dict[str, Any] = json.loads(line)
        self.ready = ready
        return ready

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Send a request. Returns the status and the body."""
        data = None if body is None else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        request = urllib.request.Request(self.ready["address"] + path, data, given, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
                status, text = reply.status, reply.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text.decode()

    def kill(self) -> float:
        at = time.monotonic()
        self.process.kill()
        self.process.wait()
        return at

    def end(self) -> None:
        """The driver ends its sandboxes first; a replica has nothing to clean up."""
        self.process.send_signal(signal.SIGTERM if self.name == "driver" else signal.SIGKILL)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Result(NamedTuple):
    survival: tuple[int, str]
    """What the killed leader cost: a figure and its caption."""
    runs: int
    """How often the operation was run."""
    rows: int
    """How many rows it has written."""
    address: str
    """Of the replica that leads."""


def run(url: str, story: Any, folder: Path, started: Any, connection: Any) -> Result:
    words = ("--end-sandboxes", "--folder", str(folder / "d"), "--json")
    driver = Server("driver", folder, started, "driver", *words, with_demo="SIGTERM")
    driver.listens()
    serve = ("--url", url, "serve", "--port", "0", "--json", "--driver", f"unix:{folder}/d/driver.sock")
    shared = not url.startswith("sqlite")

    def start(name: str) -> Server:
        return Server(name, folder, started, *serve)

    replicas = come_up(story, start, shared)
    run_sandbox(story, replicas)
    runs, rows = retry(story, replicas[0], url, connection)
    survival, address = kill_leader(story, replicas, start, shared)
    return Result(survival, runs, rows, address)


def come_up(story: Any, start: Callable[[str], Server], shared: bool) -> list[Server]:
    names = ("replica-1", "replica-2", "replica-3") if shared else ("replica-1",)
    story.step(f"The gateway: {len(names)} replica{'s on one database' if shared else ' on this file'}, and a driver.")
    began = time.monotonic()
    replicas = [start(name) for name in names]
    for replica in replicas:
        replica.listens()
    leading = leader(replicas)
    seconds = time.monotonic() - began
    others = ", ".join(each.name for each in replicas if each is not leading)
    story.report(f"{leading} leads {seconds:.1f} s after the start{f'; {others} stand by' if others else ''}")
    if not shared:
        second = start("replica-2")
        code = second.process.wait(PATIENCE)
        story.report(f"a second replica on the same file is refused: exit code {code}", code == 75)
    return replicas


def leader(replicas: list[Server]) -> Server:
    """The replica that leads, by its own /healthz."""
    leading: list[Server] = []

    def has_leader() -> bool:
        leading[:] = [each for each in replicas if each.ask("GET", "/healthz")[1]["lease"]["leading"]]
        return bool(leading)

    until(has_leader)
    return leading[0]


def run_sandbox(story: Any, replicas: list[Server]) -> None:
    first, last = replicas[0], replicas[-1]
    program = "import time; print('hello from a sandbox', flush=True); time.sleep(1000)"
    began = time.monotonic()
    status, _ = first.ask("POST", "/sandboxes", {"id": "web", "argv": [sys.executable, "-c", program], "grace": 1})
    until(lambda: phase(last, "web") == "Ready")
    seconds = time.monotonic() - began
    story.report(f"a sandbox, created through {first.name}, is Ready after {seconds:.2f} s", status == 201)
    until(lambda: "hello" in str(last.ask("GET", "/sandboxes/web/log")[1]))
    story.report(f"its log, read through {last.name}: {last.ask('GET', '/sandboxes/web/log')[1].strip()}")


def phase(replica: Server, id: str) -> str | None:
    value: str | None = replica.ask("GET", f"/sandboxes/{id}")[1].get("phase")
    return value


def retry(story: Any, replica: Server, url: str, connection: Any) -> tuple[int, int]:
    """Returns how often the operation was run, and how many rows it has written."""
    connection.execute("create table invoice (number int)")
    with holdfast.Client(url) as client:
        key = holdfast.OperationKey(
            pipeline="billing", task="issue", dataset="invoices", operation="insert", version="1", checksum="42"
        )
        outcomes = [
            client.operation(key, tx=connection).run(
                lambda: connection.execute("insert into invoice values (42)") and 42
            )
            for _ in range(5)
        ]
    [(rows,)] = connection.execute("select count(*) from invoice").fetchall()
    replays = sum(outcome.replayed for outcome in outcomes)
    story.report(f"an operation, run 5 times: {rows} row, {replays} replays of its result", (rows, replays) == (1, 4))
    body = {"argv": ["sleep", "1000"], "labels": {"demo": "once"}, "grace": 1}
    answers = [replica.ask("POST", "/sandboxes", body, Idempotency_Key='"demo-1"') for _ in range(5)]
    ids = {sandbox["id"] for _, sandbox in answers}
    story.report(f"a request, sent 5 times with one Idempotency-Key: {len(ids)} sandbox", len(ids) == 1)
    return len(outcomes), rows


def kill_leader(
    story: Any, replicas: list[Server], start: Callable[[str], Server], shared: bool
) -> tuple[tuple[int, str], str]:
    """Returns what that cost, as a figure and its caption, and the address of the next leader."""
    old = leader(replicas)
    pid = old.ask("GET", "/sandboxes/web")[1]["status"]["details"]["pid"]
    story.step(f"{old} leads, and is killed with SIGKILL.")
    killed_at = old.kill()
    if shared:
        others = [each for each in replicas if each is not old]
    else:
        others = [start("replica-3")]
        others[0].listens()
    new = leader(others)
    failover = round((time.monotonic() - killed_at) * 1000)
    started = "" if shared else ", which was started then,"
    story.report(f"{new}{started} leads {failover} ms after the kill")
    status, _ = new.ask("POST", "/sandboxes", {"id": "next", "argv": ["sleep", "1000"], "grace": 1})
    until(lambda: phase(new, "next") == "Ready")
    story.report(f"the next sandbox is Ready {time.monotonic() - killed_at:.2f} s after the kill", status == 201)
    runs_on = running(pid)
    story.report(f"the earlier one still runs, as process {pid}", runs_on)
    if shared:
        return (failover, "ms from kill -9 to the next leader"), new.ready["address"]
    return (int(not runs_on), "sandboxes lost with the killed leader"), new.ready["address"]


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the demo waited for {PATIENCE:.0f} s in vain")
        time.sleep(0.02)
