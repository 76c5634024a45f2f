"""How late the slots of a schedule begin, and what a thousand schedules cost a process that waits for them."""

from __future__ import annotations

import threading
import time
from typing import Any

import holdfast
from bench.measure import Result
from bench.place import Place

SCHEDULES, SETTLED = 1000, 5.0
"""After so many seconds they are registered, and the looks have become regular."""
DAY = 86400


def schedule_lateness(place: Place) -> list[Result]:
    """From the slot to the first line of its work, by the database's clock: five slots a second, one process."""
    slots = 6 if place.effort.quick else 100
    results: list[Result] = []
    for label, url in (("PostgreSQL", place.postgres_url()), ("SQLite", place.sqlite_url("schedule"))):
        client = place.client(url)
        schedule, left = client.schedule("tick", 0.2), [slots]

        def work(_: Any, schedule: Any = schedule, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                schedule.stop()

        schedule.run(work)
        late = sorted(run.lateness for run in client.schedules.runs("tick", limit=slots) if run.lateness is not None)
        for name, part, aim in (("median", 0.5, ""), ("p99", 0.99, "50 ms")):
            value = late[int(len(late) * part)]
            base = results[0].value if results else value
            results.append(Result("schedule_lateness", f"{label}, {name}", value, "s", value / base, aim))
    return results


def schedule_idle(place: Place) -> list[Result]:
    """The processor time of 1,000 schedules that are not due, in one process on one connection."""
    number, settled, seconds = (20, 0.5, 0.5) if place.effort.quick else (SCHEDULES, SETTLED, 20.0)
    results: list[Result] = []
    for label, url in (("PostgreSQL", place.postgres_url()), ("SQLite", place.sqlite_url("idle"))):
        client = holdfast.Client(url, sessions=1)
        jobs = [client.every(DAY, name=f"job-{index}")(lambda _: None) for index in range(number)]
        thread = threading.Thread(target=client.schedules.run, args=(jobs,))
        thread.start()
        time.sleep(settled)
        began, cpu = time.monotonic(), time.process_time()
        time.sleep(seconds)
        share = (time.process_time() - cpu) / (time.monotonic() - began) * 1000
        jobs[0].stop()
        thread.join()
        client.close()
        base = results[0].value if results else share
        results.append(Result("schedule_idle", f"{label}, of a core", share, "‰", share / base, "10 ‰"))
    return results
