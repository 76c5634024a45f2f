"""``holdfast dashboard`` and ``holdfast explain``: any database, read-only, and reasons in sentences."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import holdfast
from tests.children import PATIENCE, until
from tests.cli.command import SCRIPT, ask, call, environment, invoke
from tests.conftest import server
from tests.dashboard.receiver import SECRET, receiving


@contextmanager
def _dashboard(url: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [SCRIPT, "dashboard", "--port", "0", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(HOLDFAST_URL=url)
    ) as process:
        assert process.stdout is not None
        try:
            name, _, address = process.stdout.readline().strip().partition(": ")
            assert name == "holdfast dashboard"
            yield process, address
        finally:
            process.kill()


def test_it_shows_the_database_and_ends_while_a_client_watches(url: str) -> None:
    with holdfast.Client(url) as client, client.lease("nightly-import", ttl=600), _dashboard(url) as (process, address):
        assert address.startswith("http://127.0.0.1:")
        with httpx.Client(base_url=address, timeout=PATIENCE) as http, http.stream("GET", "/events") as events:
            assert "nightly-import" in http.get("/").text
            lines = events.iter_lines()
            assert next(lines) == "retry: 2000"
            assert http.get("/", headers={"host": "evil.example"}).status_code == 421
            assert http.get("/none").status_code == 404
            form = {"reason": "a test", "plan": "none"}
            refused = http.post(
                "/act/lease.release?name=nightly-import", data=form, headers={"sec-fetch-site": "same-origin"}
            )
            assert (refused.status_code, "read-only" in refused.text) == (403, True)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        assert client.leases.get("nightly-import") is not None


def test_a_database_without_our_tables_is_a_problem_on_the_page() -> None:
    with _dashboard(server().database()) as (_, address):
        page = httpx.get(address, timeout=PATIENCE)
        assert page.status_code == 200
        assert "holdfast migrate" in page.text
        lists = httpx.get(f"{address}/leases", timeout=PATIENCE)
        assert lists.status_code == 200
        assert "holdfast migrate" in lists.text


def test_a_port_that_is_taken_is_an_error(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client, _dashboard(sqlite_url) as (_, address):
        client.leases.list()
        done = call("dashboard", "--port", address.rpartition(":")[2], HOLDFAST_URL=sqlite_url)
        assert (done.returncode, done.stdout) == (1, "")
        assert "cannot listen on 127.0.0.1 port" in done.stderr


async def test_a_new_problem_is_sent_and_the_secret_is_not_shown(url: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(f"{SECRET}\n")
    secret.chmod(0o600)
    async with holdfast.AsyncClient(url) as client, receiving() as receiver:
        await client.lease("gone", ttl=600).acquire()
        await client.leases.force_release("gone", actor="jane", reason="a test")
        options = ("--webhook", receiver.url, "--webhook-secret-file", str(secret))
        with _dashboard(url, *options) as (process, address):
            await until(lambda: receiver.of("gone"), "it is sent")
            async with httpx.AsyncClient(base_url=address, timeout=PATIENCE) as http:
                page = (await http.get("/")).text
                assert "dashboard:webhook:" in page, "its sender leads"
                assert "a-path-that-is-secret" not in page
            process.send_signal(signal.SIGTERM)
            _, stderr = await asyncio.to_thread(process.communicate)
            assert (process.returncode, stderr) == (0, "")
        assert "dashboard:webhook:" not in str(await client.leases.list()), "it was released"


def test_a_webhook_needs_a_secret_that_is_no_argument(sqlite_url: str, tmp_path: Path) -> None:
    target = ("dashboard", "--port", "0", "--webhook", "https://hooks.example/x")
    cases: tuple[tuple[dict[str, Any], tuple[str, ...], str], ...] = (
        ({}, (), "needs a secret of at least 16 characters"),
        ({"HOLDFAST_WEBHOOK_SECRET": "short"}, (), "needs a secret of at least 16 characters"),
        ({}, ("--webhook-secret-file", str(tmp_path / "none")), "cannot be read: No such file or directory"),
    )
    for more, options, message in cases:
        done = invoke(*target, *options, HOLDFAST_URL=sqlite_url, **more)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    done = invoke("dashboard", HOLDFAST_URL=sqlite_url, HOLDFAST_WEBHOOK="nonsense", HOLDFAST_WEBHOOK_SECRET=SECRET)
    assert (done.returncode, "must be a URL such as" in done.stderr) == (2, True), done.stderr


def test_a_name_is_explained(url: str) -> None:
    def boom() -> None:
        raise RuntimeError("the bucket is read-only")

    with holdfast.Client(url) as client:
        with client.lease("nightly-import", holder="worker-1", ttl=600) as grant:
            text = ask("explain", "nightly-import", HOLDFAST_URL=url)
            assert "Held by worker-1 on " in text
            assert ", acquired " in text
            assert f"with fence {grant.fence}" in text
        assert "its holder released it" in ask("explain", "nightly-import", HOLDFAST_URL=url)
        client.operation("load parcels").run(lambda: 7)
        assert "A run with this key is replayed" in ask("explain", "load parcels", HOLDFAST_URL=url)
        for _ in range(3):
            with pytest.raises((RuntimeError, holdfast.OperationFailed)):
                client.operation("publish tiles", retry=holdfast.Retry(attempts=2)).run(boom)
        text = ask("explain", "publish tiles", HOLDFAST_URL=url)
        assert "Refused until review 1 is decided" in text
        assert "Its error: RuntimeError: the bucket is read-only" in text
        client.schedule("backup", 3600).run_due(lambda slot: None)
        client.schedules.pause("backup", actor="jane", reason="maintenance")
        text = ask("explain", "backup", HOLDFAST_URL=url)
        assert "Paused" in text
        assert "maintenance" in text
    done = call("explain", "none", HOLDFAST_URL=url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "holdfast: nothing in this database has the name 'none'\n"
