"""What an execution cost: the user's function and nothing else, in every way to run one; an estimate, and never in the
way of the operation itself."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import holdfast
import holdfast.telemetry
from holdfast.integrations.codecarbon import CodeCarbon
from holdfast.lineage import Energy, Estimate
from holdfast.lineage.prov import document
from holdfast.operations import energy_clock
from holdfast.runtime import concurrency_async
from tests.operations.policies import connected

BUSY = 0.02
METER = Energy(watts=20, grams_per_kwh=500, idle_watts=2)


class Clocks(threading.local):
    """One of the processor for each thread, and one on the wall for all. Nothing but ``burn`` moves them."""

    cpu = 0.0
    wall: ClassVar = [0.0]


clocks = Clocks()


@pytest.fixture(autouse=True)
def _clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (energy_clock, concurrency_async):
        monkeypatch.setattr(module, "thread_time", lambda: clocks.cpu)
    monkeypatch.setattr(energy_clock, "perf_counter", lambda: clocks.wall[0])


def burn() -> str:
    clocks.cpu += BUSY
    clocks.wall[0] += BUSY
    return "burnt"


def burn_beside() -> str:
    """Another thread burns meanwhile."""
    beside = threading.Thread(target=burn)
    beside.start()
    beside.join()
    return burn()


def ends(client: holdfast.Client) -> list[holdfast.lineage.Event]:
    return [each for each in client.relays.events() if each.type in ("COMPLETE", "FAIL")]


def logged(client: holdfast.Client, key: str) -> dict[str, Any]:
    [entry] = [each for each in client.operations.history(key) if each.kind in ("success", "failure")]
    found: dict[str, Any] = json.loads(entry.detail)
    return found


def judge(cost: Any, method: str = "cpu_time:thread", wall: float = BUSY) -> None:
    assert (cost["cpu_seconds"], cost["wall_seconds"]) == (pytest.approx(BUSY), pytest.approx(wall))
    joules = 20 * cost["cpu_seconds"] + 2 * cost["wall_seconds"]
    assert cost["energy_joules"] == pytest.approx(joules, rel=1e-4)
    assert cost["carbon_grams"] == pytest.approx(joules / 3_600_000 * 500, rel=1e-4)
    assert (cost["estimate"], cost["method"]) == (True, method)
    assert cost["parameters"] == {"watts": 20, "grams_per_kwh": 500, "idle_watts": 2}


def test_the_function_alone_is_counted_in_every_way_to_run_it(sqlite_url: str) -> None:
    def fail() -> None:
        burn_beside()
        raise ValueError("broken")

    def slow() -> bool:
        burn()
        return True

    with holdfast.Client(sqlite_url, energy=METER) as client, connected(sqlite_url) as mine:
        client.operation("outside", checks=holdfast.Checks(before=[slow], after=[slow])).run(burn_beside)
        client.operation("own", tx=mine).run(burn_beside)
        mine.execute("begin")
        client.operation("joined", tx=mine).run(burn_beside)
        mine.execute("commit")
        with client.operation("block") as op:
            op.result = burn_beside()
        client.operations.run_many(["batch"], lambda _: burn_beside())
        with pytest.raises(ValueError, match="broken"):
            client.operation("failed").run(fail)
        told = ends(client)
        assert [each.label for each in told] == ["outside", "own", "joined", "block", "batch", "failed"]
        for each in told:
            judge(each.energy, wall=2 * BUSY)
            assert logged(client, each.label)["energy"] == each.energy
            activity = next(node for node in document([each])["@graph"] if node["@type"] == "prov:Activity")
            assert each.energy is not None
            assert activity["holdfast:estimatedCarbonGrams"] == each.energy["carbon_grams"]
        assert client.operations.verify().passed
        assert client.operation("outside").run(burn).replayed
        assert len(ends(client)) == len(told), "what is replayed costs nothing"


async def test_of_tasks_on_one_loop_each_pays_for_its_own_steps(sqlite_url: str) -> None:
    waits, others, begun = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def busy() -> None:
        await waits.wait()
        for _ in range(3):
            burn()
            await asyncio.sleep(0)
        others.set()

    async def idle() -> str:
        waits.set()
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0.001)
        except TimeoutError:
            await others.wait()
        return "waited"

    async def cancelled() -> None:
        begun.set()
        await asyncio.Event().wait()

    async with holdfast.AsyncClient(sqlite_url, energy=METER) as client:
        outcomes = await asyncio.gather(client.operation("idle").run(idle), client.operation("busy").run(busy))
        assert [each.result for each in outcomes] == ["waited", None]
        async with client.operation("block"):
            await asyncio.to_thread(int)
            burn()
        found: dict[str, Any] = {
            each.label: each.energy async for each in client.relays.events() if each.type == "COMPLETE"
        }
        task = asyncio.create_task(client.operation("cancelled").run(cancelled))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert found["busy"]["cpu_seconds"] == pytest.approx(3 * BUSY)
    assert (found["idle"]["cpu_seconds"], found["idle"]["wall_seconds"]) == (0, pytest.approx(3 * BUSY))
    assert [found[name]["method"] for name in ("busy", "block")] == ["cpu_time:task", "cpu_time:loop"]
    judge(found["block"], "cpu_time:loop")


def test_whoever_listens_is_told_what_all_attempts_of_a_run_cost(sqlite_url: str) -> None:
    tried: list[int] = []
    heard: list[dict[str, Any]] = []

    def flaky() -> None:
        burn()
        tried.append(1)
        if len(tried) == 1:
            raise ValueError("broken")

    stop = holdfast.telemetry.listen(lambda event, fields: heard.append({"event": event, **fields}))
    try:
        with holdfast.Client(sqlite_url, energy=METER) as client:
            client.operation("a", retry=holdfast.Retry(in_this_run=1)).run(flaky)
            with client.operation("b"):
                burn()
            client.operations.run_many(["c"], lambda _: burn())
            costs = {label: [each.energy for each in ends(client) if each.label == label] for label in "abc"}
        with holdfast.Client(sqlite_url) as client:
            client.operation("d").run(burn)
    finally:
        stop()
    told = [each for each in heard if each["event"] == "operation.ended"]
    assert [len(costs[label]) for label in "abc"] == [2, 1, 1]
    for label, fields in zip("abc", told, strict=False):
        for name in ("cpu_seconds", "wall_seconds", "energy_joules", "carbon_grams"):
            assert fields[name] == pytest.approx(sum(cost[name] for cost in costs[label] if cost))
    assert "energy_joules" not in told[3]


def test_nothing_is_measured_unless_somebody_asks(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.operation("a").run(int)
        assert (logged(client, "a"), ends(client)[0].energy) == ({}, None)
        assert "energy" not in ends(client)[0].as_dict()


def meter(begin: Any = None, end: Any = None) -> Any:
    return SimpleNamespace(begin=begin or (lambda: end))


@pytest.mark.parametrize(
    "broken",
    [
        meter(begin=lambda: 1 / 0), meter(end=lambda *_: 1 / 0), meter(end=lambda *_: 7),
        meter(end=lambda *_: Estimate(float("nan"), 0.0, "x", {})), meter(end=lambda *_: Estimate(-1.0, 0.0, "x", {})),
        meter(end=lambda *_: Estimate(1.0, 0.0, "x", {"y": object()})),
    ],
)  # fmt: skip
def test_a_meter_that_fails_is_no_trouble_of_the_operation(
    sqlite_url: str, broken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with holdfast.Client(sqlite_url, energy=broken) as client:
        assert client.operation("a").run(lambda: 7).result == 7
        assert ends(client)[0].energy is None
    assert "the energy of <operation 'a' attempt 1> is not measured" in caplog.text


def test_a_block_that_another_thread_leaves_is_not_given_that_ones_time(
    sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with holdfast.Client(sqlite_url, energy=Energy(watts=1, grams_per_kwh=1)) as client, ExitStack() as stack:
        entered: list[Any] = []
        other = threading.Thread(target=lambda: entered.append(stack.enter_context(client.operation("a"))))
        other.start()
        other.join()
        burn()  # so that this thread's clock is ahead of that one's
        stack.pop_all().close()
        assert entered[0]._energy is None
        assert client.operation("a").run(int).replayed
    assert [vars(each)["event"] for each in caplog.records] == ["operation.unmetered"]


def test_bad_input_is_refused_at_once(sqlite_url: str) -> None:
    for wrong in ({"watts": -1}, {"watts": float("nan")}, {"grams_per_kwh": 1e9}, {"idle_watts": float("inf")}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be from 0 to 1000000"):
            Energy(**{"watts": 1, "grams_per_kwh": 1, **wrong})
    for value in ("20", True, None):
        with pytest.raises(TypeError, match="watts must be a number"):
            Energy(watts=value, grams_per_kwh=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"energy must be a holdfast\.lineage\.Energy"):
        holdfast.Client(sqlite_url, energy=20)  # type: ignore[arg-type]


class Tracker:
    """As an EmissionsTracker: one task at a time, and it keeps them all."""

    def __init__(self) -> None:
        self._tasks: dict[str, int] = {}
        self.started: list[str] = []

    def start_task(self, name: str) -> None:
        assert len(self._tasks) == 0, "a task is already under measure"
        self._tasks[name] = 1
        self.started.append(name)

    def stop_task(self, name: str) -> Any:
        assert name in self._tasks
        return SimpleNamespace(energy_consumed=2e-6, emissions=8e-7, country_iso_code="AUT", codecarbon_version="3")


def test_codecarbon_measures_one_at_a_time_and_keeps_nothing(sqlite_url: str) -> None:
    tracker = Tracker()
    with holdfast.Client(sqlite_url, energy=CodeCarbon(tracker)) as client:
        client.operation("outer").run(lambda: client.operation("inner").run(burn).result)
        inner, outer = ends(client)
        assert (inner.label, inner.energy, len(tracker.started), tracker._tasks) == ("inner", None, 2, {})
        assert outer.energy is not None
        assert outer.energy["cpu_seconds"] >= BUSY
        told = {name: outer.energy[name] for name in ("energy_joules", "carbon_grams", "method", "parameters")}
        assert told == {
            "energy_joules": 7.2, "carbon_grams": 0.0008, "method": "codecarbon",
            "parameters": {"codecarbon_version": "3", "country_iso_code": "AUT"},
        }  # fmt: skip
    with pytest.raises(TypeError, match="tracker must have a method start_task"):
        CodeCarbon("AUT")


def test_codecarbon_itself(sqlite_url: str) -> None:
    codecarbon = pytest.importorskip("codecarbon", reason="codecarbon is not installed: pip install codecarbon")
    tracker = codecarbon.OfflineEmissionsTracker(country_iso_code="AUT", output_methods=[], log_level="error")
    with holdfast.Client(sqlite_url, energy=CodeCarbon(tracker)) as client:
        for number in range(2):
            client.operation(str(number)).run(burn)
        costs = [each.energy for each in ends(client)]
    assert tracker._tasks == {}
    for cost in costs:
        assert cost is not None
        assert (cost["energy_joules"] > 0, cost["carbon_grams"] > 0, cost["method"]) == (True, True, "codecarbon")
        assert cost["parameters"]["country_iso_code"] == "AUT"
        intensity = cost["carbon_grams"] / cost["energy_joules"] * 3_600_000
        assert 10 < intensity < 1500, "grams a kWh, of any grid there is"
