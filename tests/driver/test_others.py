"""Other users of the machine: the driver runs nothing of theirs, and its sandboxes learn no secret of the gateway."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import call
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
