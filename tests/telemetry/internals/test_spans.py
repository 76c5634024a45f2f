"""Spans around operations, with the real SDK."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import holdfast
from holdfast.integrations.opentelemetry import instrument
from holdfast.keys import as_key

KEY = holdfast.OperationKey(
    pipeline="etl", task="load", dataset="parcels", operation="upsert", version="3", checksum="c"
)


class Traced:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.mine = self.provider.get_tracer("mine")

    def ended(self) -> dict[str, list[ReadableSpan]]:
        found: dict[str, list[ReadableSpan]] = {}
        for each in self.exporter.get_finished_spans():
            found.setdefault(each.name, []).append(each)
        return found

    def work(self, name: str = "mine") -> int:
        with self.mine.start_as_current_span(name):
            return 1


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    stop = instrument(env="test", tracer_provider=made.provider)
    yield made
    stop()


def parents(children: list[ReadableSpan]) -> list[Any]:
    return [each.parent and each.parent.span_id for each in children]


def ids(spans: list[ReadableSpan]) -> list[Any]:
    return [each.context.span_id for each in spans if each.context]


def test_a_span_says_what_became_of_the_operation_and_has_what_is_inside_for_children(
    sqlite_url: str, traced: Traced
) -> None:
    with holdfast.Client(sqlite_url) as client, traced.mine.start_as_current_span("around"):
        client.operation(KEY, options=holdfast.OperationOptions(sovereign=True)).run(traced.work)
        client.operation(KEY, options=holdfast.OperationOptions(sovereign=True)).run(traced.work)
        assert trace.get_current_span().name == "around"  # type: ignore[attr-defined]
    found = traced.ended()
    first, second = found["holdfast.operation"]
    assert first.attributes == {
        "holdfast.key": KEY.digest, "holdfast.pipeline": "etl", "holdfast.task": "load",
        "holdfast.dataset_id": "parcels", "holdfast.operation_type": "upsert", "holdfast.env": "test",
        "holdfast.sovereignty_event": True, "holdfast.status": "success", "holdfast.replayed": False,
        "holdfast.attempt": 1,
    }  # fmt: skip
    assert second.attributes == {**first.attributes, "holdfast.replayed": True}
    assert parents(found["mine"]) == ids([first])
    assert parents([first, second]) == ids(found["around"]) * 2


def test_a_span_says_what_it_is_estimated_to_have_cost(sqlite_url: str, traced: Traced) -> None:
    with holdfast.Client(sqlite_url, energy=holdfast.lineage.Energy(watts=10, grams_per_kwh=360)) as client:
        client.operation("a").run(lambda: sum(range(10_000)))
    [span] = traced.ended()["holdfast.operation"]
    assert span.attributes is not None
    found: dict[str, Any] = dict(span.attributes)
    assert found["holdfast.cpu_seconds"] > 0
    assert found["holdfast.energy_joules"] == pytest.approx(10 * found["holdfast.cpu_seconds"], rel=1e-4)
    assert found["holdfast.carbon_grams"] == pytest.approx(found["holdfast.energy_joules"] / 10_000, rel=1e-4)
    assert found["holdfast.energy_is_estimate"] is True


def test_errors_are_recorded_and_every_attempt_is_inside_of_its_run(sqlite_url: str, traced: Traced) -> None:
    tries = iter([1, 2, 3])

    def fail(what: str = "") -> None:
        traced.work(what or f"try {next(tries)}")
        raise ArithmeticError("no")

    with holdfast.Client(sqlite_url) as client:
        with pytest.raises(ArithmeticError):
            client.operation("a", retry=holdfast.Retry(in_this_run=2)).run(fail)
        with pytest.raises(ArithmeticError), client.operation("b"):
            fail("block")
    found = traced.ended()
    run, block = found["holdfast.operation"]
    assert parents([found[f"try {number}"][0] for number in (1, 2, 3)]) == ids([run]) * 3
    assert parents(found["block"]) == ids([block])
    for span in (run, block):
        assert span.status.status_code is StatusCode.ERROR
        [event] = span.events
        assert event.name == "exception"
        assert event.attributes is not None
        assert event.attributes["exception.type"] == "ArithmeticError"
    assert run.attributes is not None
    assert run.attributes["holdfast.attempt"] == 3
    assert not trace.get_current_span().get_span_context().is_valid


def test_tasks_do_not_get_into_each_others_spans(sqlite_url: str, traced: Traced) -> None:
    inside: list[str] = []

    async def main() -> None:
        both = asyncio.Barrier(2)
        async with holdfast.AsyncClient(sqlite_url) as client:

            async def work(name: str) -> None:
                await both.wait()
                traced.work(name)
                inside.append(name)
                await both.wait()

            await asyncio.gather(*(client.operation(name).run(work, name) for name in ("a", "b")))

    asyncio.run(main())
    found = traced.ended()
    by_key = {each.attributes["holdfast.key"]: each for each in found["holdfast.operation"] if each.attributes}
    assert len(by_key) == len(inside) == 2
    for name in inside:
        assert parents(found[name]) == ids([by_key[as_key(name).digest]])


def test_a_block_that_another_context_or_task_leaves_ends_its_span_and_its_operation(
    sqlite_url: str, traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    with holdfast.Client(sqlite_url) as client:

        def steps() -> Iterator[None]:
            with client.operation("a") as op:
                yield
                op.result = 1

        made = steps()
        contextvars.copy_context().run(next, made)
        assert next(made, "over") == "over"
        assert client.operation("a").run(int).replayed

    async def main() -> None:
        async with holdfast.AsyncClient(sqlite_url) as client:

            async def fixture() -> AsyncIterator[None]:
                async with client.operation("b") as op:
                    yield
                    op.result = 1

            made = fixture()
            await anext(made)
            assert await asyncio.create_task(anext(made, "over")) == "over"
            assert (await client.operation("b").run(int)).replayed

    asyncio.run(main())
    assert len(traced.ended()["holdfast.operation"]) == 4
    assert not [each for each in caplog.records if each.name.startswith(("opentelemetry", "asyncio"))]


def test_each_of_a_batch_has_its_own(sqlite_url: str, traced: Traced) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.operations.run_many(["a", "b"], traced.work)
    found = traced.ended()
    assert parents(found["a"] + found["b"]) == ids(found["holdfast.operation"])
