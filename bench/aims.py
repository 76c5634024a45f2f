"""The targets of the benchmarks. An aim is a ratio within one run, so that it holds on any machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bench.measure import Result


class Aim(NamedTuple):
    """``variant`` takes at most ``most`` times as long as ``than``, or as the first variant if ``than`` is None."""

    benchmark: str
    variant: str
    most: float
    than: str | None = None


class Verdict(NamedTuple):
    aim: Aim
    ratio: float

    @property
    def met(self) -> bool:
        return self.ratio <= self.aim.most

    def __str__(self) -> str:
        aim = self.aim
        against = f", against {aim.than}" if aim.than else ""
        return (
            f"{'met   ' if self.met else 'MISSED'}  {aim.benchmark}: {aim.variant}{against}: "
            f"{self.ratio:.3g}, at most {aim.most:.3g}"
        )


WITHIN, ONCE = "operation(key, tx=conn).run(…)", "operation(key).run(…)"
UNHEARD = "the part of it for telemetry without a listener"
PAIR, ASYNC_PAIR = "with client.lock(name)", "async with client.lock(name)"

AIMS = (
    Aim("lock pair", PAIR, 1.25),
    Aim("lock pair", ASYNC_PAIR, 1.6),
    *(Aim("lock pair", PAIR, 1 / 3, than) for than in ("redis-py Lock", "sqlalchemy-dlock")),
    Aim("lock, 32 tasks", "one AsyncClient", 1 / 2),
    Aim("lock hand-over, in a line", "16 tasks of one client", 1 / 20),
    Aim("lock pair, many held", "10,000 held", 2.0),
    *(
        Aim(f"{call}{on}, {where}", client, 1.3)
        for where in ("fsync on", "fsync off", "SQLite")
        for call in ("put_if", "get")
        for on, client in (("", "Client"), (" on asyncio", "AsyncClient"))
    ),
    Aim("operation, fsync on", WITHIN, 1.25),
    Aim("replayed", ONCE, 1 / 5, "DBOS workflow, run before"),
    Aim("unheard", UNHEARD, 0.02),
)


def judge(results: Iterable[Result]) -> list[Verdict]:
    """The verdicts on those aims for which there are results."""
    ratios = {(each.benchmark, each.variant): each.ratio for each in results if each.ratio is not None}
    verdicts = []
    for aim in AIMS:
        ours = ratios.get((aim.benchmark, aim.variant))
        base = 1.0 if aim.than is None else ratios.get((aim.benchmark, aim.than))
        if ours is not None and base is not None:
            verdicts.append(Verdict(aim, ours / base))
    return verdicts
