"""The first contentful paint of the dashboard's pages in headless Chromium, with many leases and a long history."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

import holdfast
from bench.measure import Result, unpinned
from bench.place import Place
from holdfast.cli.child import die_with

ENGINES = ("PostgreSQL", "SQLite")
LEASES, ENDED = 10_000, 50_000
PAGES = {
    "a page that reads nothing": "/explain?",
    "overview": "/?",
    "leases": "/leases?",
    "leases, filtered and sorted": "/leases?q=job-99&sort=-fence&",
    "history": "/history?",
    "history, filtered and sorted": "/history?q=job-99&sort=-fence&",
    "one lease": "/lease?name=job-42&",
}
"""A query of its own makes each request read anew: clients of one address share what was read."""
_PAINT = """() => new Promise((resolve) => new PerformanceObserver((list) => {
  for (const each of list.getEntriesByName("first-contentful-paint")) resolve(each.startTime / 1000);
}).observe({type: "paint", buffered: true}))"""
_POSTGRES = """
alter table holdfast.history disable trigger history_trim;
insert into holdfast.history (name, holder, role, fence, acquired_at, ended_at, outcome)
select 'job-' || n % 500, 'worker-' || n % 7, 'app', n, now() - (50010 - n) * interval '1 s',
       now() - (50009 - n) * interval '1 s',
       case when n % 97 = 0 then 'expired' else 'released' end
  from generate_series(1, {ended}) n
"""
_SQLITE = """
drop trigger holdfast_history_trim;
insert into holdfast_history (name, holder, fence, acquired_at, ended_at, outcome)
with recursive numbers(n) as (select 1 union all select n + 1 from numbers where n < {ended})
select 'job-' || n % 500, 'worker-' || n % 7, n, unixepoch() - 50010 + n, unixepoch() - 50009 + n,
       case when n % 97 = 0 then 'expired' else 'released' end
  from numbers
"""


def dashboard(place: Place) -> list[Result]:
    """First contentful paint of the overview and the lists, with 10,000 leases and 50,000 ended grants."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        print("dashboard: not measured: Chromium is not installed: apt-get install chromium", file=sys.stderr)
        return []
    results = []
    urls = dict(zip(ENGINES, (place.postgres_url(), place.sqlite_url("dashboard")), strict=True))
    with unpinned(), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for engine, url in urls.items():
            with holdfast.Client(url) as client:
                place.grants += [
                    client.lease(f"job-{number}", ttl=600).acquire() for number in range(place.effort.times(LEASES))
                ]
                _fill_history(url, place.effort.times(ENDED))
                with _served(url) as address:
                    paints: dict[str, list[float]] = {name: [] for name in PAGES}
                    for number in range(place.effort.rounds(9) + 1):
                        for name, path in PAGES.items():
                            context = browser.new_context()
                            page = context.new_page()
                            page.goto(f"{address}{path}round={number}")
                            seconds = page.evaluate(_PAINT)
                            if number:  # the first one warms up
                                paints[name].append(seconds)
                            context.close()
            base = median(next(iter(paints.values())))
            results += [
                Result(f"dashboard, {engine}", name, median(samples), "s", median(samples) / base)
                for name, samples in paints.items()
            ]
        browser.close()
    return results


def _fill_history(url: str, ended: int) -> None:
    """Rows beyond those that the database keeps by itself."""
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///")) as file:
            file.executescript(_SQLITE.format(ended=ended))
        file.close()
        return
    import psycopg

    with psycopg.connect(url) as connection:
        connection.execute(_POSTGRES.format(ended=ended).encode())


@contextmanager
def _served(url: str) -> Iterator[str]:
    """The address of ``holdfast dashboard``, in a process of its own."""
    command = [sys.executable, "-m", "holdfast", "dashboard", "--port", "0"]
    environment = {**os.environ, "HOLDFAST_URL": url}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment,
        preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - it only calls prctl
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip().partition(": ")[2]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
