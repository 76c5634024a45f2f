"""The reconciler with the real driver and real processes: what is started, killed, deleted or lost, records tell."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import holdfast
from holdfast import MustCreate
from tests.children import PATIENCE, until
from tests.driver.daemon import Daemon, runs

GRACE = 600.0


class Service:
    """One replica: it makes records and asks the driver to run them, and its reconciler tells what became of them."""

    def __init__(self, client: holdfast.AsyncClient, driver: holdfast.reconciler.AsyncProcessDriver) -> None:
        self.client, self.driver = client, driver
        self.reconciler = client.reconciler("sandbox", driver, sweep_every=0.2, grace=GRACE)
        self.elector = client.elector("reconciler", ttl=600)

    async def create(self, id: str, *argv: str) -> None:
        await self.client.objects.put_if("sandbox", id, {"spec": {"argv": [*argv]}}, MustCreate())
        await self.driver.create(id, argv)

    async def status(self, id: str) -> dict[str, Any] | None:
        record = await self.client.objects.get("sandbox", id)
        return None if record is None else record.payload.get("status", {})

    async def becomes(self, id: str, phase: str | None, *, missing: bool | None = None) -> dict[str, Any]:
        """Wait for that phase, and with ``missing`` until the record says so, or does not."""
        async with asyncio.timeout(PATIENCE):
            while True:
                status = await self.status(id)
                known = missing is None or missing is ("missing_since" in (status or {}))
                if known and (None if status is None else status.get("phase")) == phase:
                    return status or {}
                await asyncio.sleep(0.01)


@asynccontextmanager
async def service(url: str, daemon: Daemon) -> AsyncIterator[Service]:
    async with holdfast.AsyncClient(url) as client:
        made = Service(client, holdfast.reconciler.AsyncProcessDriver(daemon.address, timeout=PATIENCE))
        running = asyncio.create_task(made.elector.run(made.reconciler.run))
        try:
            await until(lambda: made.reconciler.status().watching, "it watches the driver")
            yield made
        finally:
            made.elector.stop()
            await running


async def test_a_record_follows_its_process_from_its_start_to_its_end(daemon: Daemon, sqlite_url: str) -> None:
    async with service(sqlite_url, daemon) as it:
        await it.create("web", "sleep", "1000")
        ready = await it.becomes("web", "Ready")
        pid = ready["details"]["pid"]
        assert runs(pid)
        assert [each["reason"] for each in ready["conditions"]] == ["Started"]
        os.kill(pid, signal.SIGKILL)
        failed = await it.becomes("web", "Error")
        assert failed["conditions"][0]["terminal"]
        assert failed["details"]["signal"] == signal.SIGKILL
        await it.create("ends", "sh", "-c", "exit 3")
        assert (await it.becomes("ends", "Error"))["details"]["exit_code"] == 3
        await it.create("done", "true")
        assert (await it.becomes("done", "Completed"))["details"]["exit_code"] == 0
        await it.create("missing", "/no/such/program")
        assert (await it.becomes("missing", "Error"))["conditions"][0]["reason"] == "SpawnFailed"
        assert it.reconciler.status().errors == 0


async def test_what_is_deleted_is_deleting_until_all_its_processes_are_gone(daemon: Daemon, sqlite_url: str) -> None:
    """A handler says so in the record, and asks the driver; the program takes its time to end."""
    async with service(sqlite_url, daemon) as it:
        wait = "trap 'while [ ! -e go ]; do sleep 0.02; done; exit' TERM; touch traps; while :; do sleep 0.02; done"
        await it.create("web", "sh", "-c", wait)
        pid = (await it.becomes("web", "Ready"))["details"]["pid"]
        await until((daemon.work("web") / "traps").exists, "a signal no longer ends the shell at once")
        assert await it.driver.delete("web", grace=600) is False
        deleting = await it.becomes("web", "Deleting")
        assert runs(pid)
        assert deleting["details"]["pid"] == pid
        (daemon.work("web") / "go").touch()
        await it.becomes("web", None)
        assert not runs(pid)


async def test_an_orphan_is_pruned_after_its_grace_and_a_second_look(
    start: Callable[..., Daemon], postgres_url: str, tmp_path: Path
) -> None:
    """Somebody removes two folders of the driver's, and one sandbox is made again before its grace is over. The record
    of the other is made older, and not waited for."""
    daemon = start(before="from holdfast.driver import reconcile_folder; reconcile_folder.TICK = 0.05")
    async with service(postgres_url, daemon) as it:
        for id in ("orphan", "back"):
            await it.create(id, "sleep", "1000")
            await it.becomes(id, "Ready")
        cursor = await it.client.objects.cursor()
        for id in ("orphan", "back"):
            daemon.box(id).rename(tmp_path / id)  # at once: half a folder would be a sandbox that has not started
        for id in ("orphan", "back"):
            while "missing_since" not in (status := await it.status(id) or {}):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert status["phase"] == "Ready", "it is only marked"
        await it.driver.create("back", ["sleep", "1000"])
        back = await it.becomes("back", "Ready", missing=False)
        assert back["conditions"][0]["reason"] == "Started"
        sweeps = it.reconciler.status().sweeps
        await until(lambda: it.reconciler.status().sweeps > sweeps + 1, "it is looked for again, and again")
        assert (await it.status("orphan") or {})["phase"] == "Ready", "its grace is not over"
        await it.client.objects.update("sandbox", "orphan", lambda record: older(record.payload, GRACE + 1))
        await it.becomes("orphan", None)
        async with it.client.objects.watch(since=cursor) as changes:
            told = [await changes.next(timeout=0) for _ in range(20)]
        looks = [each.kind for each in told if each is not None and each.id == "orphan"]
        assert looks == ["updated", "updated", "updated", "deleted"], "marked, made older, Deleted, removed"
        assert it.reconciler.status().removed == 1


def older(payload: dict[str, Any], seconds: float) -> dict[str, Any]:
    """As if its sandbox had been missing for so much longer."""
    status = payload["status"]
    return {**payload, "status": {**status, "missing_since": status["missing_since"] - seconds}}


async def test_records_stay_while_the_driver_is_away_and_follow_it_when_it_is_back(
    daemon: Daemon, postgres_url: str
) -> None:
    """A driver that does not answer is not one that has nothing; what happened meanwhile is in its folder."""
    async with service(postgres_url, daemon) as it:
        for id in ("stays", "dies"):
            await it.create(id, "sleep", "1000")
        pids = {id: (await it.becomes(id, "Ready"))["details"]["pid"] for id in ("stays", "dies")}
        before = await it.status("stays")
        daemon.end(signal.SIGKILL)
        failures = it.reconciler.status().driver_failures
        await until(lambda: it.reconciler.status().driver_failures > failures + 1, "it is missed")
        os.kill(pids["dies"], signal.SIGKILL)
        assert await it.status("stays") == before
        daemon.start()
        await it.becomes("dies", "Error")
        assert await it.status("stays") == before
        assert runs(pids["stays"])
