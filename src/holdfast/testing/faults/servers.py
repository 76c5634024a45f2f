"""What can become of a server, alone or as one of two."""

from collections.abc import Callable, Mapping
from typing import Any, Self

from holdfast.testing.closing import Closing
from holdfast.testing.faults.fault import Fault
from holdfast.testing.postgres import Postgres

_STANDBY = "standby1"


class Pair(Closing):
    """A primary and its standby, which change places.

    Synchronous, so nothing that was answered is lost: a standby that is away holds up every commit.
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
        """``url``, which is of the primary's, with both servers in it."""
        here, there = (f"127.0.0.1:{server.port}" for server in (self.primary, self.standby))
        return url.replace(here, f"{here},{there}")

    def fail_over(self) -> None:
        """The primary is killed, and the standby takes its place. Until ``rejoin()`` it is alone."""
        self.primary.kill()
        self.standby.promote()
        self.primary, self.standby = self.standby, self.primary

    def rejoin(self) -> None:
        """The old primary comes back as the standby of the new one, and what only it knew is undone."""
        if not self.standby.running:
            self.standby.rewind(self.primary, self._synchronous, _STANDBY)

    def close(self) -> None:
        """End both: each server closes the standbys made from it."""
        self._first.close()


def restart(server: Postgres | Pair) -> Fault:
    """Shut down in order, and started again when healed."""
    return _down("restart", server, Postgres.stop)


def crash(server: Postgres | Pair) -> Fault:
    """SIGKILL to every process of it; started again, and recovered from its log, when healed."""
    return _down("crash", server, Postgres.kill)


def freeze(server: Postgres | Pair) -> Fault:
    """It stands still: connections stay open, new ones are taken, and nobody answers."""
    frozen: list[Postgres] = []

    def begin() -> None:
        frozen.append(_primary(server))
        frozen[-1].pause()

    def heal() -> None:
        while frozen:
            frozen.pop().resume()

    return Fault("freeze", server, begin, heal)


def read_only(server: Postgres | Pair) -> Fault:
    """Every new transaction is read-only, as it is set while a disk is full or a database is moved."""
    changed: list[Postgres] = []

    def begin() -> None:
        changed.append(_primary(server))
        changed[-1].alter("default_transaction_read_only", "on")

    def heal() -> None:
        while changed:
            changed.pop().alter("default_transaction_read_only", "off")

    return Fault("read_only", server, begin, heal)


def failover(pair: Pair, *, moved: Callable[[Postgres], Any] | None = None) -> Fault:
    """The primary dies and the standby is promoted; healed, the old primary is back as its standby.

    ``moved`` is told the new primary, e.g. to lead a proxy there.
    """

    def begin() -> None:
        pair.fail_over()
        if moved is not None:
            moved(pair.primary)

    return Fault("failover", pair, begin, pair.rejoin)


def old_primary(pair: Pair) -> Fault:
    """The standby is promoted, and the old primary comes back as it was, so that two servers take writes.

    On a synchronous pair the old one answers no commit any more: its standby has left it. Healed, it follows the new.
    """

    def begin() -> None:
        pair.fail_over()
        pair.standby.start()

    def heal() -> None:
        pair.standby.kill()
        pair.rejoin()

    return Fault("old_primary", pair, begin, heal)


def standby_away(pair: Pair) -> Fault:
    """The standby is down. On a synchronous pair every commit waits for it, and may be cancelled in doubt."""

    def begin() -> None:
        pair.standby.stop("immediate")

    def heal() -> None:
        pair.standby.start()

    return Fault("standby_away", pair, begin, heal)


def _down(kind: str, server: Postgres | Pair, end: Callable[[Postgres], None]) -> Fault:
    down: list[Postgres] = []

    def begin() -> None:
        down.append(_primary(server))
        end(down[-1])

    def heal() -> None:
        while down:
            down.pop().start()

    return Fault(kind, server, begin, heal)


def _primary(server: Postgres | Pair) -> Postgres:
    return server.primary if isinstance(server, Pair) else server
