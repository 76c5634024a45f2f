"""The benchmarks run: nothing is said here about how fast anything is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from bench.aims import ASYNC_PAIR, MANY, MOST, PAIR, judge
from bench.dashboard import ENGINES, PAGES
from bench.load import CALLS
from bench.load_page import BEGIN, END, PICTURE
from bench.measure import Effort, Result
from bench.place import Place
from tests.browser import CHROMIUM
from tests.children import HANG

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False)


@pytest.mark.parametrize(
    "tables",
    [
        {
            "refused": "refused, SQLite", "heartbeat": "heartbeat, in the keeper",
            "pair": "pair, fsync on", "handover": "hand-over", "objects": "put_if, SQLite", "sweep": "sweep",
        },
        {
            "lock_pair": "lock pair", "lock_tasks": "lock, 32 tasks", "lock_handover": "lock hand-over, in a line",
            "lock_held": "lock pair, many held",
        },
        {
            "operation": "operation, SQLite", "replayed": "replayed", "operation_batch": "operation_batch",
            "schedule_idle": "schedule_idle", "unheard": "unheard", "gateway": "gateway, GET /hook/status",
        },
    ],
    ids=" ".join,
)  # fmt: skip
def test_quick_benchmarks_measure_every_variant_against_the_first(tables: dict[str, str]) -> None:
    """Each name with the last table that it makes, or one of many."""
    done = bench("--quick", "--json", *tables)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["machine"]["python"]
    found = report["results"]
    assert all(each["value"] > 0 and each["ratio"] > 0 for each in found)
    by_benchmark = {each["benchmark"]: each for each in reversed(found)}
    assert by_benchmark.keys() >= {*tables.values()}
    assert all(first["ratio"] == 1.0 for first in by_benchmark.values())


def test_the_load_is_measured_and_drawn(tmp_path: Path) -> None:
    """Beside another checkout: here the same one."""
    page = tmp_path / "benchmarks.md"
    page.write_text(before := (ROOT / "docs/explanation/benchmarks.md").read_text(encoding="utf-8"), encoding="utf-8")
    done = bench("--quick", "--json", "load", "--beside", str(ROOT), "--docs", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rates = {(each["benchmark"], each["variant"]): each["value"] for each in json.loads(done.stdout)["results"]}
    stores = "fsync on", "SQLite"
    tables = {f"load, {what}, {store}": "threads" for store in stores for what in CALLS[:-1]}
    for table, who in {**tables, "load, hooks, fsync on": "replica"}.items():
        beside = [] if "SQLite" in table else [f"{who}, beside, 1 caller"]
        for variant in (f"{who}, 1 caller", f"{who}, 1 caller: p99", *beside):
            assert rates[table, variant] > 0
    after = page.read_text(encoding="utf-8")
    assert re.search(r"\| \*\*fsync on\*\*: tasks, beside \|( [0-9,]+ \|){2}( [0-9.]+ ms \|){2}", after)
    assert (after.partition(BEGIN)[0], after.rpartition(END)[2]) == (
        before.partition(BEGIN)[0],
        before.rpartition(END)[2],
    )
    root = ET.parse(tmp_path / PICTURE).getroot()
    assert len(root.findall("{*}path[@class='line']")) >= 7 * len(stores)


def test_a_slow_disk_takes_two_milliseconds_for_each_flush() -> None:
    """A quick run measures nothing on it."""
    with Place(Effort(quick=False)) as place:
        if place.slow is None:
            pytest.skip("a C compiler is not installed: apt-get install gcc")
        connection = place.psycopg(place.slow.database())
        assert "slow_disk.so" in Path(f"/proc/{connection.info.backend_pid}/maps").read_text()
        connection.execute("create table work (text text)")
        began = time.perf_counter()
        for _ in range(5):
            connection.execute("insert into work values ('x')")
        assert time.perf_counter() - began >= 5 * 0.002


def test_rates_are_judged_by_their_aims() -> None:
    """A rate has to be high, a time low."""
    table = "load, lease pairs, fsync on"
    ratios = {MANY: 6.5, MOST: 6.2, "redis.asyncio, 32 callers": 4.0}
    verdicts = judge([Result(table, name, ratio * 1000, "/s", ratio) for name, ratio in ratios.items()])
    assert [(each.aim.variant, each.aim.than, each.met) for each in verdicts] == [
        (MANY, None, True),
        (MANY, "redis.asyncio, 32 callers", True),
        (MOST, MANY, False),
    ]
    assert str(verdicts[0]) == f"met     {table}: tasks, 32 callers: 6.5, at least 6"


def test_figures_are_judged_by_their_aims() -> None:
    """An aim is about the first variant, or about another one; what was not measured is not judged."""
    ratios = {PAIR: 1.2, ASYNC_PAIR: 1.7, "redis-py Lock": 3.7}
    results = [Result("lock pair", name, ratio * 5e-5, "s", ratio) for name, ratio in ratios.items()]
    verdicts = judge(results)
    assert [(each.aim.variant, each.aim.than, each.met) for each in verdicts] == [
        (PAIR, None, True),
        (ASYNC_PAIR, None, False),
        (PAIR, "redis-py Lock", True),
    ]
    assert str(verdicts[1]) == "MISSED  lock pair: async with client.lock(name): 1.7, at most 1.6"


def test_the_table_is_plain_text_without_a_terminal() -> None:
    done = bench("--quick", "sqlite")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "pair, SQLite" in done.stdout
    assert "insert + delete" in done.stdout


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    done = bench("speed")
    assert done.returncode == 2
    assert "no benchmark 'speed': there are pair, sqlite" in done.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")
def test_the_first_paint_of_each_page_is_measured_on_both_engines() -> None:
    done = bench("--quick", "--json", "dashboard")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    pages = [(f"dashboard, {engine}", page) for engine in ENGINES for page in PAGES]
    assert [(each["benchmark"], each["variant"]) for each in report["results"]] == pages
    assert [(each["benchmark"], each["variant"], each["within"]) for each in report["aims"]] == [
        (*page, 0.5) for page in pages
    ]


def test_what_a_person_waits_for_is_judged_in_seconds() -> None:
    for seconds, met in ((0.4, True), (0.6, False)):
        [verdict] = judge([Result("dashboard, SQLite", "overview", seconds, "s", 3.0)])
        assert verdict.met is met
        assert str(verdict).endswith(f"dashboard, SQLite: overview: {seconds * 1000:.0f} ms, at most 500 ms")
