"""The pages that a gateway adds to its dashboard, in a real browser: sandboxes with their log, agents, replicas."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

import holdfast
from holdfast.dashboard.formats import link
from holdfast.gateway.page_views import LOG_BYTES, clean
from tests.browser import CONTRAST, MARKS, SPILLED, Visit, open_browser
from tests.conftest import fresh
from tests.gateway.example_data import HOSTILE
from tests.gateway.replicas import Replica, fleet

pytestmark = MARKS
HOOK = {"session_id": "s-1", "cwd": "/srv/app"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as made:
        yield made


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Replica]]:
    with TemporaryDirectory(prefix="hf-") as folder, fleet(fresh(), Path(folder), count=2) as made:
        yield made


@pytest.fixture
def visit(browser: Browser, replicas: list[Replica]) -> Iterator[Any]:
    visits: list[Visit] = []

    def open(path: str, **options: Any) -> Any:
        visits.append(Visit(browser, replicas[0].address, path, **options))
        return visits[-1].page

    yield open
    for each in visits:
        each.page.close()
        assert each.wrong == []


def test_the_page_of_a_sandbox_has_its_log_and_follows_it(replicas: list[Replica], visit: Any) -> None:
    go = replicas[0].folder / "go"
    text = HOSTILE.replace("'", "")
    script = f"echo '{text}'; printf '\\033[31mred\\033[0m\\n'; until test -e {go}; do sleep 0.05; done; echo after"
    answer = replicas[0].http.post(
        "/sandboxes",
        json={
            "id": "web-1",
            "name": "web",
            "argv": ["sh", "-c", script],
            "env": {"SECRET": "hush"},
            "labels": {"team": "a"},
        },
    )
    assert answer.status_code == 201, answer.text
    page = visit("/")
    page.locator("#sandboxes").get_by_role("link", name="web").click()
    expect(page.locator("#facts")).to_contain_text("Ready")
    expect(page.locator("#facts")).to_contain_text("team=a")
    expect(page.locator("#facts")).to_contain_text("SECRET")
    log = page.locator(".log")
    expect(log).to_contain_text("<img src=x")
    expect(log).to_contain_text("red")
    assert "[31m" not in log.inner_text()
    assert "hush" not in page.content()
    go.touch()
    expect(log).to_contain_text("after")
    expect(page.locator("#facts")).to_contain_text("Completed")
    page.get_by_role("link", name="Sandboxes").click()
    expect(page.locator("nav a[aria-current]")).to_have_text("Sandboxes")
    page.get_by_role("link", name="web-1").click()
    expect(page.locator("h1")).to_have_text("web")
    expect(visit("/sandbox?id=none").locator("#facts")).to_contain_text("no sandbox with this id")


def test_a_log_is_text_and_bounded() -> None:
    assert clean(b"a\x1b[1;31mb\x1b[0m\x1b]0;title\x07c\r\nd\te") == "abc\nd\te"
    assert clean(b"\x00\x9b\xff" + "\u202e".encode()) == "\ufffd" * 4
    assert LOG_BYTES <= 1 << 16


def test_the_page_of_an_agent_has_its_commands_and_messages(replicas: list[Replica], visit: Any) -> None:
    for kind, more in (("session-start", {}), ("user-prompt-submit", {"prompt": f"Mend it {HOSTILE}"})):
        answer = replicas[0].http.post(f"/hook/{kind}", json={**HOOK, **more})
        assert answer.status_code == 200, answer.text
    page = visit("/")
    page.locator("#agents").get_by_role("link", name="agent 1").click()
    expect(page.locator("#facts")).to_contain_text("working")
    expect(page.locator("#facts")).to_contain_text("/srv/app")
    expect(page.locator("#commands tbody tr")).to_have_count(1)
    expect(page.locator("#turns")).to_contain_text(f"Mend it {HOSTILE}")
    assert replicas[0].http.post("/hook/session-end", json={**HOOK, "reason": "logout"}).status_code == 200
    expect(page.locator("#facts")).to_contain_text("logout")
    expect(page.locator("#commands")).to_contain_text("interrupted")


def test_records_of_any_shape_are_text_on_their_pages(replicas: list[Replica], browser: Browser) -> None:
    """Also records that no gateway wrote, and leases of replicas and supervisors that are none."""
    payloads: list[Any] = [
        None, "text", [],
        {"status": "odd", "spec": {"argv": HOSTILE, "env": [HOSTILE], "limits": 7}, "state": [HOSTILE]},
        {
            "state": HOSTILE, "number": 10**9, "turns": 10**18, "commands": -1, "seen_at": 1e300, "created_at": HOSTILE,
            "pending": [{"type": "@turn", "payload": {"number": 1, "text": HOSTILE, "at": HOSTILE}}, HOSTILE],
            "spec": {"argv": [HOSTILE], "env": {HOSTILE: HOSTILE}, "limits": {HOSTILE: HOSTILE}, "supervised": HOSTILE},
            "status": {
                "phase": HOSTILE, "details": {"pid": HOSTILE, "exit_code": {}},
                "conditions": [{"type": HOSTILE, "reason": HOSTILE, "message": HOSTILE, "status": []}, HOSTILE],
            },
        },
    ]  # fmt: skip
    create = holdfast.MustCreate()
    with holdfast.Client(replicas[0].url) as client:
        paths = ["/replicas", link("/replica", name=f"odd{HOSTILE}")]
        for number, payload in enumerate(payloads):
            for kind, path in (("@sandbox", "/sandbox"), ("@agent", "/agent")):
                client.objects.put_if(kind, f"odd-{number}", payload, create, name=f"odd {number}{HOSTILE}")
                paths.append(link(path, id=f"odd-{number}"))
        with (
            client.lease(f"gateway:replica:odd{HOSTILE}", holder=f"odd{HOSTILE}", ttl=600),
            client.lease("gateway:supervisor:odd-4", holder=f"odd{HOSTILE}", ttl=600),
        ):
            for width, scheme in ((1280, "light"), (390, "dark")):
                seen = Visit(
                    browser, replicas[0].address, viewport={"width": width, "height": 800}, color_scheme=scheme
                )
                for path in paths:
                    seen.page.goto(f"{replicas[0].address}{path}")
                    expect(seen.page.locator("#facts, #rows").first).to_be_visible()
                    expect(seen.page.locator("main")).to_contain_text(HOSTILE)
                    assert seen.page.locator("main img, main script, main [onerror], main [style]").count() == 0, path
                    assert seen.page.evaluate(CONTRAST) == [], path
                    assert seen.page.evaluate("document.documentElement.scrollWidth") == width, path
                    if width > 1000:
                        assert seen.page.evaluate(SPILLED) == [], path
                seen.page.close()
                assert seen.wrong == []


DIMMED = """(dimmed) => {
  const [panel, page] = ["#facts dd", "body"].map((each) => getComputedStyle(document.querySelector(each)).color);
  return (panel !== page) === dimmed;
}"""


def test_a_replica_that_has_gone_is_dimmed_and_says_since_when(
    replicas: list[Replica], visit: Any, browser: Browser
) -> None:
    other = replicas[1]
    page = visit("/replicas")
    rows = page.locator("#rows tbody tr", has_text="replica-")
    expect(rows).to_have_count(2)
    expect(page.locator("#rows .state.good", has_text="leads")).to_have_count(1)
    page.get_by_role("link", name=re.compile("^replica-2")).click()
    expect(page.locator("#facts")).to_contain_text(other.address)
    expect(page.locator("#timeline rect.held").first).to_be_attached()
    expect(page.locator("#gone")).to_be_hidden()
    assert page.evaluate(DIMMED, False)
    assert other.end() == 0
    expect(page.locator("#gone")).to_contain_text("Gone since")
    expect(page.locator("#gone time.at")).to_have_text(re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"))
    expect(page.locator("#facts")).to_contain_text("it answers no request")
    page.wait_for_function(DIMMED, arg=True)
    assert page.evaluate(CONTRAST) == []
    plain = browser.new_page(java_script_enabled=False)
    plain.goto(f"{replicas[0].address}/replicas")
    expect(plain.locator("#rows tbody tr", has_text="replica-2")).to_contain_text("gone")
    plain.close()
    page.goto(f"{replicas[0].address}/replicas")
    expect(page.locator("#rows .state.good", has_text="leads")).to_have_count(1)
    page.get_by_role("link", name=re.compile("^replica-1")).click()
    expect(page.locator("#facts")).to_contain_text("is answered by this replica")
    expect(page.locator("#held")).to_contain_text("gateway:reconciler")
