"""What can become of client processes, and of the sessions they have on a server."""

import random
import signal
from collections.abc import Callable, Sequence

from holdfast.testing import watcher
from holdfast.testing.faults.fault import Fault
from holdfast.testing.server import until

Pids = Callable[[], Sequence[int]]
"""Who is alive right now. Asked when the fault begins, for those who died were replaced."""


def kill(pids: Pids, *, seed: int = 0) -> Fault:
    """SIGKILL to one of them. Whoever started it may start another."""
    choice = random.Random(seed)

    def begin() -> None:
        if alive := pids():
            watcher.tell([choice.choice(alive)], signal.SIGKILL)

    return Fault("kill", pids, begin)


def pause(pids: Pids, *, seed: int = 0) -> Fault:
    """SIGSTOP to one of them, and SIGCONT when it is healed: to itself it looks as if no time had passed."""
    choice = random.Random(seed)
    stopped: list[int] = []

    def begin() -> None:
        if alive := pids():
            stopped.append(choice.choice(alive))
            watcher.tell(stopped, signal.SIGSTOP)
            until(lambda: _stands_still(stopped[-1]), what=f"process {stopped[-1]} stands still")

    def heal() -> None:
        watcher.tell(stopped, signal.SIGCONT)
        stopped.clear()

    return Fault("pause", pids, begin, heal)


def terminate(
    url: str | Callable[[], str],
    *,
    application_name: str = "holdfast",
    pids: Sequence[int] | None = None,
    on: object = None,
) -> Fault:
    """The server ends sessions: those in ``pids``, or else all of this ``application_name`` in the same database.

    ``url`` is of a superuser's, or of the same role's. Where no server answers there is no session to end. ``on`` is
    the server, where that has faults of its own.
    """
    import psycopg

    statement = (
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity where pid <> pg_backend_pid()"
        " and case when %(pids)s::int[] is null then application_name = %(name)s and datname = current_database()"
        " else pid = any(%(pids)s::int[]) end"
    )

    def begin() -> None:
        where = url if isinstance(url, str) else url()
        wanted = {"name": application_name, "pids": None if pids is None else list(pids)}
        try:
            with psycopg.connect(where, autocommit=True, connect_timeout=5, application_name="nemesis") as connection:
                connection.execute(statement, wanted)
        except psycopg.OperationalError:
            return

    return Fault("terminate", url if on is None else on, begin)


def _stands_still(pid: int) -> bool:
    """Or is gone, which is as still as it gets."""
    return all(state in "TtZX" for found, _, state in watcher.processes() if found == pid)
