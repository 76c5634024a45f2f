"""A way to say that one holds what is held no more."""

import threading
from typing import Any

import holdfast
from holdfast import telemetry
from holdfast.testing.history import now
from proof.bugs.implementation import Holdfast
from proof.bugs.stage import Stage

LIMIT = 30.0


class Gauges(Holdfast):
    """The real implementation: read from what is held, when somebody asks."""

    def open(self, url: str) -> None:
        self.client = holdfast.Client(url)
        self._before = self._read()

    def close(self) -> None:
        self.client.close()

    def note(self, change: int) -> None:
        """A grant came, or was given back."""

    def held(self) -> float:
        return self._read() - self._before

    def _read(self) -> float:
        """Of this process, which may hold what has nothing to do with the scene."""
        return telemetry.readings().get("leases_held", 0.0)


class CountedAlong(Gauges):
    """One more when it is granted, one less when it is given back; and what is lost is neither."""

    def open(self, url: str) -> None:
        super().open(url)
        self._count = 0

    def note(self, change: int) -> None:
        self._count += change

    def held(self) -> float:
        return self._count


def lost_meanwhile(stage: Stage) -> None:
    """A holds two leases. One is taken away by force, and A learns of it; then it gives the other back."""
    gauges, record = stage.implementation, stage.worker("a").record
    assert isinstance(gauges, Gauges)
    told = threading.Event()

    def lost(grant: Any) -> None:
        record.info("lost", grant.name, grant.fence)
        told.set()

    def read() -> None:
        began, value = now(), gauges.held()
        record.info("gauge", value=value, workers=["a"], since=began, until=now())

    grants = []
    for name in ("kept", "taken"):
        with record.invoke("acquire", name, kept=True) as call:
            grant = gauges.client.lease(name, ttl=600.0, renew_every=0.05, on_lost=lost).acquire()
            call.ok(grant.fence)
        gauges.note(+1)
        grants.append(grant)
    since = now()
    read()
    for grant in grants:
        record.info("believe", grant.name, grant.fence, sure=True, **{"from": since, "until": now()})
    gauges.force(stage.director, "taken")
    assert told.wait(LIMIT)
    since = now()
    read()
    kept = grants[0]
    record.info("believe", kept.name, kept.fence, sure=True, **{"from": since, "until": now()})
    with record.invoke("release", kept.name, kept.fence) as call:
        call.ok() if kept.release() else call.fail()
    gauges.note(-1)
    read()
