"""The dashboard of any client, mounted in an application, in a real browser: pages, actions, filters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from fastapi import FastAPI
from playwright.sync_api import Browser, Page, expect
from starlette.applications import Starlette

import holdfast
from holdfast.dashboard.formats import link
from tests.browser import CONTRAST, MARKS, SPILLED, Visit, open_browser, serious_violations
from tests.children import PATIENCE, Child, eventually
from tests.cli.command import call
from tests.conftest import fresh
from tests.dashboard.mounted import served
from tests.gateway.example_data import HOSTILE, filled_database

pytestmark = MARKS
LISTS = ("/leases", "/locks", "/operations", "/schedules", "/history", "/audit", "/reviews", "/objects?type=@sandbox")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as made:
        yield made


@pytest.fixture(scope="module")
def url() -> str:
    return fresh()


@pytest.fixture(scope="module")
def database(url: str) -> Iterator[holdfast.Client]:
    """Filled with hostile names, and with a schedule that has run."""
    with filled_database(url, mark=HOSTILE) as client:
        for attempt in range(3):
            grant = client.lease(f"nightly{HOSTILE}", holder=f"worker-{attempt}{HOSTILE}", ttl=600).acquire()
            if attempt == 1:
                client.leases.force_release(f"nightly{HOSTILE}", actor=f"jane{HOSTILE}", reason=f"gone{HOSTILE}")
            else:
                grant.release()
        client.schedule(f"backup{HOSTILE}", 3600).run_due(_work)
        yield client


def _operator(request: Any) -> str | None:
    return unquote(request.cookies.get("operator", "")) or None


def _work(slot: Any) -> None:
    pass


@pytest.fixture(scope="module")
def address(url: str, database: holdfast.Client) -> Iterator[str]:
    """Where the dashboard is mounted: with an operator if the cookie names one. Its pages follow within a moment."""
    with pytest.MonkeyPatch.context() as patch, holdfast.Client(url) as client:
        patch.setattr("holdfast.dashboard.stream.EVERY", 0.4)
        app = Starlette()
        app.mount("/holdfast", holdfast.dashboard(client, operator=_operator))
        with served(app) as served_at:
            yield f"{served_at}/holdfast"


@pytest.fixture
def visit(browser: Browser, address: str) -> Iterator[Any]:
    visits: list[Visit] = []

    def open(path: str = "/", *, operator: str | None = None, **options: Any) -> Page:
        seen = Visit(browser, address, path, operator=operator, **options)
        visits.append(seen)
        return seen.page

    yield open
    for each in visits:
        each.page.close()
        assert each.wrong == []


def _pages(database: holdfast.Client) -> list[str]:
    partial = database.operations.list(status="partial")[0].key
    return [
        "/", "/?window=day", *LISTS, "/charts", "/charts?window=day",
        link("/lease", name=f"nightly{HOSTILE}"), link("/lease", name=f"invoices{HOSTILE}"),
        link("/lock", name=f"report{HOSTILE}"), link("/operation", key=partial),
        link("/schedule", name=f"backup{HOSTILE}"), link("/pool", name="default"),
        *(link("/explain", name=f"{name}{HOSTILE}") for name in ("nightly", "report", "publish map", "backup")),
        link("/act/lease.release", name=f"invoices{HOSTILE}"), link("/entry", id="1"),
    ]  # fmt: skip


def test_hostile_values_are_text_on_every_page_in_light_and_dark_wide_and_narrow(
    address: str, database: holdfast.Client, browser: Browser
) -> None:
    seen = Visit(browser, address, operator=f"jane{HOSTILE}")
    for path in _pages(database):
        seen.page.goto(f"{address}{path}")
        expect(seen.page.locator("main")).to_be_visible()
        if path not in ("/schedules", "/pool?name=default", "/charts", "/charts?window=day"):
            assert HOSTILE in unescape(seen.page.content()), path
        assert seen.page.locator("main img, main script, main [onerror], main [style]").count() == 0, path
        for width, scheme in ((1280, "light"), (390, "dark")):
            seen.page.set_viewport_size({"width": width, "height": 800})
            seen.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            assert seen.page.evaluate(CONTRAST) == [], path
            assert seen.page.evaluate("document.documentElement.scrollWidth") == width, path
            if width > 1000:
                assert seen.page.evaluate(SPILLED) == [], path
    seen.page.close()
    assert seen.wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_on_any_page_and_in_any_dialog(
    address: str, database: holdfast.Client, browser: Browser, scheme: Any
) -> None:
    database.lease(f"lost{HOSTILE}", ttl=600).acquire()
    database.leases.force_release(f"lost{HOSTILE}", actor="jane", reason="a test")
    seen = Visit(browser, address, operator="jane", color_scheme=scheme)
    page = seen.page
    for path in [*_pages(database), "/lease?name=", "/explain", "/entry?id=999999", "/leases?q=nothing-has-this"]:
        page.goto(f"{address}{path}")
        assert serious_violations(page) == [], path
    page.goto(f"{address}/")
    acknowledge = page.get_by_role("link", name="Acknowledge")

    def is_open() -> bool:
        page.locator(".problems details").evaluate_all("all => all.forEach(each => { each.open = true })")
        return acknowledge.count() > 0

    eventually(is_open, "the problems are shown, and open")
    assert serious_violations(page) == [], "all problems are open"
    dialog = page.locator("dialog")
    acknowledge.last.click()
    expect(dialog).to_contain_text("It would change")
    assert serious_violations(page) == [], "a dialog asks for a reason"
    dialog.locator("#reason").fill("a test")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("Audit entry")
    assert serious_violations(page) == [], "a dialog shows the entry"
    dialog.get_by_role("button", name="Close").click()
    page.locator(".acknowledged > summary").click()
    page.locator(".acknowledged .problems summary").first.click()
    expect(page.locator(".acknowledged")).to_contain_text("Acknowledged by jane")
    assert serious_violations(page) == [], "a problem is acknowledged"
    for path, name in (
        (link("/lease", name=f"nightly-import{HOSTILE}"), "lease.release"), ("/pool?name=default", "release"),
        (link("/lock", name=f"report{HOSTILE}"), "end session"),
        (link("/lease", name="gateway:leader"), "leader.resign"),
    ):  # fmt: skip
        page.goto(f"{address}{path}")
        page.get_by_role("link", name=name).first.click()
        expect(dialog).to_contain_text("It would change")
        assert serious_violations(page) == [], path
    page.close()


def test_pages_are_readable_without_scripts(address: str, database: holdfast.Client, browser: Browser) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto(f"{address}/")
    page.get_by_role("link", name="History").click()
    page.get_by_role("link", name=f"nightly{HOSTILE}").first.click()
    expect(page.locator("#holders")).to_contain_text("worker-2")
    expect(page.locator("#holders")).to_contain_text("gone")
    assert page.locator("#timeline svg rect.forced").count() == 1
    page.locator("#find").fill(f"report{HOSTILE}")
    page.locator("#find").press("Enter")
    expect(page.locator("main")).to_contain_text("has waited for")
    page.close()


def test_a_page_follows_its_lease_and_its_waiters(address: str, database: holdfast.Client, visit: Any) -> None:
    page = visit("/lease?name=followed")
    expect(page.locator("#facts")).to_contain_text("free")
    page.evaluate("window.same = true")
    with database.lease("followed", holder="worker-1", ttl=600) as grant:
        expect(page.locator("#facts")).to_contain_text("worker-1")
        expect(page.locator("#facts")).to_contain_text(str(grant.fence))
        expect(page.locator("#actions")).to_contain_text("holdfast do lease.release followed --reason '…'")
    expect(page.locator("#holders tbody tr")).to_have_count(1)
    expect(page.locator("#holders")).to_contain_text("its holder released it")
    expect(page.locator("#actions")).to_be_hidden()
    assert page.evaluate("window.same"), "all without loading it anew"
    tree = visit(link("/lock", name=f"report{HOSTILE}"))
    expect(tree.locator(".tree > ul > li > p")).to_contain_text("held")
    expect(tree.locator(".tree > ul > li > ul > li")).to_contain_text("waits")


WAITER = """
import sys, holdfast
client = holdfast.Client(sys.argv[1])
print("begins", flush=True)
with client.lease("wanted", holder="worker-2", ttl=600).acquire(timeout=600):
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_the_page_of_a_lease_names_those_who_wait_now(url: str, database: holdfast.Client, visit: Any) -> None:
    page = visit("/lease?name=wanted")
    with database.lease("wanted", holder="worker-1", ttl=600) as grant, Child(WAITER, url) as child:
        child.line()
        rows = page.locator("#waiters tbody tr")
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text(f":{child.process.pid}")
        expect(page.locator("#facts")).to_contain_text("1 process")
        grant.release()
        child.line()
        expect(page.locator("#facts")).to_contain_text("worker-2")
        expect(page.locator("#waiters")).to_be_hidden()


LEADER = """
import sys, holdfast
client = holdfast.Client(sys.argv[1])
print("begins", flush=True)
client.elector("sweep", ttl=600, retry_every=0.2, failover="session", holder=sys.argv[2]).run(
    lambda term: (print("leads", flush=True), term.stopping.wait())
)
"""


def test_a_killed_leader_and_its_successor_are_seen(url: str, visit: Any, database: holdfast.Client) -> None:
    page = visit()
    with Child(LEADER, url, "replica-a") as first, Child(LEADER, url, "replica-b") as second:
        first.line()
        second.line()
        leaders = page.locator("#leaders li", has_text="sweep")
        expect(leaders.locator(".holder")).to_contain_text(re.compile("replica-[ab]"))
        name = leaders.locator(".holder").inner_text().partition(":")[0]
        leader = first if name == "replica-a" else second
        leader.process.kill()
        other = "replica-b" if name == "replica-a" else "replica-a"
        expect(leaders.locator(".holder")).to_contain_text(other)
        expect(page.locator("#timeline .row", has_text="sweep").locator("rect.session_lost")).to_have_count(1)
        expect(page.locator(".problems", has_text="lost in the last 15 minutes")).to_be_visible()


def test_times_are_utc_or_local_and_keys_reach_the_fields(visit: Any, database: holdfast.Client) -> None:
    page = visit("/history", timezone_id="Asia/Tokyo")
    shown = page.locator("time.at").first
    at = datetime.fromtimestamp(float(shown.get_attribute("data-at") or 0), UTC)
    expect(shown).to_have_text(f"{at:%Y-%m-%d %H:%M:%S}")
    page.get_by_role("button", name="UTC").click()
    local = f"{at + timedelta(hours=9):%Y-%m-%d %H:%M:%S}"
    expect(shown).to_have_text(local)
    expect(shown).to_have_attribute("title", f"{at:%Y-%m-%d %H:%M:%S} UTC, {local} local")
    page.reload()
    expect(page.locator("time.at").first).to_have_text(re.compile("[0-9]{4}-"))
    expect(page.locator("#zone")).to_have_text("Local time")
    page.keyboard.press("/")
    expect(page.locator("#filter")).to_be_focused()
    page.keyboard.type("nightly")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(3)


def test_parts_without_rows_are_not_shown(browser: Browser) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(holdfast.Client(fresh()))
        app = FastAPI()
        app.mount("/", holdfast.dashboard(client))
        seen = Visit(browser, stack.enter_context(served(app)))
        stack.callback(seen.page.close)
        expect(seen.page.locator("#leases .empty")).to_contain_text('client.lease("name")')
        for part in ("leaders", "timeline", "locks", "slots", "operations", "schedules", "sandboxes", "agents"):
            expect(seen.page.locator(f"#{part}")).to_be_hidden()
        client.operation("load parcels").run(lambda: 7)
        expect(seen.page.locator("#operations")).to_contain_text("load parcels")
        assert seen.wrong == []


def test_a_leader_on_sqlite_ends_with_its_process(browser: Browser, sqlite_url: str) -> None:
    """It holds a lock of the kernel, so no time is left that would say anything."""
    with ExitStack() as stack:
        client = stack.enter_context(holdfast.Client(sqlite_url))
        leader = stack.enter_context(Child(LEADER, sqlite_url, "replica-a"))
        leader.line()
        leader.line()
        app = FastAPI()
        app.mount("/", holdfast.dashboard(client))
        seen = Visit(browser, stack.enter_context(served(app)))
        stack.callback(seen.page.close)
        for part in ("leaders", "leases"):
            expect(seen.page.locator(f"#{part}")).to_contain_text("ends with its process")
            expect(seen.page.locator(f"#{part} progress")).to_have_count(0)
        seen.page.locator("#leaders").get_by_role("link", name="sweep").click()
        expect(seen.page.locator("#facts")).to_contain_text("ends with its process")
        seen.page.get_by_role("link", name="Leases").click()
        expect(seen.page.locator("tbody tr")).to_contain_text("ends with its process")
        listed = call(f"--url={sqlite_url}", "ls")
        assert "while it runs" in listed.stdout
        assert seen.wrong == []


def test_a_failed_attempt_says_why(database: holdfast.Client, visit: Any) -> None:
    page = visit(link("/operation", key=f"publish tiles{HOSTILE}"))
    expect(page.locator("#attempts")).to_contain_text("the bucket is read-only")


def test_a_filter_and_an_order_live_in_the_url_and_pages_hold_all_rows(visit: Any, database: holdfast.Client) -> None:
    with ExitStack() as stack:
        for number in range(120):
            stack.enter_context(database.lease(f"row-{number}", ttl=600))
        page = visit("/leases?q=row-&sort=-lease")
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(50)
        expect(rows.first).to_contain_text("row-119")
        expect(page.locator("thead th").first).to_have_attribute("aria-sort", "descending")
        page.get_by_role("link", name="next").click()
        expect(page).to_have_url(re.compile(r"q=row-&sort=-lease&page=2$"))
        expect(rows.first).to_contain_text("row-69")
        page.get_by_role("link", name="last").click()
        expect(rows).to_have_count(20)
        page.locator("thead a").first.click()
        expect(rows.first).to_contain_text("row-0")
        page.locator("#filter").fill("row-11")
        page.locator("#filter").press("Enter")
        expect(rows).to_have_count(11)
        expect(page.locator("main")).to_contain_text(re.compile("11 of [0-9]+ rows"))


def test_an_action_has_a_dry_run_a_reason_and_an_audit_entry(visit: Any, database: holdfast.Client, url: str) -> None:
    with holdfast.Client(url) as other:
        grant = other.lease("stuck", holder="worker-9", ttl=600).acquire()
        page = visit("/lease?name=stuck", operator="jane")
        page.get_by_role("link", name="lease.release").click()
        dialog = page.locator("dialog")
        expect(dialog).to_contain_text("held by worker-9")
        expect(dialog).to_contain_text("holdfast do lease.release")
        reason = dialog.locator("#reason")
        expect(reason).to_be_focused()
        page.keyboard.press("Enter")
        expect(dialog).to_be_visible()
        assert database.leases.get("stuck") is not None, "a reason is required"
        reason.fill("its machine is gone")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("Audit entry")
        expect(dialog).to_contain_text("its machine is gone")
        expect(dialog).to_contain_text("done")
        entry = database.audit.list(action="lease.release", limit=1)[0]
        assert (entry.actor, entry.subject, entry.outcome) == ("jane", "stuck", "done")
        expect(page.locator("#facts")).to_contain_text("free")
        assert database.leases.get("stuck") is None
        dialog.get_by_role("button", name="Close").click()
        expect(dialog).to_be_hidden()
        expect(page.locator("#audit")).to_contain_text("its machine is gone")
        assert not grant.release(), "it was taken away"


def test_every_action_ends_in_the_audit(address: str, database: holdfast.Client) -> None:
    """Without scripts, as forms: what cannot be done is refused with its reason, and nothing is run."""
    schedule, partial = f"backup{HOSTILE}", database.operations.list(status="partial")[0].key
    review = database.reviews.list()[0].id
    done = [
        ("schedule.pause", {"name": schedule}), ("schedule.resume", {"name": schedule}),
        ("schedule.run", {"name": schedule}), ("review.approve", {"number": review}),
        ("operation.complete", {"key": partial}), ("operation.reset", {"key": partial}),
    ]  # fmt: skip
    refused = [("schedule.resume", {"name": "none"}), ("leader.resign", {"name": f"invoices{HOSTILE}"})]
    with httpx.Client(base_url=address, cookies={"operator": "jane"}, timeout=PATIENCE) as http:
        for name, parameters in done:
            answer = _submit(http, f"/act/{name}", parameters)
            assert answer.status_code == 303, (name, answer.text)
            entry = http.get(answer.headers["location"].removeprefix("/holdfast"))
            assert "done" in entry.text
            assert database.audit.list(action=name, limit=1)[0].reason == "a test"
        for name, parameters in refused:
            answer = http.get(f"/act/{name}", params=parameters)
            assert "refused" in answer.text
            assert "<form method" not in answer.text


def _submit(http: httpx.Client, path: str, parameters: Any, **headers: str) -> httpx.Response:
    """Read the plan, then run it."""
    dialog = http.get(path, params=parameters)
    plan = re.search(r'name="plan" value="([0-9a-f]+)"', dialog.text)
    form = {"plan": plan[1] if plan else "", "reason": "a test"}
    origin = {"origin": str(http.base_url).partition("/holdfast")[0]}
    return http.post(path, params=parameters, data=form, headers=headers or origin)


def test_a_form_of_another_origin_and_of_a_reader_is_refused(address: str, database: holdfast.Client) -> None:
    with database.lease("kept", ttl=600), httpx.Client(base_url=address, timeout=PATIENCE) as http:
        target = ("/act/lease.release", {"name": "kept"})
        assert "lease.release" not in re.findall(r"data-act href=\S*", http.get("/lease?name=kept").text)
        assert http.get(target[0], params=target[1]).status_code == 403, "it has no operator"
        assert _submit(http, *target).status_code == 403
        http.cookies.set("operator", "jane")
        for headers in (
            {"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"}, {"x-none": "neither"},
        ):  # fmt: skip
            answer = _submit(http, *target, **headers)
            assert (answer.status_code, "another origin" in answer.text) == (403, True), headers
        assert database.leases.get("kept") is not None
        assert _submit(http, "/act/wal.archive", {"to": "x"}).status_code == 403
        assert _submit(http, *target, **{"sec-fetch-site": "same-origin"}).status_code == 303
        assert database.leases.get("kept") is None


def test_a_plan_that_has_changed_is_read_again(address: str, database: holdfast.Client, url: str) -> None:
    with holdfast.Client(url) as other, httpx.Client(base_url=address, timeout=PATIENCE) as http:
        http.cookies.set("operator", "jane")
        first = other.lease("passed on", holder="worker-1", ttl=600).acquire()
        dialog = http.get("/act/lease.release", params={"name": "passed on"})
        plan = re.search(r'name="plan" value="([0-9a-f]+)"', dialog.text)
        assert plan is not None
        first.release()
        with other.lease("passed on", holder="worker-2", ttl=600):
            answer = http.post(
                "/act/lease.release", params={"name": "passed on"}, data={"plan": plan[1], "reason": "slow"},
                headers={"sec-fetch-site": "same-origin"},
            )  # fmt: skip
            assert answer.status_code == 200
            assert "read the plan again" in answer.text
            assert "worker-2" in answer.text
            lease = database.leases.get("passed on")
            assert lease is not None
            assert lease.holder == "worker-2"


def test_names_that_nothing_has_and_wrong_addresses_are_answered_with_a_page(address: str) -> None:
    with httpx.Client(base_url=address, timeout=PATIENCE) as http:
        for path, status, text in (
            ("/lease?name=none", 200, "no process holds it"), ("/lock?name=none", 200, "free"),
            ("/operation?key=none", 200, "no operation has this key"), ("/schedule?name=none", 200, "no schedule has"),
            ("/explain?name=none", 200, "Nothing in this database has this name"), ("/lease?name=", 422, "name must"),
            (f"/lease?name={'x' * 5000}", 414, "at most 4096"), ("/entry?id=999999", 404, "no entry 999999"),
            ("/static/none", 404, "no such file"), ("/events?at=/none", 404, "no such page"),
            ("/leases?page=-1&sort=none", 200, "Leases"), ("/leases?page=9999999999", 200, "Leases"),
        ):  # fmt: skip
            answer = http.get(path)
            assert (answer.status_code, text in answer.text) == (status, True), (path, answer.text)
            assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_a_command_whose_end_was_not_seen_is_not_called_refused(address: str, database: holdfast.Client) -> None:
    """The leader is asked to stop, and its work does not end."""
    with httpx.Client(base_url=address, cookies={"operator": "jane"}, timeout=PATIENCE) as http:
        path, parameters = "/act/leader.resign", {"name": "gateway:leader"}
        dialog = http.get(path, params=parameters)
        assert 'name="wait" value="10"' in dialog.text
        plan = re.search(r'name="plan" value="([0-9a-f]+)"', dialog.text)
        assert plan is not None
        form = {"plan": plan[1], "reason": "a test", "wait": "0"}
        answer = http.post(path, params=parameters, data=form, headers={"sec-fetch-site": "same-origin"})
        assert answer.status_code == 200
        assert "its end was not seen" in answer.text
        assert "Not run" not in answer.text
        form["reason"] = ""
        answer = http.post(path, params=parameters, data=form, headers={"sec-fetch-site": "same-origin"})
        assert "Not run" in answer.text
        assert "reason must" in answer.text
