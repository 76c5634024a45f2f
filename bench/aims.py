"""The targets of the benchmarks. An aim is a ratio within one run, so that it holds on any machine; but what a person
waits for has a limit in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.dashboard import ENGINES, PAGES
from bench.measure import Result


class Aim(NamedTuple):
    """``variant`` takes at most ``most`` times as long as ``than``, or as the first variant if ``than`` is None; of a
    rate, it is at least ``least`` times as high. ``within``: it takes at most so many seconds."""

    benchmark: str
    variant: str
    most: float | None = None
    than: str | None = None
    least: float | None = None
    within: float | None = None


class Verdict(NamedTuple):
    aim: Aim
    ratio: float
    """The seconds themselves, for an aim that is one of seconds."""

    @property
    def met(self) -> bool:
        least, most = self.aim.least, self.aim.most if self.aim.within is None else self.aim.within
        return (least is None or self.ratio >= least) and (most is None or self.ratio <= most)

    def __str__(self) -> str:
        aim = self.aim
        if aim.within is not None:
            limit = f"{self.ratio * 1e3:.0f} ms, at most {aim.within * 1e3:.0f} ms"
            return f"{'met   ' if self.met else 'MISSED'}  {aim.benchmark}: {aim.variant}: {limit}"
        against = f", against {aim.than}" if aim.than else ""
        return (
            f"{'met   ' if self.met else 'MISSED'}  {aim.benchmark}: {aim.variant}{against}: "
            f"{self.ratio:.3g}, {f'at least {aim.least:.3g}' if aim.most is None else f'at most {aim.most:.3g}'}"
        )


WITHIN, ONCE = "operation(key, tx=conn).run(…)", "operation(key).run(…)"
UNHEARD = "the part of it for telemetry without a listener"
PAIR, ASYNC_PAIR = "with client.lock(name)", "async with client.lock(name)"

MANY, MOST = "tasks, 32 callers", "tasks, 128 callers"

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
    Aim("operation, fsync on", WITHIN, 1.6),
    Aim("operation, flush in 2 ms", WITHIN, 1.2),
    Aim("replayed", ONCE, 1 / 5, "DBOS workflow, run before"),
    Aim("unheard", UNHEARD, 0.02),
    *(
        Aim(f"load, {what}, fsync on", MANY, least=least)
        for what, least in (("lease pairs", 6), ("external operations", 3), ("put_if", 3))
    ),
    Aim("load, lease pairs, fsync on", MANY, than="redis.asyncio, 32 callers", least=1.0),
    Aim("load, hooks, fsync on", "replica, 32 callers", least=2),
    *(
        Aim(f"load, {what}, fsync on", MOST, than=MANY, least=1.0)
        for what in ("lease pairs", "external operations", "put_if")
    ),
    Aim("load, hooks, fsync on", "replica, 128 callers", than="replica, 32 callers", least=1.0),
    *(
        Aim(f"load, {what}, fsync on", f"{who}, 1 caller: p99", 1.3, f"{who}, beside, 1 caller: p99")
        for what in ("lease pairs", "external operations", "put_if")
        for who in ("tasks", "threads")
    ),
    *(Aim(f"dashboard, {engine}", page, within=0.5) for engine in ENGINES for page in PAGES),
)


def judge(results: Sequence[Result]) -> list[Verdict]:
    """The verdicts on those aims for which there are results."""
    ratios = {(each.benchmark, each.variant): each.ratio for each in results if each.ratio is not None}
    seconds = {(each.benchmark, each.variant): each.value for each in results}
    verdicts = []
    for aim in AIMS:
        if aim.within is not None and (aim.benchmark, aim.variant) in seconds:
            verdicts.append(Verdict(aim, seconds[aim.benchmark, aim.variant]))
            continue
        ours = ratios.get((aim.benchmark, aim.variant))
        base = 1.0 if aim.than is None else ratios.get((aim.benchmark, aim.than))
        if ours is not None and base is not None:
            verdicts.append(Verdict(aim, ours / base))
    return verdicts
