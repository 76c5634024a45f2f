"""Protected writes of a contender, on a connection that is replaced when it breaks."""

import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import holdfast
from holdfast.testing.history import Pending
from proof import protected_tables

_ROLLED_BACK = ("40", "HF", "23", "55")
"""Classes of SQLSTATE that prove that a COMMIT was rolled back."""


class Tables:
    """Each write completes its recorded call with the outcome that is certain, or as unknown."""

    def __init__(self, url: str, choice: random.Random, *, sane_clocks: bool) -> None:
        self._url, self._random, self._sane_clocks = url, choice, sane_clocks
        self._connection: Any = None
        self.one_writer = url.startswith("sqlite:")

    def take_over(self, grant: Any, call: Pending) -> bool:
        def work() -> dict[str, Any]:
            [(older,)] = self._execute(
                protected_tables.TAKE_OVER, *protected_tables.take_over_parameters(grant.name, grant.fence)
            ).fetchall()
            return {"older": older}

        return self._change(grant, call, work)

    def write(self, grant: Any, key: str, call: Pending, lasting: float) -> bool:
        def work() -> dict[str, Any]:
            self._execute(protected_tables.WRITE, grant.name, grant.fence, key)
            if self._sane_clocks and not self.one_writer and self._random.random() < 0.7:
                self._execute("select pg_sleep(?)", lasting)  # not idle: the server ends idle transactions with the TTL
            else:
                time.sleep(lasting)
            return {}

        return self._change(grant, call, work)

    def lets_in(self, grant: Any) -> bool:
        """Whether a protected transaction begins."""
        try:
            with grant.transaction(self._connect()):
                return True
        except Exception:
            return False

    def close(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                self._connection.close()
            self._connection = None

    def _change(self, grant: Any, call: Pending, work: Callable[[], dict[str, Any]]) -> bool:
        """Run ``work`` in a protected transaction, and complete ``call``. Returns whether it was committed."""
        reached_commit = False
        try:
            with grant.transaction(self._connect(), at=self._random.choice(["start", "commit"])):
                data = work()
                reached_commit = True
        except (holdfast.FencedOut, holdfast.LeaseLost) as error:
            call.fail(error=type(error).__name__)
        except Exception as error:
            certain = not reached_commit or _was_rolled_back(error)
            (call.fail if certain else call.unknown)(error=f"{type(error).__name__}: {error}"[:200])
            self.close()
        else:
            call.ok(**data)
            return True
        return False

    def _execute(self, statement: str, *values: Any) -> Any:
        return self._connection.execute(
            statement if self.one_writer else protected_tables.with_placeholder(statement, "%s"), values
        )

    def _connect(self) -> Any:
        if self.one_writer:
            if self._connection is None:
                path = self._url.removeprefix("sqlite:///")
                self._connection = sqlite3.connect(path, timeout=10, isolation_level=None)
            return self._connection
        import psycopg

        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                self._url,
                connect_timeout=3,
                target_session_attrs="read-write",
                application_name="contender",
                prepare_threshold=None,
            )
        self._connection.isolation_level = self._random.choice(list(psycopg.IsolationLevel))
        return self._connection


def _was_rolled_back(error: Exception) -> bool:
    """Whether the error proves a rollback. The loss of the session proves nothing."""
    state = getattr(error, "sqlstate", None)
    return state is not None and state[:2] in _ROLLED_BACK and state != "40003"
