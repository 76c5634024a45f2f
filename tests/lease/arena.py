"""Where races are run: a few sessions on one database, and requests sent at once, aimed at the instant of expiry."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

from holdfast.errors import Refused
from holdfast.runtime.clock import now
from tests.children import PATIENCE
from tests.raw_session import Raw, Row, acquisition

Ask = tuple[str, Row]
WARM: dict[str, Row] = {
    "lease_acquire": acquisition("warm"),
    "lease_renew": {"name": "warm", "token": acquisition("x")["token"]},
    "lease_release": {"name": "warm", "token": acquisition("x")["token"]},
    "lease_force_release": {"name": "warm", "actor": "a", "reason": "b"},
    "beat_renew": {"beat": acquisition("x")["token"]},
    "purge": {},
}


class Arena:
    """A few sessions on one database, and requests sent at once."""

    def __init__(self, url: str) -> None:
        self.raws = [Raw(url) for _ in range(4)]
        self.setup = self.raws[3]
        self.random = random.Random(5)
        self.aim = -0.0005
        for raw in self.raws:  # prepared here, so that in a race only the execution is sent
            if not raw.sqlite:
                for statement, parameters in WARM.items():
                    raw.call(statement, **parameters)
        self.setup.clear()

    def at_once(self, *asks: Ask) -> list[Any]:
        """The answers in the order of the questions: rows, or the error of one that was refused."""
        answers = (self._threads if self.setup.sqlite else self._sockets)(asks)
        return [answers[number] for number in range(len(asks))]

    def _sockets(self, asks: tuple[Ask, ...]) -> dict[int, Any]:
        order = self.random.sample(range(len(asks)), len(asks))
        for number in order:
            session = self.raws[number].session
            statement, parameters = asks[number]
            if statement in session._statements:
                session._send(session._statements[statement], parameters)
            else:
                session.pgconn.send_query_params(statement.encode(), [each.encode() for each in parameters.values()])
            session.pgconn.flush()
            self._spin(self.random.choice([0, 0, 3e-5, 1e-4, 3e-4]))
        return {number: self._answer(self.raws[number].session) for number in order}

    @staticmethod
    def _answer(session: Any) -> Any:
        try:
            return session._rows(session._answer(now() + PATIENCE))
        except Refused as error:
            return error

    def _threads(self, asks: tuple[Ask, ...]) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        barrier = threading.Barrier(len(asks))

        def run(number: int) -> None:
            barrier.wait()
            answers[number] = self.raws[number].session.call(*asks[number], PATIENCE)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(asks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def expire_soon(self) -> None:
        """Every beat ends in a moment, and we go on a hair before or after."""
        moment = self.random.uniform(0.003, 0.004)
        clock = "((julianday('now') - 2440587.5) * 86400.0)" if self.setup.sqlite else "clock_timestamp()"
        length = moment if self.setup.sqlite else f"interval '{moment} seconds'"
        self.setup.run(f"update holdfast.beat set expires_at = {clock} + {length} where not dead;\n")
        self._spin(moment + self.aim + self.random.uniform(-0.0003, 0.0003))

    def learn(self, renewed: bool) -> None:
        """Aim later when the renewal won, earlier when it lost: the instant is where both are as likely."""
        self.aim = min(0.003, max(-0.004, self.aim + (0.0001 if renewed else -0.0001)))

    @staticmethod
    def _spin(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    def ends(self, old: Row, name: str) -> list[str]:
        """How that grant ended, as history tells it."""
        return [row["outcome"] for row in self.setup.history(name) if row["fence"] == old["fence"]]
