"""C10: a gauge that counts leases which are lost."""

import threading
from typing import Any

import holdfast
from holdfast import telemetry
from holdfast.testing.history import now
from proof.bugs.implementation import Holdfast
from proof.bugs.testbed import Testbed

LIMIT = 30.0


class Gauges(Holdfast):
    """The real implementation: counts the leases held when the gauge is read."""

    def open(self, url: str) -> None:
        self.client = holdfast.Client(url)
        self._before = self._read()

    def close(self) -> None:
        self.client.close()

    def note(self, change: int) -> None:
        """Count an acquire (+1) or a release (-1)."""

    def held(self) -> float:
        return self._read() - self._before

    def _read(self) -> float:
        """The gauge of this process, which may hold leases that do not belong to the scenario."""
        return telemetry.readings().get("leases_held", 0.0)


class CountedAlong(Gauges):
    """Counts acquires and releases, but not losses."""

    def open(self, url: str) -> None:
        super().open(url)
        self._count = 0

    def note(self, change: int) -> None:
        self._count += change

    def held(self) -> float:
        return self._count


def lost_meanwhile(testbed: Testbed) -> None:
    """A holds two leases. One is released by force, and A is notified; then A releases the other."""
    gauges, record = testbed.implementation, testbed.worker("a").record
    assert isinstance(gauges, Gauges)
    notified = threading.Event()

    def lost(grant: Any) -> None:
        record.info("lost", grant.name, grant.fence)
        notified.set()

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
    gauges.force(testbed.admin, "taken")
    assert notified.wait(LIMIT)
    since = now()
    read()
    kept = grants[0]
    record.info("believe", kept.name, kept.fence, sure=True, **{"from": since, "until": now()})
    with record.invoke("release", kept.name, kept.fence) as call:
        call.ok() if kept.release() else call.fail()
    gauges.note(-1)
    read()
