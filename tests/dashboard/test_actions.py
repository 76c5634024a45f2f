"""Every action in a real browser: its dialog with the dry run, a reason, and the entry in the audit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import unquote

import pytest
from playwright.sync_api import Browser, expect
from starlette.applications import Starlette

import holdfast
from holdfast.dashboard.actions import ACTIONS
from holdfast.dashboard.formats import link
from tests.browser import MARKS, Visit, open_browser
from tests.children import eventually
from tests.conftest import fresh
from tests.dashboard.mounted import served

pytestmark = MARKS
BY: dict[str, Any] = {"actor": "setup", "reason": "a test"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as made:
        yield made


@pytest.fixture(scope="module")
def url() -> str:
    return fresh()


@pytest.fixture(scope="module")
def database(url: str) -> Iterator[holdfast.Client]:
    with holdfast.Client(url) as client:
        client.operations.register("unpublish", rollback=lambda: None)
        yield client


@pytest.fixture(scope="module")
def address(database: holdfast.Client) -> Iterator[str]:
    app = Starlette()
    app.mount("/holdfast", holdfast.dashboard(database, operator=_operator))
    with served(app) as served_at:
        yield f"{served_at}/holdfast"


def _operator(request: Any) -> str | None:
    return unquote(request.cookies.get("operator", "")) or None


class Arrangement:
    """Arranges what an action changes; each function returns the page that has the action."""

    def __init__(self, client: holdfast.Client, other: holdfast.Client, stack: ExitStack) -> None:
        self.client, self.other, self.stack = client, other, stack

    def gate(self) -> str:
        self.client.gates.open("dot_config", seconds=600, **BY)
        return link("/lease", name="@gate:dot_config")

    def leader(self) -> str:
        elector = self.other.elector("sweep", renew_every=0.2)
        thread = threading.Thread(target=elector.run, args=(lambda term: term.stopping.wait(),))
        thread.start()
        self.stack.callback(thread.join)
        self.stack.callback(elector.stop)
        eventually(lambda: self.client.leases.get("sweep"), "it leads")
        return link("/lease", name="sweep")

    def lease(self) -> str:
        self.other.lease("stuck", ttl=600).acquire()
        return link("/lease", name="stuck")

    def lock(self) -> str:
        grant = self.other.lock("report").acquire()
        self.stack.callback(_release, grant)
        eventually(lambda: [lock for lock in self.client.locks.list() if lock.name == "report"], "its name is stored")
        return link("/lock", name="report")

    def interrupted(self) -> str:
        with suppress(KeyboardInterrupt):
            self.other.operation("publish map").run(_interrupt)
        return link("/operation", key="publish map")

    def done(self) -> str:
        self.other.operation("load parcels").run(lambda: 7)
        return link("/operation", key="load parcels")

    def undoable(self) -> str:
        self.client.operation("publish tiles", rollback="unpublish").run(lambda: None)
        return link("/operation", key="publish tiles")

    def problem(self) -> str:
        self.other.lease("lost", ttl=600).acquire()
        self.client.leases.force_release("lost", **BY)
        return "/"

    def review(self) -> str:
        key = f"refused {len(self.client.reviews.list(status=None))}"
        for _ in range(2):
            with suppress(RuntimeError, holdfast.OperationFailed):
                self.other.operation(key, retry=holdfast.Retry(attempts=1)).run(_fail)
        return link("/operation", key=key)

    def schedule(self) -> str:
        self.other.schedule("backup", 3600).run_due(lambda slot: None)
        return link("/schedule", name="backup")

    def paused(self) -> str:
        page = self.schedule()
        with suppress(ValueError):
            self.client.schedules.pause("backup", **BY)
        return page

    def resumed(self) -> str:
        page = self.paused()
        self.client.schedules.resume("backup", **BY)
        return page

    def session(self) -> str:
        claim = self.other.slots("default", 8).claim(owner="session-1")
        payload = {"state": "ACTIVE", "pool": "default", "slot": claim.slot, "fence": claim.fence}
        self.client.objects.put_if("@session", "session-1", payload, holdfast.MustCreate())
        return link("/pool", name="default")

    def slot(self) -> str:
        self.other.slots("gpu", 2).claim()
        return link("/pool", name="gpu")


def _release(grant: Any) -> None:
    with suppress(holdfast.HoldfastError):
        grant.release()


def _interrupt() -> None:
    raise KeyboardInterrupt


def _fail() -> None:
    raise RuntimeError("the bucket is read-only")


CASES: dict[str, tuple[Callable[[Arrangement], str], str]] = {
    "gate.close": (Arrangement.gate, "gate 'dot_config'"),
    "leader.resign": (Arrangement.leader, "which leads 'sweep'"),
    "lease.release": (Arrangement.lease, "lease 'stuck'"),
    "lock.end": (Arrangement.lock, "which holds report"),
    "operation.complete": (Arrangement.interrupted, "operation 'publish map'"),
    "operation.reset": (Arrangement.done, "operation 'load parcels'"),
    "operation.rollback": (Arrangement.undoable, "is undone by unpublish"),
    "problem.acknowledge": (Arrangement.problem, "is acknowledged until it changes"),
    "review.approve": (Arrangement.review, "may run once more"),
    "review.reject": (Arrangement.review, "is refused until it is reset"),
    "schedule.pause": (Arrangement.resumed, "schedule 'backup' is paused"),
    "schedule.resume": (Arrangement.paused, "schedule 'backup' goes on"),
    "schedule.run": (Arrangement.resumed, "schedule 'backup' runs within seconds"),
    "schedule.skip": (Arrangement.resumed, "of schedule 'backup' is skipped"),
    "session.cancel": (Arrangement.session, "session 'session-1' is cancelled"),
    "slot.release": (Arrangement.slot, "lease '@slot:gpu:1'"),
}


def test_no_action_is_left_out() -> None:
    assert set(CASES) == set(ACTIONS)


@pytest.mark.parametrize("name", CASES)
def test_an_action_shows_its_plan_asks_for_a_reason_and_ends_in_the_audit(
    name: str, browser: Browser, address: str, database: holdfast.Client, url: str
) -> None:
    arrange, plan = CASES[name]
    with ExitStack() as stack:
        other = stack.enter_context(holdfast.Client(url))
        seen = Visit(browser, address, arrange(Arrangement(database, other, stack)), operator="jane")
        stack.callback(seen.page.close)
        act = seen.page.locator(f'a[data-act][href*="/act/{name}?"]').first
        if not act.is_visible():
            seen.page.locator("details", has=act).locator("summary").first.click()
        act.click()
        dialog = seen.page.locator("dialog")
        expect(dialog.locator("h2")).to_have_text("It would change")
        expect(dialog.locator(".sentences")).to_contain_text(plan)
        expect(dialog.locator(".copy code")).to_contain_text(f"holdfast do {name}")
        assert database.audit.list(action=name) == [], "a dry run leaves no entry"
        if name == "leader.resign":
            dialog.locator("#field-wait").fill("60")
        dialog.locator("#reason").fill(f"because of {name}")
        dialog.get_by_role("button", name=f"Run {name}").click()
        expect(dialog).to_contain_text("Audit entry")
        expect(dialog).to_contain_text(f"because of {name}")
        expect(dialog.locator(".facts .state")).to_have_text("done")
        [entry] = database.audit.list(action=name)
        assert (entry.actor, entry.reason, entry.outcome) == ("jane", f"because of {name}", "done")
        assert seen.wrong == []


def test_an_acknowledged_problem_is_folded_away_and_comes_back_when_it_changes(
    browser: Browser, address: str, database: holdfast.Client, url: str
) -> None:
    with ExitStack() as stack:
        other = stack.enter_context(holdfast.Client(url))
        seen = Visit(browser, address, Arrangement(database, other, stack).problem(), operator="jane")
        stack.callback(seen.page.close)
        open_one = seen.page.locator("[data-panel=problems] > .problems > li", has_text="lost in the last 15 minutes")
        open_one.locator("summary").first.click()
        open_one.get_by_role("link", name="Acknowledge").click()
        seen.page.locator("dialog #reason").fill("a planned restart")
        seen.page.keyboard.press("Enter")
        expect(seen.page.locator("dialog")).to_contain_text("Audit entry")
        seen.page.locator("dialog").get_by_role("button", name="Close").click()
        expect(open_one).to_have_count(0)
        folded = seen.page.locator("details.acknowledged")
        folded.locator("> summary").click()
        folded.locator(".problems summary", has_text="lost in the last 15 minutes").click()
        expect(folded).to_contain_text("Acknowledged by jane at")
        expect(folded).to_contain_text("a planned restart")
        expect(folded.get_by_role("link", name="Acknowledge")).to_have_count(0)
        Arrangement(database, other, stack).problem()
        expect(open_one).to_be_visible()
        reader = Visit(browser, address)
        stack.callback(reader.page.close)
        expect(reader.page.locator(".problems", has_text="lost in the last 15 minutes").first).to_be_visible()
        expect(reader.page.locator(".problems a[data-act]")).to_have_count(0)
        expect(reader.page.locator(".problems code").first).to_contain_text("holdfast do problem.acknowledge")
        assert seen.wrong == reader.wrong == []
