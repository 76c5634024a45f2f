"""Metrics for OpenTelemetry:

    from holdfast.integrations.opentelemetry import instrument
    stop = instrument(env="production")

With the API alone, and no SDK and no provider given, nobody would receive anything: then nothing is listened to, and
nothing is paid. ``prefix="kfm."`` keeps dashboards that know these metrics under that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from holdfast import __version__, telemetry

_SCOPE = "holdfast"


def instrument(
    *, prefix: str = "holdfast.", env: str | None = None, meter_provider: metrics.MeterProvider | None = None
) -> Callable[[], None]:
    """Export what this process does from now on; call what comes back to end it.

    ``env``: what the label of that name says wherever a metric has it; unless given, $HOLDFAST_ENV."""
    where = telemetry.environment(env)
    if meter_provider is None and find_spec("opentelemetry.sdk") is None:
        return lambda: None
    meter = metrics.get_meter(_SCOPE, __version__, meter_provider)
    record = {each.name: _recorder(meter, prefix, each) for each in telemetry.METRICS if each.event}
    for each in telemetry.GAUGES:
        meter.create_observable_gauge(prefix + each.name, [_reader(each.name)], unit=each.unit, description=each.about)

    def hear(event: str, fields: dict[str, Any]) -> None:
        known = {"env": where, **fields}
        for each in telemetry.BY_EVENT.get(event, ()):
            record[each.name](each.amount(known), each.labelled(known))

    return telemetry.listen(hear)


def _recorder(meter: metrics.Meter, prefix: str, metric: telemetry.Metric) -> Callable[[float, dict[str, str]], None]:
    if metric.kind == "counter":
        return meter.create_counter(prefix + metric.name, unit=metric.unit, description=metric.about).add
    return meter.create_histogram(
        prefix + metric.name, unit=metric.unit, description=metric.about,
        explicit_bucket_boundaries_advisory=telemetry.BUCKETS,
    ).record  # fmt: skip


def _reader(name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def read(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(telemetry.readings().get(name, 0.0))

    return read
