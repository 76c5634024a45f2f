"""One process that contends: two threads that acquire, write under protection, renew and release, and write down what
they know of each. Started by a ``Crew``, with its errand as JSON; ends politely when its standard input does.
"""

import json
import os
import random
import sqlite3
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import uuid4

import holdfast
from holdfast.testing.history import Recorder, now

FELL_OVER = 3
"""The exit status of a contender that met something it does not expect."""
SESSION = "session-"
"""Names with this prefix fail over with the session: trust ends with the socket there, so no belief is told of them."""


class Errand(NamedTuple):
    url: str
    folder: str
    worker: str
    names: list[str]
    ttl: float
    seed: int


class Contender:
    """One thread, with a connection of its own for what it writes."""

    def __init__(self, errand: Errand, number: int, client: Any, over: threading.Event) -> None:
        self._errand, self._client, self._over = errand, client, over
        self._random = random.Random(f"{errand.seed}-{errand.worker}-{number}")
        self._record = Recorder(errand.folder, f"{errand.worker}-{number}")
        self._data = Data(errand.url, self._random)
        self._believed_since = 0.0

    def run(self) -> None:
        while not self._over.is_set():
            grant = self._acquire(self._random.choice(self._errand.names))
            if grant is not None:
                self._hold(grant)
            self._over.wait(self._random.uniform(0, self._errand.ttl / 10))
        self._data.close()

    def _acquire(self, name: str) -> Any:
        choose, ttl = self._random.choice, self._errand.ttl
        failover = "session" if name.startswith(SESSION) else "ttl"
        lease = self._client.lease(
            name,
            ttl=ttl,
            timeout=choose([0, ttl / 2, ttl * 2]),
            failover=failover,
            auto_renew=failover == "session" or choose([True, True, False]),
        )
        with self._record.invoke("acquire", name) as call, suppress(holdfast.EngineError, holdfast.SessionUnsafe):
            try:
                grant = lease.acquire()
            except holdfast.NotAcquired:
                call.fail()
                return None
            self._believed_since = now()
            call.ok(grant.fence)
            return grant
        return None

    def _hold(self, grant: Any) -> None:
        if self._take_over(grant):
            for _ in range(self._random.randrange(6)):
                step = self._random.choice([self._write, self._write, self._renew, self._wait])
                if self._over.is_set() or not step(grant):
                    break
                self._believe(grant)
        if self._random.random() < 0.9:  # else it is forgotten: kept until the process ends, or never renewed again
            self._release(grant)

    def _believe(self, grant: Any) -> None:
        """Trusted then and now, so trusted in between: a loss is final."""
        since, self._believed_since = self._believed_since, now()
        if not grant.name.startswith(SESSION) and not grant.lost:
            self._record.info("believe", grant.name, grant.fence, **{"from": since, "until": self._believed_since})

    def _take_over(self, grant: Any) -> bool:
        """Count what older grants wrote, in the same transaction that shows that we hold it now."""
        with self._record.invoke("takeover", grant.name, grant.fence) as call:
            older = self._data.change(grant, call, lambda data: data.take_over(grant.name, grant.fence))
        return older is not None

    def _write(self, grant: Any) -> bool:
        key = uuid4().hex
        with self._record.invoke("write", grant.name, grant.fence, key=key) as call:
            done = self._data.change(grant, call, lambda data: data.write(grant.name, grant.fence, key))
        return done is not None

    def _renew(self, grant: Any) -> bool:
        with self._record.invoke("renew", grant.name, grant.fence) as call:
            try:
                grant.renew()
            except holdfast.LeaseLost:
                call.fail()
            except (holdfast.EngineError, holdfast.OwnershipUnknown):
                pass
            else:
                call.ok()
                return True
        return False

    def _wait(self, grant: Any) -> bool:
        self._over.wait(self._random.uniform(0, self._errand.ttl / 2))
        return not grant.lost

    def _release(self, grant: Any) -> None:
        self._believe(grant)
        with self._record.invoke("release", grant.name, grant.fence) as call, suppress(holdfast.EngineError):
            call.ok() if grant.release() else call.fail()


class Data:
    """The contender's own tables, on a connection that is made anew when it breaks."""

    def __init__(self, url: str, choice: random.Random) -> None:
        self._url, self._random = url, choice
        self._connection: Any = None

    def change(self, grant: Any, call: Any, work: Callable[["Data"], Any]) -> Any:
        """Do ``work`` in a protected transaction; what is known of its outcome goes to ``call``. None if it is not
        certain to have happened."""
        reached_commit = False
        try:
            with grant.transaction(self._connected(), at=self._random.choice(["start", "commit"])):
                result = work(self)
                if self._random.random() < 0.2:
                    time.sleep(self._random.uniform(0, 0.3))
                reached_commit = True
        except (holdfast.FencedOut, holdfast.LeaseLost) as error:
            call.fail(error=type(error).__name__)
        except Exception as error:
            if not reached_commit or _rolled_back(error):
                call.fail(error=type(error).__name__)
            else:
                call.unknown(error=type(error).__name__)
            self.close()
        else:
            call.ok(**({"older": result} if isinstance(result, int) else {}))
            return True if result is None else result
        return None

    def take_over(self, name: str, fence: int) -> int:
        count = self._execute("select count(*) from proof_write where name = ? and fence < ?", name, fence)
        [(older,)] = count.fetchall()
        self._execute("insert into proof_takeover (name, fence, older) values (?, ?, ?)", name, fence, older)
        return int(older)

    def write(self, name: str, fence: int, key: str) -> None:
        self._execute("insert into proof_write (name, fence, key) values (?, ?, ?)", name, fence, key)

    def close(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                self._connection.close()
            self._connection = None

    def _execute(self, statement: str, *values: Any) -> Any:
        if isinstance(self._connection, sqlite3.Connection):
            return self._connection.execute(statement, values)
        return self._connection.execute(statement.replace("?", "%s"), values)

    def _connected(self) -> Any:
        if self._url.startswith("sqlite:"):
            if self._connection is None:
                self._connection = sqlite3.connect(
                    self._url.removeprefix("sqlite:///"), timeout=10, isolation_level=None
                )
            return self._connection
        import psycopg

        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                self._url, connect_timeout=3, target_session_attrs="read-write", application_name="contender",
                prepare_threshold=None,
            )  # fmt: skip
        self._connection.isolation_level = self._random.choice(list(psycopg.IsolationLevel))
        return self._connection


def _rolled_back(error: Exception) -> bool:
    """The server said so, in an answer to COMMIT; a session that ended meanwhile says nothing of it."""
    state = getattr(error, "sqlstate", None)
    return state is not None and state[:2] in ("40", "HF", "23", "55") and state != "40003"


def _loudly(run: Callable[[], None]) -> None:
    """A contender that falls over is a finding of its own, and must not go on as half of itself."""
    try:
        run()
    except BaseException:
        traceback.print_exc()
        os._exit(FELL_OVER)


def main() -> None:
    errand = Errand(**json.loads(sys.argv[1]))
    over = threading.Event()
    with holdfast.Client(errand.url) as client:
        contenders = [Contender(errand, number, client, over) for number in (1, 2)]
        threads = [threading.Thread(target=_loudly, args=(each.run,)) for each in contenders]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        over.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
