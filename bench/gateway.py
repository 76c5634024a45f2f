"""The gateway over loopback: real replicas, a real driver, one PostgreSQL with fsync, all clients in one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, NamedTuple, Self

from bench.measure import Result, unpinned
from bench.place import Place
from holdfast.cli.child import die_with

CLIENTS = (1, 8, 32)
REPLICAS = (1, 3)
SECONDS = 1.5
MOST = 5_000
"""Requests per client."""
PATIENCE = 60.0
ROOT = Path(__file__).parent.parent
ASKED = {
    "hook read": "GET /hook/status",
    "hook write": "POST /hook/pre-tool-use",
    "sandbox read": "GET /sandboxes/{id}",
    "sandbox write": "PATCH /sandboxes/{id}",
}
Asked = tuple[str, str, str, Any]
"""Address, method, path, body."""


def gateway(place: Place) -> list[Result]:
    """Reads and writes of hooks and sandboxes by 1, 8 and 32 clients, on one and three replicas; the lock's share."""
    clients, fleets, seconds = ((1, 2), (1,), 0.1) if place.effort.quick else (CLIENTS, REPLICAS, SECONDS)
    rounds: dict[tuple[str, int, int], Round] = {}
    crowded: dict[int, Round] = {}
    url = place.postgres_url(place.durable)
    with unpinned(), Fleet(place.folder, url) as fleet, HttpClients(seconds) as load:
        fleet.grow(fleets[0])
        fleet.make_sandboxes(max(clients))
        for replicas in fleets:
            fleet.grow(replicas)
            for what in ASKED:
                for count in clients:
                    jobs = [fleet.asked(what, number) for number in range(count)]
                    rounds[what, replicas, count] = load.run(jobs)
            crowded[replicas] = load.run([fleet.asked("hook write", 0, of=number) for number in range(clients[1])])
    return [*_table(rounds), *_shares(rounds, crowded, clients[1])]


class Round(NamedTuple):
    """What all clients measured of one kind of request."""

    seconds: float
    taken: list[float]
    parts: list[dict[str, float]]

    def figures(self) -> dict[str, tuple[float, str]]:
        cuts = quantiles(self.taken, n=100, method="inclusive")
        return {
            "requests": (len(self.taken) / self.seconds, "/s"),
            "p50": (cuts[49], "s"),
            "p99": (cuts[98], "s"),
        }


def _table(rounds: dict[tuple[str, int, int], Round]) -> Iterator[Result]:
    """The ratio is to the same figure with one client and one replica."""
    for what, request in ASKED.items():
        base: dict[str, float] = {}
        for (kind, replicas, clients), seen in rounds.items():
            for figure, (value, unit) in seen.figures().items() if kind == what else ():
                who = f"{_of(replicas, 'replica')}, {_of(clients, 'client')}: {figure}"
                yield Result(f"gateway, {request}", who, value, unit, value / base.setdefault(figure, value))


def _shares(rounds: dict[tuple[str, int, int], Round], crowded: dict[int, Round], crowd: int) -> Iterator[Result]:
    """Where the time of a hook goes. Means, because the means of the parts add up to the mean of the whole."""
    seen = {
        f"{_of(replicas, 'replica')}, {_of(count, 'client')}": samples
        for (what, replicas, count), samples in rounds.items()
        if what == "hook write"
    }
    seen |= {f"{_of(replicas, 'replica')}, {crowd} clients, one agent": each for replicas, each in crowded.items()}
    for who, samples in seen.items():
        whole = fmean(samples.taken)
        yield Result(f"gateway, a hook: {who}", "as the client sees it", whole, "s", 1.0)
        for part in ("lock", "unlock", "correlate", "work"):
            took = fmean(one[part] for one in samples.parts)
            yield Result(f"gateway, a hook: {who}", f"… {part}", took, "s", took / whole)


def _of(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


class Fleet:
    """Replicas on one database with one driver, which ends its sandboxes when it ends."""

    def __init__(self, folder: Path, url: str, environment: Mapping[str, str] = os.environ) -> None:
        self._folder, self._environment = folder, {**environment, "HOLDFAST_URL": url}
        self._at_end = ExitStack()
        self._addresses: list[str] = []

    def __enter__(self) -> Self:
        folder = str(self._folder / "d")
        self._driver = self._started("driver", "driver", "--json", "--folder", folder, "--end-sandboxes")
        return self

    def __exit__(self, *_: object) -> None:
        self._at_end.close()

    def grow(self, number: int) -> None:
        options = ("serve", "--port", "0", "--json", "--writes", "0", "--driver", self._driver)
        while len(self._addresses) < number:
            self._addresses.append(self._started(f"replica-{len(self._addresses) + 1}", *options))

    def make_sandboxes(self, number: int) -> None:
        """The sandboxes end at once, so that their records do not change during the measurement."""
        for index in range(number):
            self._ask("POST", "/sandboxes", {"id": f"bench-{index}", "argv": ["true"]})
        end = time.monotonic() + PATIENCE
        while any(each["phase"] != "Completed" for each in self._ask("GET", "/sandboxes")["items"]):
            if time.monotonic() > end:
                raise RuntimeError(f"sandboxes have not ended within {PATIENCE:g} s")
            time.sleep(0.1)

    def asked(self, what: str, client: int, *, of: int | None = None) -> Asked:
        """The request of this client; ``of`` chooses the replica, by default in turn."""
        method, _, path = ASKED[what].partition(" ")
        address = self._addresses[(client if of is None else of) % len(self._addresses)]
        body = {
            "hook write": {"session_id": f"session-{client}", "cwd": "/srv/app", "tool_name": "Bash"},
            "sandbox write": {"labels": {"team": "a"}},
        }
        return address, method, path.format(id=f"bench-{client}"), body.get(what)

    def begin_agents(self, count: int) -> None:
        """Send the first hook of each of so many agents, in turn: they take their numbers one after the other."""
        for client in range(count):
            _, *request = self.asked("hook write", client)
            self._ask(*request)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._addresses[0] + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)

    def _started(self, name: str, *words: str) -> str:
        """Start a process and return the address that it listens on."""
        return self._at_end.enter_context(_serving(name, self._folder, self._environment, words))


@contextmanager
def _serving(name: str, folder: Path, environment: Mapping[str, str], words: tuple[str, ...]) -> Iterator[str]:
    log = folder / f"{name}.log"
    environment = {**environment, "HOLDFAST_REPLICA_ID": name}
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            cwd=folder, env=environment, start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - it only calls prctl
        )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name} did not start:\n{log.read_text(encoding='utf-8')}")
        yield json.loads(line)["address"]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.communicate()


class HttpClients:
    """The process that runs all clients."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "bench.http_clients"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, clients: list[Asked]) -> Round:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        job = {"clients": clients, "seconds": self._seconds, "limit": MOST}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client process failed:\n{self._process.stderr.read()}")
        return Round(**json.loads(line))
