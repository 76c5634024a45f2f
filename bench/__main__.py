"""``python -m bench [NAME…] [--quick] [--json]``: run all benchmarks, or the named ones, and print a table of costs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from bench import (
    aims,
    costs,
    dashboard,
    gateway,
    load,
    load_page,
    load_picture,
    lock_handover,
    locks,
    objects,
    operations,
    processes,
    reconciler,
    schedules,
    unheard,
)
from bench.measure import Effort, Result, pin
from bench.place import Place
from holdfast.testing import available

BENCHMARKS: dict[str, Callable[[Place], list[Result]]] = {
    benchmark.__name__: benchmark
    for benchmark in (
        costs.pair,
        costs.sqlite,
        costs.refused,
        costs.protect,
        processes.heartbeat,
        processes.handover,
        processes.start,
        processes.memory,
        locks.lock_pair,
        locks.lock_tasks,
        lock_handover.lock_handover,
        locks.lock_held,
        locks.lock_memory,
        objects.objects,
        objects.elector,
        operations.operation,
        operations.replayed,
        operations.operation_batch,
        unheard.unheard,
        reconciler.sweep,
        schedules.schedule_lateness,
        schedules.schedule_idle,
        gateway.gateway,
        dashboard.dashboard,
        load.load,
    )
}
FAMILIES = {
    "locks": [name for name in BENCHMARKS if name.startswith("lock_")],
    "schedules": ["schedule_lateness", "schedule_idle"],
    "operations": ["operation", "replayed", "operation_batch", "unheard"],
}


def machine(core: int | None) -> dict[str, object]:
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "pinned to core": core,
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "postgresql": max(available(), default=None),
    }


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def human(result: Result) -> str:
    if result.unit != "s":
        return f"{result.value:,.0f} {result.unit}"
    return f"{result.value * 1e6:,.0f} µs" if result.value < 0.01 else f"{result.value * 1e3:,.1f} ms"


def show(results: list[Result], about: dict[str, object], seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("benchmark", no_wrap=True)
    table.add_column("variant", no_wrap=True)
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("aim", justify="right", no_wrap=True)
    previous = None
    for result in results:
        if previous is not None and result.benchmark != previous:
            table.add_section()
        label = "" if result.benchmark == previous else result.benchmark
        ratio = "" if result.ratio is None else f"{result.ratio:.2f}"
        table.add_row(label, result.variant, human(result), ratio, result.aim and f"≤ {result.aim}")
        previous = result.benchmark
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for verdict in aims.judge(results):
        console.print(str(verdict))
    console.print(", ".join(f"{key}: {value}" for key, value in about.items()), f"({seconds:.0f} s)")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"one of {', '.join(BENCHMARKS)}, or locks, operations, schedules; all by default",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few rounds on shared servers, only to see that the benchmarks run"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--beside", type=Path, metavar="CHECKOUT", help="load: measure another checkout in the same run"
    )
    parser.add_argument(
        "--docs", type=Path, metavar="FOLDER", help="load: write its picture and its block of benchmarks.md there"
    )
    arguments = parser.parse_args()
    names = [each for name in arguments.names for each in FAMILIES.get(name, [name])]
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {unknown[0]!r}: there are {', '.join(BENCHMARKS)}")
    began = time.monotonic()
    core = None if arguments.quick else pin()
    results: list[Result] = []
    with ExitStack() as kept:
        beside = arguments.beside
        shared = kept.enter_context(Place(Effort(quick=True), beside=beside)) if arguments.quick else None
        for name in names or BENCHMARKS:
            print(f"{name}: {BENCHMARKS[name].__doc__}", file=sys.stderr, flush=True)
            with nullcontext(shared) if shared else Place(Effort(quick=False), beside=beside) as place:
                results += BENCHMARKS[name](place)
    about = machine(core)
    if arguments.docs is not None:
        picture = load_picture.draw(results, load.CALLS)
        load_page.write(arguments.docs, results, aims.judge(results), about, picture)
    if arguments.json:
        judged = [{**each.aim._asdict(), "ratio": each.ratio, "met": each.met} for each in aims.judge(results)]
        report = {"machine": about, "results": [asdict(result) for result in results], "aims": judged}
        print(json.dumps(report, indent=2))
    else:
        show(results, about, time.monotonic() - began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
