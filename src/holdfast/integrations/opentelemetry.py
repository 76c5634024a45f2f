"""Metrics and spans for OpenTelemetry:

    from holdfast.integrations.opentelemetry import instrument
    stop = instrument(env="production")

If only the API is installed, without an SDK, and no provider is given, there is no receiver: then ``instrument`` does
nothing and costs nothing. ``prefix="kfm."`` keeps dashboards that use that prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from holdfast import __version__, telemetry
from holdfast.extras import missing_extra

try:
    from opentelemetry import context, metrics, trace
    from opentelemetry.metrics import CallbackOptions, Observation
except ModuleNotFoundError as error:
    raise missing_extra(error, "otel") from None

_SCOPE = "holdfast"
_SPENT = ("cpu_seconds", "wall_seconds", "energy_joules", "carbon_grams")
_FAILED = ("failed", "interrupted", "locked", "refused")
_active: list[tuple[metrics.MeterProvider, str]] = []
"""Providers and prefixes in use: the same one twice would count everything twice."""


def instrument(
    *,
    prefix: str = "holdfast.",
    names: Mapping[str, str] | None = None,
    env: str | None = None,
    limit: int = 1000,
    meter_provider: metrics.MeterProvider | None = None,
    tracer_provider: trace.TracerProvider | None = None,
) -> Callable[[], None]:
    """Export metrics and spans of this process from now on. Returns a function that stops it.

    Raises ValueError if it was called already with this provider and prefix. ``names`` renames single metrics, without
    the prefix: ``{"slots_in_use": "app.tuners_in_use"}``. ``env``: the value of the label ``env``,
    by default $HOLDFAST_ENV. ``limit``: the number of kinds of operations that metrics distinguish; further ones are
    "(other)". Providers: by default the global ones.
    """
    environment, bound = telemetry.environment(env), telemetry.Bound(limit)
    if meter_provider is None and tracer_provider is None and find_spec("opentelemetry.sdk") is None:
        return lambda: None
    target = (meter_provider or metrics.get_meter_provider(), prefix)
    if target in _active:
        raise ValueError(
            f"instrument() was called already with this meter provider and prefix {prefix!r}: stop that first"
        )
    meter = metrics.get_meter(_SCOPE, __version__, meter_provider)
    exported = telemetry.exported_names(prefix, names)
    events = [metric for metric in telemetry.METRICS if metric.event]
    record = {metric.name: _recorder(meter, exported[metric.name], metric) for metric in events}
    for gauge in telemetry.GAUGES:
        callbacks = [_reader(gauge, lambda: target in _active)]
        meter.create_observable_gauge(exported[gauge.name], callbacks, unit=gauge.unit, description=gauge.about)
    spans = _Spans(trace.get_tracer(_SCOPE, __version__, tracer_provider), environment)

    def on_event(event: str, fields: dict[str, Any]) -> None:
        bounded = bound({"env": environment, **fields})
        if (handler := spans.handlers.get(event)) is not None:
            handler(fields)
        for metric in telemetry.BY_EVENT.get(event, ()):
            record[metric.name](metric.amount(bounded), metric.labelled(bounded))

    stop_listening = telemetry.listen(on_event)
    _active.append(target)

    def stop() -> None:
        stop_listening()
        if target in _active:
            _active.remove(target)

    return stop


class _Spans:
    """A span for each run of an operation. While the operation's function runs it is the current span in that thread or
    task, so that spans started there are its children."""

    def __init__(self, tracer: trace.Tracer, env: str) -> None:
        self._tracer, self._env = tracer, env
        self._open: dict[int, trace.Span] = {}
        self._current: dict[int, Any] = {}
        self.handlers = {
            "operation.started": self._start,
            "operation.begun": self._enter,
            "operation.left": self._leave,
            "operation.ended": self._end,
        }

    def _start(self, fields: dict[str, Any]) -> None:
        described = {name: fields[name] for name in ("key", *telemetry.OPERATION) if fields.get(name) is not None}
        attributes = {f"holdfast.{name}": value for name, value in described.items()}
        if self._env:
            attributes["holdfast.env"] = self._env
        self._open[fields["run"]] = self._tracer.start_span("holdfast.operation", attributes=attributes)

    def _enter(self, fields: dict[str, Any]) -> None:
        span = self._open.get(fields["run"])  # None: it started before instrument()
        if span is not None:
            span.set_attribute("holdfast.attempt", fields["attempt"])
            self._current[fields["run"]] = context.attach(trace.set_span_in_context(span))

    def _leave(self, fields: dict[str, Any]) -> None:
        token = self._current.pop(fields["run"], None)
        if token is not None:
            with suppress(ValueError):  # the token is of another context, where the span was never current
                token.var.reset(token)  # context.detach would log that as an error

    def _end(self, fields: dict[str, Any]) -> None:
        span = self._open.pop(fields["run"], None)
        if span is None:
            return
        outcome, error = fields["outcome"], fields["error"]
        replayed = outcome == "replayed"
        span.set_attributes({
            "holdfast.status": "success" if replayed else outcome, "holdfast.replayed": replayed,
            "holdfast.attempt": fields["attempt"],
        })  # fmt: skip
        if "energy_joules" in fields:
            spent = {f"holdfast.{name}": fields[name] for name in _SPENT}
            span.set_attributes({**spent, "holdfast.energy_is_estimate": True})
        if error is not None:
            span.record_exception(error)
        if outcome in _FAILED:
            span.set_status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")
        span.end()


def _recorder(meter: metrics.Meter, name: str, metric: telemetry.Metric) -> Callable[[float, dict[str, str]], None]:
    if metric.kind == "counter":
        return meter.create_counter(name, unit=metric.unit, description=metric.about).add
    return meter.create_histogram(
        name, unit=metric.unit, description=metric.about,
        explicit_bucket_boundaries_advisory=telemetry.BUCKETS,
    ).record  # fmt: skip


def _reader(
    metric: telemetry.Metric, is_active: Callable[[], bool]
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    """A gauge cannot be unregistered: after stop() it yields nothing."""

    def read(_: CallbackOptions) -> Iterable[Observation]:
        if is_active():
            for labels, value in metric.samples(telemetry.labelled_readings()):
                yield Observation(value, dict(zip(metric.labels, labels, strict=True)))

    return read
