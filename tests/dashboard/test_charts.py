"""Charts: what the database counts, on both engines; bars, scale and table, by pure functions; and in a browser."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from starlette.applications import Starlette

import holdfast
from holdfast.dashboard.activity import charts_page
from holdfast.dashboard.charts import HEIGHT, ChartSeries, ChartSpan, WaitSamples, build_chart
from holdfast.dashboard.source import PageSource
from holdfast.dashboard.timeline import DAY, WIDTH
from tests.browser import CONTRAST, MARKS, Visit, open_browser
from tests.children import PATIENCE, eventually, query
from tests.conftest import fresh
from tests.dashboard.mounted import served

NOW = 1_800_000_000.0
SPAN = ChartSpan(NOW, 60.0, 60)
DAYS = (DAY, 2)
"""One bucket is the day, so that no test is at its end: the other one is the day before."""


def chart(*series: ChartSeries, **more: Any) -> Any:
    return build_chart("Losses", series, SPAN, empty="None.", note="", **more)


def test_bars_are_stacked_below_the_top_of_the_scale() -> None:
    panel = chart(
        ChartSeries("expired", "bad", {0: 2.0, 59: 4.0, 60: 99.0, -1: 99.0}), ChartSeries("forced", "poor", {59: 3.0})
    )
    first, lower, upper = panel["bars"]
    assert (first["tone"], lower["tone"], upper["tone"]) == ("bad", "bad", "poor")
    assert panel["scale"] == ["10", "5", "0"]
    assert lower["y"] == HEIGHT * 0.6
    assert upper["y"] == HEIGHT * 0.3
    assert all(bar["x"] >= 0 and bar["x"] + bar["width"] <= WIDTH for bar in panel["bars"])
    assert upper["title"] == f"{datetime.fromtimestamp(NOW + 59 * 60, UTC):%H:%M} UTC: 3 forced"
    assert [key["total"] for key in panel["keys"]] == ["6", "3"]
    assert panel["rows"] == [(NOW, ["2", "0"]), (NOW + 59 * 60, ["4", "3"])]
    assert panel["summary"].startswith("Losses: 6 expired, 3 forced; the most, 7, at ")
    assert panel["empty"] == ""


def test_a_chart_without_values_says_so() -> None:
    panel = chart(ChartSeries("expired", "bad", {}))
    assert (panel["bars"], panel["rows"], panel["summary"], panel["empty"]) == ([], [], "", "None.")


@pytest.mark.parametrize(
    ("value", "scale"),
    [
        (0.2, ["2.0 s", "1.0 s", "0 s"]),
        (7.0, ["10 s", "5.0 s", "0 s"]),
        (150.0, ["3 m 20 s", "1 m 40 s", "0 s"]),
        (3.1, ["4.0 s", "2.0 s", "0 s"]),
    ],
)
def test_a_scale_of_seconds_is_readable_and_its_total_is_the_most(value: float, scale: list[str]) -> None:
    panel = chart(ChartSeries("the latest", "moving", {3: value, 4: value / 2}), unit="seconds", total="most")
    assert panel["scale"] == scale
    assert len(panel["bars"]) == 2
    assert panel["keys"][0]["total"] in (f"{value:.1f} s", "2 m 30 s")


def test_what_is_not_complete_says_since_when_it_is() -> None:
    assert chart(complete=NOW - 1)["since"] is None
    assert chart(complete=NOW + 1)["since"] == NOW + 1


def waits(name: str, waiting: int, kind: str = "plain") -> Any:
    return SimpleNamespace(name=name, label=name, waiting=waiting, kind=kind)


def test_the_most_waits_of_a_bucket_are_kept_for_a_day() -> None:
    samples = WaitSamples()
    assert samples.since is None
    samples.add(NOW, [waits("a", 1)], [])
    samples.add(NOW + 1, [waits("a", 2), waits("b", 1)], [waits("l", 2), waits("l", 2)])
    samples.add(NOW + 2, [], [])
    samples.add(NOW + 12, [waits("a", 1)], [waits("l", 1)])
    samples.add(NOW + 70, [waits("leader", 3, "elector"), waits("relay", 3, "relay")], [])
    samples.add(NOW + 130, [waits("@slot:p:1", 4, "slot"), waits("@slot:p:2", 4, "slot")], [])
    leases, locks = samples.series(SPAN)
    assert leases.values == {0: 3, 2: 4}, "a standby does not count, and those who want any slot count once"
    assert locks.values == {0: 2, 2: 0}
    for second in range(0, 20 * int(DAY), 20):
        samples.add(NOW + 200 + second, [], [])
    assert samples.since is not None
    assert len(samples._samples) == DAY / 10
    assert all(not each.values for each in samples.series(SPAN))


# What the database counts


def test_acquisitions_losses_outcomes_and_lateness_are_counted(either: str) -> None:
    with holdfast.Client(either) as client:
        client.lease("held", ttl=600).acquire()
        client.lease("released", ttl=600).acquire().release()
        client.lease("taken", ttl=600).acquire()
        client.leases.force_release("taken", actor="jane", reason="a test")
        client.lease("lost", ttl=0.1, auto_renew=False).acquire()
        eventually(lambda: client.lease("lost", ttl=600).try_acquire(), "it has expired")
        assert counted(client._activity("lease", *DAYS)) == {"acquired": 5, "forced": 1, "expired": 1}
        [start] = [row["value"] for row in client._activity("lease", *DAYS) if row["kind"] == "start"]
        assert time.time() - 2 * DAY <= start <= time.time() - DAY
        assert kinds(client._activity("lease", *DAYS)) == {"start"}, "all of the history is here"


def test_operations_are_counted_by_their_status_among_the_latest(either: str) -> None:
    with holdfast.Client(either) as client:
        for number in range(3):
            client.operation(f"load {number}").run(lambda: 7)
        with pytest.raises(RuntimeError):
            client.operation("fails").run(_fail)
        every = client._activity("operation", *DAYS, max_rows=100)
        assert (counted(every), kinds(every)) == ({"success": 3, "failure": 1}, {"start"})
        some = client._activity("operation", *DAYS, max_rows=2)
        assert (sum(counted(some).values()), kinds(some)) == (2, {"start", "complete"})


def test_the_latest_start_of_a_slot_is_its_lateness(either: str) -> None:
    with holdfast.Client(either) as client:
        schedule = client.schedule("backup", 3600)
        schedule.run_due(_work)
        client.schedules.run_now("backup", actor="jane", reason="a test")
        schedule.run_due(_work)
        rows = client._activity("schedule", *DAYS)
        lateness = [run.lateness for run in client.schedules.runs("backup") if run.lateness is not None]
        assert counted(rows) == {"late": pytest.approx(max(lateness), abs=0.001)}


def counted(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By kind."""
    sums: dict[str, float] = {}
    for row in rows:
        if row["bucket"] is not None:
            assert row["bucket"] in (0, 1)
            sums[row["kind"]] = sums.get(row["kind"], 0) + row["value"]
    return sums


def kinds(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    return {row["kind"] for row in rows if row["bucket"] is None}


def _fail() -> None:
    raise RuntimeError("a test")


def _work(slot: Any) -> None:
    pass


def test_a_trimmed_history_says_since_when_it_is_complete(either: str) -> None:
    with holdfast.Client(either) as client:
        for number in range(3):
            client.lease(f"l-{number}", ttl=600).acquire().release()
        table = "holdfast_history" if either.startswith("sqlite") else "holdfast.history"
        query(either, f"delete from {table} where name = 'l-0'")
        [complete] = [row["value"] for row in client._activity("lease", *DAYS) if row["kind"] == "complete"]
        assert complete == pytest.approx(client.leases.history("l-1")[0].ended_at.timestamp(), abs=0.001)


def test_a_role_that_may_not_count_sees_charts_without_values() -> None:
    def refuse(of: str, *shape: Any, **bounds: int) -> Any:
        raise holdfast.Refused("no", "42501")

    nothing = SimpleNamespace(list=list)
    client = SimpleNamespace(_activity=refuse, leases=nothing, locks=nothing)
    view = asyncio.run(charts_page(PageSource(client), {"window": "odd"}))
    assert view.panels["losses"]["empty"] == "No lease was lost."


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as made:
        yield made


@pytest.fixture(scope="module")
def database() -> str:
    return fresh()


@pytest.fixture(scope="module")
def client(database: str) -> Iterator[holdfast.Client]:
    with holdfast.Client(database) as made:
        yield made


@pytest.fixture(scope="module")
def address(client: holdfast.Client) -> Iterator[str]:
    app = Starlette()
    app.mount("/holdfast", holdfast.dashboard(client))
    with served(app) as served_at:
        yield f"{served_at}/holdfast"


@MARKS[0]
@MARKS[1]
def test_charts_follow_what_happens_and_keep_their_tables_open(
    address: str, client: holdfast.Client, browser: Browser
) -> None:
    for taken, width, scheme in ((1, 1280, "light"), (3, 390, "dark")):
        seen = Visit(browser, address, "/charts", viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = seen.page
        losses = page.locator("#losses")
        if width == 1280:
            expect(losses).to_contain_text("No lease was lost.")
        client.lease("taken", ttl=600).acquire()
        client.leases.force_release("taken", actor="jane", reason="a test")
        expect(losses.locator("svg rect.mark.poor")).not_to_have_count(0)
        expect(losses.locator("svg")).to_have_attribute(
            "aria-label", re.compile("^Losses of leases: .* forced; the most")
        )
        table = page.locator("#acquisitions details")
        table.locator("summary").focus()
        page.keyboard.press("Enter")
        expect(table.locator("tbody tr").first).to_be_visible()
        acquired = page.locator("#acquisitions .keys b")
        expect(acquired).to_have_text(str(taken))
        client.lease("another", ttl=600).acquire().release()
        expect(acquired).to_have_text(str(taken + 1))
        expect(table.locator("tbody tr").first).to_be_visible()
        expect(table.locator("summary")).to_be_focused()
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.get_by_role("link", name="last day").click()
        expect(page).to_have_url(re.compile("window=day$"))
        expect(page.locator("#acquisitions .keys b")).to_have_text(str(taken + 1))
        page.close()
        assert seen.wrong == []


@MARKS[0]
@MARKS[1]
def test_who_waits_is_on_a_chart_and_charts_are_readable_without_scripts(
    address: str, client: holdfast.Client, database: str, browser: Browser
) -> None:
    page = browser.new_page(java_script_enabled=False)
    with holdfast.Client(database) as other:
        grant = client.lock("busy").acquire()
        waiter = threading.Thread(target=lambda: other.lock("busy", timeout=PATIENCE).acquire().release())
        waiter.start()
        eventually(lambda: any(not lock.granted for lock in client.locks.list()), "it waits")
        waits = page.locator("#waits")

        def is_sampled() -> bool:
            page.goto(f"{address}/charts")
            return waits.locator("rect.mark.poor").count() == 1

        eventually(is_sampled, "the next sample has it")
        grant.release()
        waiter.join()
    expect(waits).to_contain_text("Complete since")
    waits.locator("summary").click()
    expect(waits.locator("tbody td").last).to_have_text("1")
    page.close()
