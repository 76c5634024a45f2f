"""The dashboard in a real browser, on a real replica: what it shows, that it follows, and that names are only text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

import holdfast
from tests.browser import CONTRAST, MARKS, SPILLED, Visit, open_browser
from tests.conftest import fresh
from tests.gateway.example_data import HOSTILE, filled_database
from tests.gateway.replicas import Replica

pytestmark = MARKS
PARTS = ["problems", "glance", "leaders", "leases", "locks", "slots", "operations", "sandboxes", "agents"]


@pytest.fixture(scope="module")
def replica(folder: Path) -> Iterator[Replica]:
    with Replica(fresh(), folder, feature="from holdfast.dashboard import stream; stream.EVERY = 0.4") as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as made:
        yield made


@pytest.fixture
def visit(browser: Browser, replica: Replica) -> Iterator[Any]:
    """Opens pages; nothing went wrong in any of them, and nobody else was asked for anything."""
    visits: list[Visit] = []

    def open(**options: Any) -> Page:
        visits.append(Visit(browser, replica.address, **options))
        return visits[-1].page

    yield open
    for each in visits:
        each.page.close()
        assert each.wrong == []


FALLS = """(name) => {
  const row = [...document.querySelectorAll("#leases tr")].find((each) => each.textContent.includes(name));
  const [value, before] = [row.querySelector("progress").value, window.before];
  window.before = value;
  return value < before - 0.4;
}"""
"""Whatever the row is by then: a part that changes has new ones, and a heartbeat fills the bar again."""


def test_empty_it_says_what_to_do_and_follows_what_is_taken_and_given_back(replica: Replica, visit: Any) -> None:
    page = visit()
    expect(page.locator("#leaders")).to_contain_text("gateway:reconciler")
    expect(page.locator("#leaders .holder")).to_contain_text("replica:")
    expect(page.locator("#sandboxes .empty")).to_contain_text("POST /sandboxes")
    expect(page.locator("#agents .empty")).to_contain_text("POST /hook/session-start")
    expect(page.locator("#operations .empty")).to_contain_text("client.operation(key)")
    expect(page.locator("#slots")).to_contain_text("0 of 8 held")
    page.evaluate("window.same = true")
    with holdfast.Client(replica.url) as client:
        grant = client.lease("nightly-import", holder="worker-1", ttl=600).acquire()
        row = page.locator("#leases tr", has_text="nightly-import")
        expect(row).to_contain_text("worker-1")
        expect(row).to_contain_text(str(grant.fence))
        bar = row.locator("progress")
        assert bar.get_attribute("max") == "600.000"
        assert 400 < bar.evaluate("each => each.value") <= 600, "by the server's clock, whatever the browser's says"
        page.wait_for_function(FALLS, arg="nightly-import")
        grant.release()
        expect(row).to_have_count(0)
    assert page.evaluate("window.same"), "all without loading it anew"


def test_problems_come_first_and_are_told_to_those_who_hear_the_page(replica: Replica, visit: Any) -> None:
    with holdfast.Client(replica.url) as client:
        client.lease("left", ttl=60).acquire()
        client.leases.force_release("left", actor="jane", reason="a test")
        page = visit()
        problem = page.locator(".problems details", has_text="A lease was lost in the last 15 minutes")
        expect(problem.locator("summary")).to_contain_text("forcibly released by jane: a test")
        expect(problem.locator(".todo").first).to_be_hidden()
        problem.locator("summary").click()
        expect(problem.locator(".todo").first).to_contain_text("holdfast history")
        expect(page.locator("#announcement[aria-live=polite]")).to_contain_text("A lease was lost")
        expect(page).to_have_title(re.compile(r"\(\d+\) holdfast$"))  # with how many there are
    assert page.evaluate("[...document.querySelectorAll('thead th')].every(each => each.scope === 'col')")
    assert page.evaluate(
        "[...document.querySelectorAll('tbody tr')].every(each => each.querySelector('th[scope=row]'))"
    )
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(each => Number(each.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert page.locator("html").get_attribute("lang") == "en"


HEIGHT = """(name) => [...document.querySelectorAll("#leases tr")]
  .find((each) => each.textContent.includes(name)).getBoundingClientRect().height"""


COUNTS = (
    """(wanted) => document.querySelector("#operations .counts").innerText.split(/\\s+/).join(" ").trim() === wanted"""
)
LINES = """() => {
  const row = (part, name) =>
    [...document.querySelectorAll(`#${part} tr`)].find((each) => each.textContent.includes(name));
  const [lock, lease] = [row("locks", "(agent, 12)"), row("leases", "nightly-import")];
  if (!lock || !lease) return null;
  const where = lease.querySelector(".where");
  return [
    lock.querySelector(".name").getBoundingClientRect().height, where.getBoundingClientRect().height,
    where.getClientRects().length,
  ];
}"""
"""In one look: a part that changes has new rows, and one that was found before is no more in the page."""


def test_whatever_is_shown_is_text_readable_in_the_light_in_the_dark_and_on_a_phone(
    replica: Replica, visit: Any
) -> None:
    """Names and payloads that are markup, in everything that is shown, before the page is opened and while it is."""
    with ExitStack() as stack:
        dark = visit(color_scheme="dark")
        client = stack.enter_context(filled_database(replica.url, mark=HOSTILE))
        stack.enter_context(client.lease("x" * 200, ttl=86400, holder="y" * 200))
        phone = visit(viewport={"width": 390, "height": 800}, color_scheme="light")
        for page in (dark, phone):
            for part in ("problems", "leaders", "leases", "locks", "operations", "sandboxes", "agents"):
                expect(page.locator(f"#{part}")).to_contain_text(HOSTILE)
            expect(page.locator(".squares .held")).to_have_count(3)
            assert HOSTILE in (page.locator(".squares .held").first.get_attribute("title") or "")
            assert page.locator("main img, main script, main [onerror], main [style]").count() == 0
            assert page.evaluate(CONTRAST) == []
            assert page.evaluate(SPILLED) == []
            waits = page.locator("#locks tr", has_text="report")
            expect(waits).to_contain_text("waits")
            expect(waits).to_contain_text("behind")
        shown = {page: page.evaluate("getComputedStyle(document.body).backgroundColor") for page in (dark, phone)}
        assert len(set(shown.values())) == 2
        assert phone.evaluate("document.documentElement.scrollWidth") == 390
        expect(phone.locator("#leases tr", has_text="xxx")).to_contain_text(re.compile(r"23 h 5\d m left"))
        assert 0 < phone.evaluate(HEIGHT, "xxx") < 120, "whoever needs all of a name points at it"
        lefts = phone.evaluate("(parts) => parts.map((part) => document.getElementById(part).offsetLeft)", PARTS)
        assert len(set(lefts)) == 1, "one column"
        dark.wait_for_function(COUNTS, arg="partial 1 running 0 failure 1 undone 0 success 2")


def test_a_short_name_stays_on_one_line_beside_long_ones(replica: Replica, visit: Any) -> None:
    with holdfast.Client(replica.url) as client, ExitStack() as stack:
        stack.enter_context(client.lease("nightly-import", ttl=60))
        stack.enter_context(client.lock(("agent", 12)))
        stack.enter_context(client.lock("z" * 190))
        page = visit(viewport={"width": 1280, "height": 900})
        name, where, pieces = page.wait_for_function(LINES).json_value()
        assert 0 < name < 25
        assert 0 < where < 25
        assert pieces == 1, "host and pid are not torn apart"


def test_nothing_runs_that_is_not_ours(replica: Replica, browser: Browser) -> None:
    seen = Visit(browser, replica.address)
    seen.page.evaluate("""() => {
      window.refused = [];
      document.addEventListener("securitypolicyviolation", (event) => window.refused.push(event.effectiveDirective));
      const script = document.createElement("script");
      script.textContent = "window.ran = true";
      document.body.append(script);
      const image = document.createElement("img");
      image.src = "https://elsewhere.example/pixel.png";
      document.body.append(image);
      document.body.setAttribute("style", "color: red");
      document.body.insertAdjacentHTML("beforeend", "<b style='color: red' onclick='window.ran = true'>x</b>");
    }""")
    seen.page.wait_for_function("window.refused.length >= 4")
    refused = {each.partition("-")[0] for each in seen.page.evaluate("window.refused")}
    assert refused == {"script", "img", "style"}
    assert seen.page.evaluate("window.ran") is None
    seen.page.close()


def test_it_ends_with_its_replica_and_goes_on_with_the_next(replica: Replica, browser: Browser) -> None:
    """Who watches does not keep a replica from ending, and is told by the next one there, without a reload."""
    port = replica.address.rpartition(":")[2]
    with ExitStack() as stack:
        seen = Visit(browser, replica.address)
        stack.callback(seen.page.close)
        seen.page.evaluate("window.same = true")
        assert replica.end() == 0
        assert not replica.events("gateway.overdue")
        expect(seen.page.locator("#live")).to_contain_text("not live since")
        expect(seen.page.locator("body.gone")).to_have_count(1)
        replica.restart("--port", port)
        expect(seen.page.locator(".live.on")).to_have_text("live")
        expect(seen.page.locator("body.gone")).to_have_count(0)
        with holdfast.Client(replica.url) as client, client.lease("after-all"):
            expect(seen.page.locator("#leases")).to_contain_text("after-all")
        assert seen.page.evaluate("window.same")
