"""A cluster run: a Patroni cluster, worker processes, and faults of its leader, one after the other."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

import psycopg

from holdfast.testing.faults import faketime
from holdfast.testing.history import Recorder, now, read
from holdfast.testing.standstill import Standstill
from proof.cluster.node import Cut
from proof.cluster.patroni_cluster import PATIENCE, PatroniCluster
from proof.workload.verdicts import FinalState
from proof.workload.workload import Workload

KINDS = ("kill", "stop", "partition", "switchover", "clock")
NO_CLOCK = "libfaketime is not installed: apt-get install libfaketime"
DATABASE = "app"
STEPS = (5.0, -5.0, 30.0, -30.0)
"""Seconds by which the leader's clock is stepped: more than the TTL of a lease, or than that of Patroni's leader."""


class FaultRecord(NamedTuple):
    """One fault and what followed, in seconds."""

    kind: str
    detail: str
    at: float
    """Since the start of the run."""
    new_leader: float | None
    """From the fault until another node accepted writes; None if the leader stayed."""
    pause: float
    """The longest time without an acknowledged write, from the fault until the cluster was whole again."""
    standstill: float
    """How long the machine stood still meanwhile, which is part of both."""


def available_kinds() -> list[str]:
    """The kinds of faults that this machine can cause."""
    return [kind for kind in KINDS if kind != "clock" or faketime() is not None]


class ClusterRun:
    """``fail(kind)`` causes one fault, and returns when the cluster is whole again; ``finish()`` ends the workers."""

    def __init__(self, folder: Path, seed: int, *, kinds: list[str], ttl: float) -> None:
        self._folder, self._random, self._ttl, self._seed = folder, random.Random(seed), ttl, seed
        self._history = folder / "history"
        self._sane_clocks = "clock" not in kinds
        self._resources = ExitStack()
        self.faults: list[FaultRecord] = []
        self.expired = 0
        """How often a watch was told that its cursor has expired."""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _start(self) -> None:
        self.standstill = self._resources.enter_context(Standstill())
        self._record = self._resources.enter_context(Recorder(self._history, "nemesis"))
        self._cluster = self._resources.enter_context(
            PatroniCluster(self.standstill, with_clocks=not self._sane_clocks)
        )
        self._resources.callback(self._store_logs)
        self.started = now()
        with psycopg.connect(self._cluster.url("postgres"), autocommit=True) as connection:
            connection.execute(f"create database {DATABASE}")
        self._workload = self._resources.enter_context(
            Workload(
                self._cluster.url(DATABASE), self._folder, self._record, self.standstill, self._cluster.wait_for,
                seed=self._seed, ttl=self._ttl, sane_clocks=self._sane_clocks, patience=PATIENCE,
            )
        )  # fmt: skip
        self._wait_settled("at the start")

    def fail(self, kind: str) -> FaultRecord:
        """Cause a fault of the leader at a random moment. Raises TimeoutError if the cluster does not become whole."""
        time.sleep(self._random.uniform(0, self._ttl / 2))
        name = self._cluster.wait_leader()
        fault: Callable[[str], Any] = getattr(self, f"_{kind}")
        new_leader: float | None = None
        self._workload.change_states()
        began = now()
        self._record.info("fault", fault=kind, phase="begin")
        with fault(name) as (detail, leader_leaves):
            if leader_leaves:
                self._cluster.wait_for(
                    lambda: self._cluster.successor(name) is not None, what=f"{name} is succeeded after {kind}"
                )
                new_leader = now() - began
                self._workload.wait_acknowledged(kind)
            else:
                self._workload.wait_acknowledged(kind)
                time.sleep(self._ttl)
                if self._cluster.successor(name) is not None:
                    new_leader = now() - began
        self._record.info("fault", fault=kind, phase="end")
        self._wait_settled(f"after {kind} of {name}")
        ended = now()
        record = FaultRecord(
            kind, detail, began - self.started, new_leader, self._workload.longest_pause(began, ended),
            self.standstill.seconds(began, ended),
        )  # fmt: skip
        self.faults.append(record)
        return record

    def finish(self) -> FinalState:
        """End the workers, and read what the database has."""
        state = self._workload.finish()
        self.expired = sum(event.op == "listed" for event in read(self._history))
        return state

    # Faults: each is a context manager that yields a description, and whether another node has to lead.

    @contextmanager
    def _kill(self, name: str) -> Iterator[tuple[str, bool]]:
        node = self._cluster.nodes[name]
        node.kill()
        yield "SIGKILL", True
        node.start()

    @contextmanager
    def _stop(self, name: str) -> Iterator[tuple[str, bool]]:
        node = self._cluster.nodes[name]
        node.pause()
        try:
            yield "SIGSTOP", True
        finally:
            node.resume()

    @contextmanager
    def _partition(self, name: str) -> Iterator[tuple[str, bool]]:
        node, cut = self._cluster.nodes[name], self._random.choice(get_args(Cut))
        from_clients = self._random.random() < 0.5
        node.isolate(cut, from_clients=from_clients)
        try:
            yield f"{cut} {'from all' if from_clients else 'from etcd and peers'}", True
        finally:
            node.heal()

    @contextmanager
    def _switchover(self, name: str) -> Iterator[tuple[str, bool]]:
        self._cluster.wait_for(lambda: self._cluster.switch_over(name), what=f"{name} is switched over")
        yield "requested", True

    @contextmanager
    def _clock(self, name: str) -> Iterator[tuple[str, bool]]:
        clock, seconds = self._cluster.clocks[name], self._random.choice(STEPS)
        clock.step(seconds)
        try:
            yield f"{seconds:+g} s", False
        finally:
            clock.heal()

    def _wait_settled(self, when: str) -> None:
        """Until the cluster is whole and the workers have caught up."""
        self._cluster.wait_whole()
        self._workload.wait_settled(when)

    def _store_logs(self) -> None:
        """Keep the logs of the nodes beside the history: their folders are removed."""
        for node in self._cluster.nodes.values():
            (self._folder / f"{node.name}.log").write_text(node.log())
