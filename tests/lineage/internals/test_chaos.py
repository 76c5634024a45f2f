"""The relay, its sink and the way to the database are broken at random, under load: everything arrives all the same.

A few faults here; ``make lineage`` goes on for a minute.
"""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections import Counter
from contextlib import nullcontext, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psycopg

import holdfast
from holdfast.testing import Proxy
from tests.children import PATIENCE, Child, eventually

SECONDS = float(os.environ.get("HOLDFAST_LINEAGE_SECONDS", "0"))
FAULTS = 4
"""At least so many, however long that takes."""
PACE, EVENTS, AHEAD = (30, 9, 150) if SECONDS else (10, 9, 45)
"""Answers of the sink between two faults, at most; events of about three operations; and how many may wait to be
published."""
DATASETS = ("roads", "parcels", "rivers")
RELAY = """
import logging, sys
import holdfast, holdfast.lineage.relay_terms
from holdfast.lineage.openlineage import OpenLineage

logging.disable()
holdfast.lineage.relay_terms.MAX_DELAY = 0.5
with holdfast.Client(sys.argv[1]) as client:
    print("up")
    client.relay("r", OpenLineage(sys.argv[2], timeout=0.8), batch=100, poll=0.01, tries=2, ttl=1.5).run()
"""


class Receiver:
    """A real HTTP server that fails, stalls, hangs up, lies and sends to another page; now and then there is none."""

    def __init__(self, seed: int) -> None:
        self.lines: list[str] = []
        """What it has, in the order it took it."""
        self.refused: set[str] = set()
        self.well = False
        self.moods: Counter[str] = Counter()
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._grown = threading.Condition(self._lock)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._server: ThreadingHTTPServer | None = None
        self.start()

    def start(self) -> None:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"])).decode()
                with suppress(ConnectionError):
                    receiver.answer(self, text)

            def do_GET(self) -> None:
                """The other page, which is there."""
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads, allow_reuse_address = True, True

            def handle_error(self, *_: Any) -> None: ...

        self._server = Server(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def wait_for_more(self, number: int) -> None:
        """There is little to break where nothing goes on."""
        with self._lock:
            for _ in range(number):
                assert self._grown.wait(PATIENCE), "nothing is published"

    def answer(self, handler: BaseHTTPRequestHandler, text: str) -> None:
        moods = ("well", "fails", "lies", "stalls", "hangs up", "refuses", "sends away")
        weights = (82, 5, 4, 1, 3, 2, 3)
        with self._lock:
            mood = "well" if self.well else self._random.choices(moods, weights)[0]
            self.moods[mood] += 1
            self._grown.notify_all()
            if mood == "refuses":
                self.refused.add(json.loads(text)["run"]["facets"]["holdfast_idempotency"]["eventId"])
            elif mood in ("well", "lies"):
                self.lines.append(text)
        if mood == "stalls":  # until the other side has given up
            handler.connection.settimeout(PATIENCE)
            with suppress(OSError):
                handler.connection.recv(1)
        elif mood == "hangs up":
            handler.connection.shutdown(socket.SHUT_RDWR)
        else:
            handler.send_response({"well": 201, "refuses": 422, "sends away": 302}.get(mood, 503))
            handler.send_header("Location", "/login")
            handler.send_header("Content-Length", "0")
            handler.end_headers()


class Load(threading.Thread):
    """Operations of all kinds, one after the other, until told to stop; never far ahead of what the receiver has, or it
    would take a slow machine long to tell it all."""

    def __init__(self, url: str, worker: int, stop: threading.Event, receiver: Receiver) -> None:
        super().__init__(daemon=True)
        self._url, self._worker, self._stop_it, self._receiver = url, worker, stop, receiver
        self.done: dict[str, int] = {}
        """By key: how many messages it emitted."""
        self.failed: set[str] = set()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            postgres = not self._url.startswith("sqlite")
            tx: Any = psycopg.connect(self._url, autocommit=True) if postgres else nullcontext()
            with holdfast.Client(self._url) as client, tx as connection:
                number = 0
                while not self._stop_it.wait(0.1):
                    if number * EVENTS < len(self._receiver.lines) + AHEAD:
                        number += 1
                        self._one(client, connection if number % 2 else None, number)
        except BaseException as error:
            self.error = error

    def _one(self, client: holdfast.Client, tx: Any, number: int) -> None:
        key = holdfast.OperationKey(
            pipeline="p",
            task=f"w{self._worker}",
            dataset=DATASETS[number % 3],
            operation="upsert",
            params={"n": number},
        )

        def work(op: Any) -> int:
            for each in range(number % 3):
                op.emit("topic", each)
            if number % 5 == 0:
                raise ValueError("broken")
            return number

        try:
            client.operation(key, tx=tx, timeout=600).run(work)
            self.done[key.digest] = number % 3
        except ValueError:
            self.failed.add(key.digest)


def end(relay: Child) -> None:
    with relay:
        relay.kill()


def torment(random_: random.Random, relays: list[Child], spawn: Any, receiver: Receiver, proxy: Proxy | None) -> None:
    """One thing that goes wrong."""
    fault = random_.choice(("kill", "kill", "sink", "database" if proxy else "kill"))
    if fault == "kill":
        end(relays.pop(0))
        relays.append(spawn())
    elif fault == "sink":
        receiver.stop()
        time.sleep(random_.uniform(0.05, 0.3))
        receiver.start()
    elif proxy is not None:
        getattr(proxy, random_.choice(("reset", "cut", "half_open")))()
        time.sleep(random_.uniform(0.05, 0.3))
        proxy.heal()


def test_everything_arrives_in_order_and_nothing_else_whatever_breaks(either: str) -> None:
    seed = random.randrange(10_000)
    random_, receiver, stop = random.Random(seed), Receiver(seed), threading.Event()
    proxy = None if either.startswith("sqlite") else Proxy(either)
    with holdfast.Client(either) as client, proxy or nullcontext():
        client.relays.list()  # SQLite makes its tables now, and nobody else meanwhile

        def spawn() -> Child:
            return Child(RELAY, either if proxy is None else proxy.url, f"http://127.0.0.1:{receiver.port}")

        loads = [Load(either, worker, stop, receiver) for worker in range(3)]
        relays = [spawn(), spawn()]
        try:
            relays[0].expect("up")
            for load in loads:
                load.start()
            until, faults = time.monotonic() + SECONDS, 0
            while time.monotonic() < until or faults < FAULTS:
                receiver.wait_for_more(random_.randrange(1, PACE))
                torment(random_, relays, spawn, receiver, proxy)
                faults += 1
            eventually(lambda: all(load.done or load.error for load in loads), "each has done something")
            stop.set()
            for load in loads:
                load.join()
                assert load.error is None, load.error
            receiver.well = True
            parked = drain(client, receiver, seed)
        finally:
            stop.set()
            for relay in relays:
                end(relay)
            receiver.stop()
        judge(client, loads, receiver, parked, seed)


def drain(client: holdfast.Client, receiver: Receiver, seed: int) -> set[str]:
    """Wait until everything is published, as long as there is progress. Returns the ids of the parked events."""
    parked: set[str] = set()

    def is_published() -> bool:
        for each in client.relays.parked("r"):
            assert each.event.id in receiver.refused or "died" in each.problem, (each, seed)
            parked.add(each.event.id)
            client.relays.retry("r", each.id)
        return all((each.entries, each.parked) == (0, 0) for each in client.relays.list())

    def goes_on(before: int) -> bool:
        return is_published() or sum(receiver.moods.values()) > before

    while not is_published():
        eventually(partial(goes_on, sum(receiver.moods.values())), f"it goes on, seed {seed}")
    return parked


def judge(client: holdfast.Client, loads: list[Load], receiver: Receiver, parked: set[str], seed: int) -> None:
    about = f"seed {seed}, {dict(receiver.moods)}"
    events = {json.loads(line)["run"]["facets"]["holdfast_idempotency"]["eventId"]: json.loads(line)
              for line in receiver.lines}  # fmt: skip
    verification = client.relays.verify(receiver.lines)
    assert {each.what for each in verification.problems} <= {"reordered"}, (about, verification.problems[:5])
    late = {(each.key, each.number) for each in client.relays.events() if each.id in parked}
    assert {(each.operation, each.number) for each in verification.problems} <= late, (
        f"only what was parked is late: {about}"
    )
    kinds: dict[str, Counter[str]] = {}
    for each in events.values():
        facets = each["run"]["facets"]
        kind = "MESSAGE" if "holdfast_message" in facets else each["eventType"]
        kinds.setdefault(facets["holdfast_idempotency"]["key"], Counter())[kind] += 1
    for load in loads:
        assert load.done, about
        for key, emitted in load.done.items():
            wanted = Counter({"START": 1, "COMPLETE": 1, **({"MESSAGE": emitted} if emitted else {})})
            assert kinds.pop(key) == wanted, (about, key)
        for key in load.failed:
            assert kinds.pop(key) == Counter({"START": 1, "FAIL": 1}), (about, key)
    assert kinds == {}, f"what nobody did: {about}"
    print(f"\n{len(events)} events, {len(receiver.lines) - len(events)} of them twice; {about}")  # noqa: T201
