"""Other users of the machine: the driver runs nothing of theirs, and its sandboxes learn no secret of the gateway."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from holdfast.gateway import driver_process
from holdfast.gateway.driver_process import DriverProcess
from tests.cli.command import call
from tests.driver.daemon import Daemon, reaches, text
from tests.gateway.replicas import Replica


def writable(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def writable_inside(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "sandboxes").mkdir()
    (folder / "sandboxes").chmod(0o775)


def linked_inside(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "sandboxes").symlink_to(folder.parent)


def of_another_user(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("root alone may give files away")
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (writable, "can be written to by other users (mode 777)"),
        (writable_inside, "sandboxes can be written to by other users (mode 775)"),
        (linked_inside, "sandboxes is a link"),
        (of_another_user, "belongs to the user with id 65534"),
    ],
)
def test_a_folder_that_others_may_have_filled_is_refused(
    prepare: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    prepare(tmp_path / "d")
    done = call("driver", "--folder", str(tmp_path / "d"))
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Give another --folder" in done.stderr
    assert not (tmp_path / "d" / "driver.lock").exists()


def test_a_lock_that_is_a_link_is_refused_and_its_target_untouched(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "d").mkdir(mode=0o700)
    (tmp_path / "d" / "driver.lock").symlink_to(tmp_path / "precious")
    done = call("driver", "--folder", str(tmp_path / "d"))
    assert done.returncode == 2
    assert "cannot write to the folder" in done.stderr
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_sandbox_reads_no_variable_of_ours_in_its_parent(start: Callable[..., Daemon]) -> None:
    secret = "0123456789abcdef" * 2
    daemon = start("--port", "0", HOLDFAST_DRIVER_TOKEN=secret, HOLDFAST_URL="postgresql://db/app", SHADE="green")
    client = daemon.client(token=secret)
    client.create("a", ["sh", "-c", r"tr '\0' '\n' </proc/$PPID/environ"])
    reaches(client, "a", "Exited")
    lines = text(client, "a").splitlines()
    assert "SHADE=green" in lines, "it could read them"
    assert [line for line in lines if line.startswith("HOLDFAST_")] == []


async def test_a_look_for_the_driver_that_fails_at_once_leaves_the_event_loop_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without descriptors: it fails before it suspends, again and again."""
    process, looks, turns = DriverProcess(str(tmp_path), end_sandboxes=False), 0, 0

    async def fail() -> bool:
        nonlocal looks
        looks += 1
        assert looks < 1000, "the loop never turns"
        return False

    monkeypatch.setattr(process, "_answers", fail)
    monkeypatch.setattr(process, "_process", Mock(returncode=None))
    monkeypatch.setattr(driver_process, "_RETRY_AFTER", 0.001)
    running = asyncio.create_task(process.ensure_running())
    while not running.done() and turns < 100:
        turns += 1
        await asyncio.sleep(0)
    assert not running.done()
    running.cancel()
    assert looks < 100


def test_a_gateway_gives_its_driver_no_secret_and_says_what_others_may_do_without_tokens(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    secret = "0123456789abcdef" * 2
    with Replica(url, tmp_path, HOLDFAST_TOKENS=f"ops operate {secret}", HOLDFAST_DRIVER_TOKEN=secret) as replica:
        [started] = replica.events("driver.started")
        environment = Path(f"/proc/{started['pid']}/environ").read_bytes()
        assert b"HOLDFAST_REPLICA_ID" in environment
        assert secret.encode() not in environment
        assert url.encode() not in environment
        assert replica.events("gateway.open") == []
    with Replica(f"sqlite:///{tmp_path}/open.db", tmp_path, name="open") as replica:
        [event] = replica.events("gateway.open")
        assert "no tokens are set" in event["why"]
        assert f"as the user with id {os.geteuid()}" in event["why"]
        replica.process.send_signal(signal.SIGTERM)
