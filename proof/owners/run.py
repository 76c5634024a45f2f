"""An owner in a process of its own, a retry in this one, and what befalls the owner."""

import multiprocessing
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

import holdfast
from holdfast.testing.proxy import Proxy
from holdfast.testing.resource import Resource

TTL = 60.0
"""A retry that has to wait for it is far above the limit."""
LIMIT = 1.0
"""Seconds from a kill within which 99 of 100 retries have begun."""
_PATIENCE = 120.0
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["holdfast.client", "holdfast.operations.leased_attempt", "psycopg"])


class Kills(NamedTuple):
    seconds: list[float]
    """From each kill until the retry called its function."""
    rollbacks: list[int]
    """How often each retry called its rollback."""
    second_attempts: int
    """Retries that did anything while the owner lived."""

    def figures(self) -> dict[str, Any]:
        ordered = sorted(self.seconds)
        retry = {"p50": _quantile(ordered, 0.5), "p99": _quantile(ordered, 0.99), "max": ordered[-1]}
        return {
            "kills": len(ordered),
            "seconds until the retry": {name: round(each, 3) for name, each in retry.items()},
            "rollbacks": {"one": self.rollbacks.count(1), "none": self.rollbacks.count(0), "more": self._repeated()},
            "second attempts": self.second_attempts,
        }

    @property
    def is_safe(self) -> bool:
        return not self.second_attempts and set(self.rollbacks) == {1}

    @property
    def is_fast(self) -> bool:
        return _quantile(sorted(self.seconds), 0.99) <= LIMIT

    def _repeated(self) -> int:
        return sum(each > 1 for each in self.rollbacks)


class Resets(NamedTuple):
    times: int
    second_attempts: int
    rollbacks: int
    owner_finished: bool

    def figures(self) -> dict[str, Any]:
        fields = self._asdict()
        return {"resets": fields.pop("times"), **{name.replace("_", " "): each for name, each in fields.items()}}

    @property
    def is_safe(self) -> bool:
        return self.owner_finished and not self.second_attempts and not self.rollbacks


class Owner(Resource):
    """A process that runs the operation until ``finish()``, or until it is killed. Its function has begun on return."""

    def __init__(self, url: str, name: str) -> None:
        self._answers, theirs = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(target=_own, args=(url, name, theirs), daemon=True)
        self._process.start()
        theirs.close()
        if self._receive() != "begun":
            raise RuntimeError(f"operation {name!r} was not begun")

    def kill(self) -> float:
        """kill -9. Returns the moment before it."""
        moment = time.monotonic()
        self._process.kill()
        return moment

    def finish(self) -> bool:
        """Whether its first attempt was recorded as the success."""
        self._answers.send("finish")
        return bool(self._receive() == 1)

    def close(self) -> None:
        self._process.kill()
        self._process.join(_PATIENCE)
        self._answers.close()

    def _receive(self) -> object:
        if not self._answers.poll(_PATIENCE):
            raise TimeoutError(f"the owner did not answer within {_PATIENCE:g} s")
        return self._answers.recv()


def _own(url: str, name: str, answers: "Connection[Any, Any]") -> None:
    def work(op: holdfast.Op) -> None:
        answers.send("begun")
        while not answers.poll(0.01):
            op.check()

    with holdfast.Client(url) as client, suppress(holdfast.HoldfastError):
        answers.send(client.operation(name, ttl=TTL).run(work).attempt)


class Retry:
    """A retry of the operation in this process, and when it did something."""

    def __init__(self, client: holdfast.Client, name: str) -> None:
        self._operation = client.operation(name, rollback=self._roll_back, ttl=TTL, timeout=_PATIENCE)
        self.rolled_back: list[float] = []
        self.executed: list[float] = []

    def run(self) -> Self:
        self._operation.run(self._work)
        return self

    def _work(self) -> None:
        self.executed.append(time.monotonic())

    def _roll_back(self) -> None:
        self.rolled_back.append(time.monotonic())


def kill_owners(url: str, times: int, seed: int) -> Kills:
    """Every second retry waits already when the owner is killed, the others begin then."""
    chance, kills = random.Random(seed), Kills([], [], 0)
    with holdfast.Client(url) as client, ThreadPoolExecutor(1) as pool:
        client.migrate()
        for number in range(times):
            retry = Retry(client, f"kill-{seed}-{number}")
            with Owner(url, f"kill-{seed}-{number}") as owner:
                waiting = pool.submit(retry.run) if number % 2 else None
                time.sleep(chance.uniform(0.0, 0.3))
                killed_at = owner.kill()
                (waiting or pool.submit(retry.run)).result(_PATIENCE)
            moments = [*retry.rolled_back, *retry.executed]
            kills.seconds.append(retry.executed[0] - killed_at)
            kills.rollbacks.append(len(retry.rolled_back))
            kills = kills._replace(second_attempts=kills.second_attempts + (min(moments) < killed_at))
    return kills


def reset_owner(url: str, times: int, seed: int) -> Resets:
    """Reset all TCP connections of an owner that lives, at random moments, while a retry waits."""
    chance, name = random.Random(seed), f"reset-{seed}"
    with holdfast.Client(url) as client, Proxy(url) as proxy, ThreadPoolExecutor(1) as pool:
        client.migrate()
        with Owner(proxy.url, name) as owner:
            retry = Retry(client, name)
            waiting = pool.submit(retry.run)
            for _ in range(times):
                proxy.cut()
                time.sleep(chance.uniform(0.0, 0.15))
            owner_finished = owner.finish()
            waiting.result(_PATIENCE)
        return Resets(times, len(retry.executed), len(retry.rolled_back), owner_finished)


def _quantile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
