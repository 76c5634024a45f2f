"""Metrics and spans for OpenTelemetry:

    from holdfast.integrations.opentelemetry import instrument
    stop = instrument(env="production")

With the API alone, and no SDK and no provider given, nobody would receive anything: then nothing is listened to, and
nothing is paid. ``prefix="kfm."`` keeps dashboards that know these metrics under that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
"""Whom this process tells, and under which prefix: told twice, everything would count twice."""


def instrument(
    *,
    prefix: str = "holdfast.",
    env: str | None = None,
    most: int = 1000,
    meter_provider: metrics.MeterProvider | None = None,
    tracer_provider: trace.TracerProvider | None = None,
) -> Callable[[], None]:
    """Export what this process does from now on; call what comes back to end it. ValueError when it is done already.

    ``env``: what the label of that name says wherever a metric has it; unless given, $HOLDFAST_ENV. ``most``: kinds of
    operations that metrics tell apart; those beyond are "(other)". Providers: the global ones, unless given."""
    where, bound = telemetry.environment(env), telemetry.Bound(most)
    if meter_provider is None and tracer_provider is None and find_spec("opentelemetry.sdk") is None:
        return lambda: None
    this = (meter_provider or metrics.get_meter_provider(), prefix)
    if this in _active:
        raise ValueError(
            f"instrument() was called already with this meter provider and prefix {prefix!r}: stop that first"
        )
    meter = metrics.get_meter(_SCOPE, __version__, meter_provider)
    record = {each.name: _recorder(meter, prefix, each) for each in telemetry.METRICS if each.event}
    for each in telemetry.GAUGES:
        reads = [_reader(each, lambda: this in _active)]
        meter.create_observable_gauge(prefix + each.name, reads, unit=each.unit, description=each.about)
    spans = _Spans(trace.get_tracer(_SCOPE, __version__, tracer_provider), where)

    def hear(event: str, fields: dict[str, Any]) -> None:
        known = bound({"env": where, **fields})
        if (follow := spans.follow.get(event)) is not None:
            follow(fields)
        for each in telemetry.BY_EVENT.get(event, ()):
            record[each.name](each.amount(known), each.labelled(known))

    stop_listening = telemetry.listen(hear)
    _active.append(this)

    def stop() -> None:
        stop_listening()
        if this in _active:
            _active.remove(this)

    return stop


class _Spans:
    """A span for each run of an operation; while its function is called it is the current one, in that very thread or
    task, so that whatever spans are begun in there are its children."""

    def __init__(self, tracer: trace.Tracer, env: str) -> None:
        self._tracer, self._env = tracer, env
        self._open: dict[int, trace.Span] = {}
        self._current: dict[int, Any] = {}
        self.follow = {
            "operation.started": self._start,
            "operation.begun": self._enter,
            "operation.left": self._leave,
            "operation.ended": self._end,
        }

    def _start(self, fields: dict[str, Any]) -> None:
        about = {name: fields[name] for name in ("key", *telemetry.OPERATION) if fields.get(name) is not None}
        attributes = {f"holdfast.{name}": value for name, value in about.items()}
        if self._env:
            attributes["holdfast.env"] = self._env
        self._open[fields["run"]] = self._tracer.start_span("holdfast.operation", attributes=attributes)

    def _enter(self, fields: dict[str, Any]) -> None:
        span = self._open.get(fields["run"])  # None: it was begun before anybody listened
        if span is not None:
            span.set_attribute("holdfast.attempt", fields["attempt"])
            self._current[fields["run"]] = context.attach(trace.set_span_in_context(span))

    def _leave(self, fields: dict[str, Any]) -> None:
        token = self._current.pop(fields["run"], None)
        if token is not None:
            with suppress(
                ValueError
            ):  # left in another context than it was entered in, where it never was the current one
                token.var.reset(token)  # as context.detach does, which would log that as an error

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


def _recorder(meter: metrics.Meter, prefix: str, metric: telemetry.Metric) -> Callable[[float, dict[str, str]], None]:
    if metric.kind == "counter":
        return meter.create_counter(prefix + metric.name, unit=metric.unit, description=metric.about).add
    return meter.create_histogram(
        prefix + metric.name, unit=metric.unit, description=metric.about,
        explicit_bucket_boundaries_advisory=telemetry.BUCKETS,
    ).record  # fmt: skip


def _reader(metric: telemetry.Metric, heard: Callable[[], bool]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    """A gauge cannot be taken back, so it falls silent."""

    def read(_: CallbackOptions) -> Iterable[Observation]:
        value = metric.reading(telemetry.readings())
        if heard() and value is not None:
            yield Observation(value)

    return read
