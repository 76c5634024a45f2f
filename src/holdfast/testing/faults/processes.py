"""Faults of client processes and of their database sessions."""

import random
import signal
from collections.abc import Callable, Sequence

from holdfast.testing import child_watchdog
from holdfast.testing.faults.fault import Fault
from holdfast.testing.server import until

Pids = Callable[[], Sequence[int]]
"""Returns the pids that are alive. Called when a fault begins, because killed processes are replaced."""


def kill(pids: Pids, *, seed: int = 0) -> Fault:
    """SIGKILL to one of them."""
    choice = random.Random(seed)

    def begin() -> None:
        if alive := pids():
            child_watchdog.send_signal([choice.choice(alive)], signal.SIGKILL)

    return Fault("kill", pids, begin)


def pause(pids: Pids, *, seed: int = 0) -> Fault:
    """SIGSTOP to one of them, and SIGCONT to heal it. The process itself does not notice the pause."""
    choice = random.Random(seed)
    stopped: list[int] = []

    def begin() -> None:
        if alive := pids():
            stopped.append(choice.choice(alive))
            child_watchdog.send_signal(stopped, signal.SIGSTOP)
            until(lambda: _is_stopped(stopped[-1]), what=f"process {stopped[-1]} is stopped")

    def heal() -> None:
        child_watchdog.send_signal(stopped, signal.SIGCONT)
        stopped.clear()

    return Fault("pause", pids, begin, heal)


def fork(pids: Pids, *, seed: int = 0) -> Fault:
    """SIGURG to one of them, whose handler is to fork. A process without a handler ignores it."""
    choice = random.Random(seed)

    def begin() -> None:
        if alive := pids():
            child_watchdog.send_signal([choice.choice(alive)], signal.SIGURG)

    return Fault("fork", pids, begin)


def terminate(
    url: str | Callable[[], str],
    *,
    application_name: str = "holdfast",
    pids: Sequence[int] | None = None,
    on: object = None,
) -> Fault:
    """The server ends sessions: those with these ``pids``, or all with this ``application_name`` in the database. A
    client has the one in its URL, or "holdfast".

    ``url`` needs the rights of a superuser or of the role of the sessions. Does nothing if no server answers. ``on`` is
    the server, if it has faults of its own.
    """
    import psycopg

    statement = (
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity where pid <> pg_backend_pid()"
        " and case when %(pids)s::int[] is null then datname = current_database() and (application_name = %(name)s"
        " or application_name like 'holdfast:%%:' || %(name)s"
        " or %(name)s = 'holdfast' and application_name ~ '^holdfast:[^:]*:[0-9]+$')"
        " else pid = any(%(pids)s::int[]) end"
    )

    def begin() -> None:
        target = url if isinstance(url, str) else url()
        parameters = {"name": application_name, "pids": None if pids is None else list(pids)}
        try:
            with psycopg.connect(target, autocommit=True, connect_timeout=5, application_name="nemesis") as connection:
                connection.execute(statement, parameters)
        except psycopg.OperationalError:
            return

    return Fault("terminate", url if on is None else on, begin)


def _is_stopped(pid: int) -> bool:
    """Or has ended."""
    return all(state in "TtZX" for other, _, state in child_watchdog.list_processes() if other == pid)
