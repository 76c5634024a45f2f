"""Faults of a server, or of a primary with its standby."""

from collections.abc import Callable, Mapping
from typing import Any, Self

from holdfast.testing.faults.fault import Fault
from holdfast.testing.postgres import Postgres
from holdfast.testing.resource import Resource
from holdfast.testing.server import until

_STANDBY = "standby1"


class Pair(Resource):
    """A primary and its standby, which change places in a failover.

    If it is synchronous, a failover loses no acknowledged commit, and every commit waits while the standby is down.
    """

    def __init__(self, primary: Postgres, standby: Postgres, *, synchronous: bool) -> None:
        self.primary, self.standby = primary, standby
        self._synchronous = synchronous
        self._first = primary

    @classmethod
    def create(
        cls,
        *,
        major: int | None = None,
        synchronous: bool = True,
        settings: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        primary = Postgres.create(major=major, settings=settings, environment=environment)
        try:
            return cls(primary, primary.standby(synchronous, _STANDBY), synchronous=synchronous)
        except BaseException:
            primary.close()
            raise

    def urls(self, url: str) -> str:
        """The ``url`` of a database of the primary, with the addresses of both servers."""
        primary, standby = (f"127.0.0.1:{server.port}" for server in (self.primary, self.standby))
        return url.replace(primary, f"{primary},{standby}")

    def fail_over(self) -> None:
        """Kill the primary and promote the standby. There is no standby until ``rejoin()``."""
        self.primary.kill()
        self.standby.promote()
        self.primary, self.standby = self.standby, self.primary

    def rejoin(self) -> None:
        """Start the old primary as standby of the new one. Commits that only it has are undone."""
        if not self.standby.running:
            self.standby.rewind(self.primary, self._synchronous, _STANDBY)

    def close(self) -> None:
        """End both: a server closes the standbys created from it."""
        self._first.close()


def restart(server: Postgres | Pair) -> Fault:
    """Shut down, and start again to heal."""
    return _stopped("restart", server, Postgres.stop)


def crash(server: Postgres | Pair) -> Fault:
    """SIGKILL to all its processes; to heal, start it again, which recovers from the WAL."""
    return _stopped("crash", server, Postgres.kill)


def freeze(server: Postgres | Pair) -> Fault:
    """Pause it: connections stay open, new ones are accepted, and none is answered."""
    frozen: list[Postgres] = []

    def begin() -> None:
        frozen.append(_primary(server))
        frozen[-1].pause()

    def heal() -> None:
        while frozen:
            frozen.pop().resume()

    return Fault("freeze", server, begin, heal)


def read_only(server: Postgres | Pair) -> Fault:
    """Make every new transaction read-only, as operators do while a disk is full or a database is moved."""
    return _altered("read_only", server, {"default_transaction_read_only": ("on", "off")})


def impatient(server: Postgres | Pair) -> Fault:
    """End long statements and idle sessions soon, as the defaults of rented servers may."""
    return _altered(
        "impatient",
        server,
        {
            "statement_timeout": ("200ms", "0"),
            "idle_in_transaction_session_timeout": ("200ms", "0"),
            "idle_session_timeout": ("300ms", "0"),
        },
    )


def refuse(server: Postgres | Pair, database: str) -> Fault:
    """Accept no connection to the database and end those that there are, as a rented server does in maintenance."""
    closed: list[Postgres] = []

    def begin() -> None:
        closed.append(_primary(server))
        _allow_connections(closed[-1], database, allowed=False)

    def heal() -> None:
        while closed:
            _allow_connections(closed.pop(), database, allowed=True)

    return Fault("refuse", server, begin, heal)


def failover(pair: Pair, *, moved: Callable[[Postgres], Any] | None = None) -> Fault:
    """Kill the primary and promote the standby; to heal, start the old primary as its standby.

    ``moved`` is called with the new primary, e.g. to change the target of a proxy.
    """

    def begin() -> None:
        pair.fail_over()
        if moved is not None:
            moved(pair.primary)

    return Fault("failover", pair, begin, pair.rejoin)


def old_primary(pair: Pair) -> Fault:
    """Promote the standby and start the old primary unchanged, so that two servers accept writes.

    On a synchronous pair no commit on the old one returns, because its standby is gone. To heal, it follows the new.
    """

    def begin() -> None:
        pair.fail_over()
        pair.standby.start()

    def heal() -> None:
        pair.standby.kill()
        pair.rejoin()

    return Fault("old_primary", pair, begin, heal)


def standby_away(pair: Pair) -> Fault:
    """Stop the standby. On a synchronous pair every commit waits for it; a cancelled one may or may not survive."""

    def begin() -> None:
        pair.standby.stop("immediate")

    def heal() -> None:
        pair.standby.start()

    return Fault("standby_away", pair, begin, heal)


def _stopped(kind: str, server: Postgres | Pair, stop: Callable[[Postgres], None]) -> Fault:
    down: list[Postgres] = []

    def begin() -> None:
        down.append(_primary(server))
        stop(down[-1])

    def heal() -> None:
        while down:
            down.pop().start()

    return Fault(kind, server, begin, heal)


def _altered(kind: str, server: Postgres | Pair, settings: Mapping[str, tuple[str, str]]) -> Fault:
    """``settings``: their values during the fault, and after it."""
    changed: list[Postgres] = []

    def begin() -> None:
        changed.append(_primary(server))
        for name, (value, _) in settings.items():
            _alter(changed[-1], name, value)

    def heal() -> None:
        while changed:
            primary = changed.pop()
            for name, (_, value) in settings.items():
                _alter(primary, name, value)

    return Fault(kind, server, begin, heal)


def _alter(server: Postgres, name: str, value: str) -> None:
    """Again after an error: a server whose clock steps may end a connection that is being opened."""
    import psycopg

    def is_altered() -> bool:
        try:
            server.alter(name, value)
        except psycopg.OperationalError:
            return False
        return True

    until(is_altered, what=f"{name} is {value}")


def _allow_connections(server: Postgres, database: str, *, allowed: bool) -> None:
    import psycopg
    from psycopg.sql import SQL, Identifier, Literal

    with psycopg.connect(server.url, autocommit=True, connect_timeout=60, application_name="nemesis") as connection:
        connection.execute(SQL("alter database {} allow_connections {}").format(Identifier(database), Literal(allowed)))
        if not allowed:
            connection.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s", [database]
            )


def _primary(server: Postgres | Pair) -> Postgres:
    return server.primary if isinstance(server, Pair) else server
