"""A real browser for tests of pages: what went wrong in a page, and how its text is shown."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, Request, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MARKS = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"),
    pytest.mark.timeout(900),  # a browser on a busy machine takes minutes for a page
]
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PATIENCE = 60_000
"""Milliseconds."""
expect.set_options(timeout=PATIENCE)


@contextmanager
def open_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """A page that was opened, and all that went wrong in it."""

    def __init__(
        self, browser: Browser, address: str, path: str = "/", *, operator: str | None = None, **options: Any
    ) -> None:
        self.page: Page = browser.new_page(**options)
        self.page.set_default_timeout(PATIENCE)
        self.wrong: list[str] = []
        self._origin = "/".join(address.split("/")[:3])
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", self._asked_back)
        self.page.on("request", self._asked)
        if operator is not None:
            self.page.context.add_cookies([{"name": "operator", "value": quote(operator), "url": self._origin}])
        self.page.goto(f"{address}{path}")
        self.page.wait_for_selector(".live.on")

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(message.text)

    def _asked_back(self, dialog: Dialog) -> None:
        self.wrong.append(dialog.message)
        dialog.dismiss()

    def _asked(self, request: Request) -> None:
        if not request.url.startswith(f"{self._origin}/"):
            self.wrong.append(f"asked {request.url}")


CONTRAST = """() => {
  const channels = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const found = channels(getComputedStyle(node).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const said = [...node.childNodes].some((each) => each.nodeType === 3 && each.textContent.trim());
    if (!said || node.closest(".unseen") || !node.getClientRects().length) continue;
    const [a, b] = [light(channels(getComputedStyle(node).color)), light(ground(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push(`${node.className} ${node.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""
_AXE = Path(__file__).parent / "axe" / "axe.min.js"
_SERIOUS = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
  .filter((each) => ["serious", "critical"].includes(each.impact))
  .flatMap((each) => each.nodes.map((node) => `${each.id}: ${node.html.slice(0, 200)}: ${node.failureSummary}`))"""


def serious_violations(page: Page) -> list[str]:
    """What axe finds in a page that is serious or critical."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(_AXE.read_text(encoding="utf-8"))  # not a script of the page, which its policy would refuse
    violations: list[str] = page.evaluate(_SERIOUS)
    return violations


SPILLED = """() => [...document.querySelectorAll("td, tbody th")]
  .filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.textContent.trim())"""
