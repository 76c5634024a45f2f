"""Metrics for Prometheus, through prometheus_client:

    from holdfast.integrations.prometheus import export
    stop = export()                            # into the registry that prometheus_client.start_http_server serves

A metric is called ``holdfast_`` and its name, a counter ends with ``_total``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from holdfast import telemetry
from holdfast.extras import missing_extra

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.core import GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise missing_extra(error, "prometheus") from None


def export(
    registry: CollectorRegistry = REGISTRY, *, prefix: str = "holdfast_", env: str | None = None, most: int = 1000
) -> Callable[[], None]:
    """Export what this process does from now on; call what comes back to end it, and to take it out of the registry.

    ``env``: what the label of that name says wherever a metric has it; unless given, $HOLDFAST_ENV. ``most``: kinds of
    operations that are told apart; those beyond are "(other)"."""
    where, bound = telemetry.environment(env), telemetry.Bound(most)
    series: dict[str, Counter | Histogram] = {}
    for each in telemetry.METRICS:
        if each.kind == "counter":
            series[each.name] = Counter(prefix + each.name, each.about, each.labels, registry=None)
        elif each.kind == "histogram":
            series[each.name] = Histogram(
                prefix + each.name, each.about, each.labels, buckets=telemetry.BUCKETS, registry=None
            )
    collectors: list[Collector] = [*series.values(), _Gauges(prefix)]
    _register(registry, collectors)

    def hear(event: str, fields: dict[str, Any]) -> None:
        known = bound({"env": where, **fields})
        for each in telemetry.BY_EVENT.get(event, ()):
            found = series[each.name]
            labelled = found.labels(**each.labelled(known)) if each.labels else found
            if isinstance(labelled, Counter):
                labelled.inc(each.amount(known))
            else:
                labelled.observe(each.amount(known))

    stop_listening = telemetry.listen(hear)

    def stop() -> None:
        stop_listening()
        while collectors:  # once, however often it is called
            registry.unregister(collectors.pop())

    return stop


def _register(registry: CollectorRegistry, collectors: list[Collector]) -> None:
    """All of them, or none: what is there under a name of ours cannot be told twice."""
    done: list[Collector] = []
    try:
        for each in collectors:
            registry.register(each)
            done.append(each)
    except ValueError:
        for each in done:
            registry.unregister(each)
        raise


class _Gauges(Collector):
    """Read when somebody scrapes."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def describe(self) -> Iterator[Metric]:
        """So that a registry sees which names are taken."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        found = telemetry.readings()
        for each in telemetry.GAUGES:
            yield GaugeMetricFamily(self._prefix + each.name, each.about, value=each.reading(found))
