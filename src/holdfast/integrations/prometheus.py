"""Metrics for Prometheus, through prometheus_client:

    from holdfast.integrations.prometheus import export
    stop = export()                            # into the registry that prometheus_client.start_http_server serves

The name of a metric begins with ``holdfast_``, that of a counter ends with ``_total``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    registry: CollectorRegistry = REGISTRY,
    *,
    prefix: str = "holdfast_",
    names: Mapping[str, str] | None = None,
    env: str | None = None,
    limit: int = 1000,
) -> Callable[[], None]:
    """Export metrics of this process from now on. Returns a function that stops it and unregisters them.

    Raises ValueError if the registry has a metric with one of the names. ``names`` renames single metrics, without the
    prefix: ``{"slots_in_use": "app_tuners_in_use"}``. ``env``: the value of the label ``env``, by
    default $HOLDFAST_ENV. ``limit``: the number of kinds of operations that are distinguished; further ones are
    "(other)".
    """
    environment, bound = telemetry.environment(env), telemetry.Bound(limit)
    exported = telemetry.exported_names(prefix, names)
    series: dict[str, Counter | Histogram] = {}
    for metric in telemetry.METRICS:
        name = exported[metric.name]
        if metric.kind == "counter":
            series[metric.name] = Counter(name, metric.about, metric.labels, registry=None)
        elif metric.kind == "histogram":
            buckets = telemetry.BUCKETS
            series[metric.name] = Histogram(name, metric.about, metric.labels, buckets=buckets, registry=None)
    collectors: list[Collector] = [*series.values(), _Gauges(exported)]
    _register(registry, collectors)

    def on_event(event: str, fields: dict[str, Any]) -> None:
        bounded = bound({"env": environment, **fields})
        for metric in telemetry.BY_EVENT.get(event, ()):
            family = series[metric.name]
            labelled = family.labels(**metric.labelled(bounded)) if metric.labels else family
            if isinstance(labelled, Counter):
                labelled.inc(metric.amount(bounded))
            else:
                labelled.observe(metric.amount(bounded))

    stop_listening = telemetry.listen(on_event)

    def stop() -> None:
        stop_listening()
        while collectors:  # a second call does nothing
            registry.unregister(collectors.pop())

    return stop


def _register(registry: CollectorRegistry, collectors: list[Collector]) -> None:
    """Register all of them or, if a name is taken, none. Raises ValueError then."""
    registered: list[Collector] = []
    try:
        for collector in collectors:
            registry.register(collector)
            registered.append(collector)
    except ValueError:
        for collector in registered:
            registry.unregister(collector)
        raise


class _Gauges(Collector):
    """Gauges, read at each scrape."""

    def __init__(self, exported: Mapping[str, str]) -> None:
        self._exported = exported

    def describe(self) -> Iterator[Metric]:
        """Lets the registry check for names that are taken."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        readings = telemetry.labelled_readings()
        for gauge in telemetry.GAUGES:
            family = GaugeMetricFamily(self._exported[gauge.name], gauge.about, labels=gauge.labels)
            for labels, value in gauge.samples(readings):
                family.add_metric(labels, value)
            yield family
