"""What an operator sees: the listings on real terminals of four widths, as text files in ``screens/``.

To change a screen, delete its file, run the test, which writes a new one, and look at it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

import holdfast
from holdfast import commands as governed
from tests.children import Child, eventually, query
from tests.cli.command import Running, at
from tests.conftest import fresh

SCREENS = Path(__file__).parent / "screens"
WIDTHS = (60, 80, 120, 200)
LISTINGS = ("ls", "locks", "history", "ops ls", "audit", "slots", "gates", "reviews ls")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
TIME, FENCE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"), re.compile(r"\b\d{14}\b")
JANE = "jane.doe@operations.example.com"
IMPORT = "nightly-import-of-parcels-from-the-land-registry-of-the-northern-region"
BILLING = "請求書の夜間バッチ取り込み処理と再計算の一括実行ジョブ"
LOCK = "monthly report of the northern region, as people name their locks"
LONG: dict[str, Any] = {"ttl": 86400.0}
POOLS = "gpu=2,idle=4"
WAIT = """
    import sys, holdfast
    client = holdfast.Client(sys.argv[1])
    {handle}.acquire(timeout=None)
"""


def fail() -> None:
    raise ConnectionResetError("the remote side closed the connection while the batch was being sent")


def die() -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def crowded() -> Iterator[str]:
    """A database with something to see in every listing, with long names, and with waiters."""
    url = fresh()
    with holdfast.Client(url) as client, ExitStack() as stack:
        add_history(client, url)
        add_operations(client, url)
        client.lease(IMPORT, holder="importer@worker-17.eu-central-1.example.com:48213", **LONG).acquire()
        client.lease("sweep", holder="worker-3", **LONG).acquire()
        client.lease(BILLING, holder="日本語のホルダー", **LONG).acquire()
        for number in (1, 2):
            client.slots("gpu", 2, **LONG).claim(owner=f"session-{number}-of-the-very-long-tuning-run-of-november")
        client.slots("default", 8, **LONG).claim(owner="session-9")
        stack.enter_context(client.gate("dangerous", actor="deploy", reason="rolling the schema forward", **LONG))
        client.lock(LOCK).acquire()
        client.lock(("agent", 7)).acquire()
        for handle in (
            "client.lease('sweep')", "client.slots('gpu', 2).slot()", "client.lock(('agent', 7))",
        ):  # fmt: skip
            stack.enter_context(Child(WAIT.format(handle=handle), url))
        query(url, "update holdfast.beat set host = 'worker-17.eu-central-1', pid = 48213")
        query(url, "update holdfast.beat set expires_at = clock_timestamp() + interval '4 days 12 hours 59 minutes'")
        query(url, "update holdfast.lease set acquired_at = clock_timestamp() - interval '2 days 3 hours'")
        query(url, "update holdfast.history set acquired_at = ended_at - interval '125 minutes'")
        eventually(
            lambda: (
                [client.leases.get(name).waiting for name in ("sweep", "@slot:gpu:1")] == [1, 1]  # type: ignore[union-attr]
                and query(url, "select 1 from holdfast.lock_name where name = %s", LOCK)
                and any(lock.blocked_by for lock in client.locks.list())
            ),
            "all of them wait, and the locks have their names",
        )
        yield url


def add_history(client: holdfast.Client, url: str) -> None:
    client.lease("sweep", holder="worker-2").acquire().release()
    client.lease("reindex", holder="worker-1", ttl=0.05, auto_renew=False).acquire()
    client.lease("reindex", holder="worker-2").acquire(timeout=60).release()
    client.lease(IMPORT, holder="importer@worker-16.eu-central-1.example.com:2291").acquire()
    reason = "its machine is being replaced after the disk failed twice this week"
    governed.run(client, "lease.release", {"name": IMPORT}, actor=JANE, reason=reason)
    with pytest.raises(governed.CommandRefused):
        governed.run(client, "lease.release", {"name": "swep"}, actor="bob", reason="stuck")
    reason = "new addresses for the whole of the northern cluster"
    governed.run(client, "gate.open", {"name": "dot_config", "seconds": 3600.0}, actor=JANE, reason=reason)


def add_operations(client: holdfast.Client, url: str) -> None:
    key = holdfast.OperationKey(pipeline="etl", task="load", dataset="parcels-north", operation="upsert", version="3")
    client.operation(key).run(lambda: 7)
    with pytest.raises(ConnectionResetError):
        client.operation("charge:42").run(fail)
    with pytest.raises(KeyboardInterrupt):
        client.operation("publish:7 of the catalogue of the northern region").run(die)
    asks = holdfast.governance.Review("who has seen the plan for the old cemetery, and did the council agree to it?")
    with holdfast.Client(url, policy=lambda _: asks) as asked:
        for dataset in ("graves", "graves-of-the-northern-region"):
            key = holdfast.OperationKey(pipeline="etl", task="load", dataset=dataset, operation="upsert")
            with pytest.raises(holdfast.PolicyDenied):
                asked.operation(key).run(int)


def screen(url: str, listing: str, columns: int) -> str:
    """What it writes to a terminal of that width, and below it what it writes to stderr."""
    with Running(*at(url, *listing.split()), columns=columns, HOLDFAST_POOLS=POOLS) as running:
        code, problems = running.end()
    assert code == 0, problems
    return COLOUR.sub("", running.text).replace("\r\n", "\n") + problems


def lock_screen(url: str, columns: int) -> str:
    """Pids, holders and durations of locks are the server's. The terminal is wider by what they take more than in the
    file."""
    usual = {"pid": "4242", "for": "2 m 07 s", "holder": "web-1:4242", "blocked by": "4242"}
    extra = 0
    while True:
        heading, *lines = screen(url, "locks", columns + extra).splitlines()
        rows = [line for line in lines if not line.startswith("hidden: ")]
        cells = {title: cell for title in usual if (cell := re.search(rf"(?<= ){title}(  +|$)", heading))}
        texts = {title: [row[slice(*cell.span())].strip() for row in rows] for title, cell in cells.items()}
        needed = sum(max(len(title), *map(len, texts[title])) - max(len(title), len(usual[title])) for title in cells)
        if needed == extra:
            break
        extra = needed
    shown = []
    for original in (heading, *rows):
        line = original
        for title in reversed(cells):  # from the right: the rest stays in place
            start, end = cells[title].span()
            end = len(line) if not cells[title][1] else end
            content = line[start:end].strip()
            replaced = content if content in (title, "-") else usual[title]
            width = max(len(title), len(usual[title]))
            line = f"{line[:start]}{replaced:<{width}}  {line[end:]}".rstrip()
        shown.append(line)
    return "\n".join([*shown, *(line for line in lines if line.startswith("hidden: "))]) + "\n"


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("listing", LISTINGS)
def test_a_listing_fits_the_terminal_a_row_a_line(crowded: str, listing: str, columns: int) -> None:
    shown = lock_screen(crowded, columns) if listing == "locks" else screen(crowded, listing, columns)
    shown = FENCE.sub("27799207915311", TIME.sub("2026-11-15 10:22:03", shown))
    table = shown.partition("hidden: ")[0]
    assert max(map(cell_len, table.splitlines())) <= columns
    path = SCREENS / f"{listing.replace(' ', '-')}-{columns}.txt"
    if not path.exists():
        path.write_text(shown, encoding="utf-8")
        pytest.fail(f"{path.name} is new: look at it")
    assert shown == path.read_text(encoding="utf-8")
