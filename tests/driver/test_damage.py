"""A folder that somebody has damaged is told as such, and harms no other sandbox; and there are descriptors for all."""

from __future__ import annotations

import errno
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

import holdfast
from holdfast.driver import store
from holdfast.driver.daemon import DriverSettings, DriverStartRefused, _lock, run
from tests.children import PATIENCE, eventually
from tests.driver.daemon import Daemon, reaches, runs, state, text


def spoil(path: Path, content: str = "{") -> None:
    path.write_text(content, encoding="utf-8")


def away(path: Path) -> Path:
    path.rename(path.with_name("away"))
    return path


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no-spec": lambda box: (box / "spec.json").unlink(),
    "bad-spec": lambda box: spoil(box / "spec.json"),
    "poor-spec": lambda box: spoil(box / "spec.json", '{"id": "poor-spec", "run": "x", "created_at": 1}'),
    "other-spec": lambda box: shutil.copy(box.parent / "well" / "spec.json", box / "spec.json"),
    "list-spec": lambda box: spoil(box / "spec.json", "[]"),
    "bad-exit": lambda box: spoil(box / "exit.json"),
    "poor-exit": lambda box: spoil(box / "exit.json", "{}"),
    "bad-started": lambda box: spoil(box / "started.json", '{"pid": "x"}'),
    "bad-deleting": lambda box: spoil(box / "deleting", '{"grace": "long"}'),
    "no-lock": lambda box: (box / "lock").unlink(),
    "loop-exit": lambda box: away(box / "exit.json").symlink_to("exit.json"),
    "lock-folder": lambda box: away(box / "lock").mkdir(),
    "exit-folder": lambda box: away(box / "exit.json").mkdir(),
}


def damaged(client: holdfast.reconciler.ProcessDriver) -> set[str]:
    return {each.id for each in client.list() if each.conditions[0].reason == "Damaged"}


def test_damaged_folders_are_told_and_skipped_at_the_start_and_by_a_running_driver(daemon: Daemon) -> None:
    client = daemon.client()
    client.create("well", ["sleep", "1000"])
    for name in DAMAGE:
        client.create(name, ["true"])
    for name in DAMAGE:
        reaches(client, name, "Exited")
    pid = reaches(client, "well", "Started").details["pid"]
    for name, damage in DAMAGE.items():
        damage(daemon.box(name))
    found = client.get("bad-exit")
    assert found is not None
    assert (found.conditions[0].reason, found.conditions[0].terminal) == ("Damaged", True)
    assert "exit.json cannot be read" in found.conditions[0].message
    assert found.details["argv"] == ["true"], "what was known of it is"
    client.create("made-since", ["sh", "-c", "exit 3"])
    assert reaches(client, "made-since", "Exited").details["exit_code"] == 3
    daemon.end()
    daemon.box("notes.txt").write_text("to be looked at")
    daemon.start()
    assert runs(pid)
    assert state(client, "well") == "Started"
    assert damaged(client) == DAMAGE.keys() - {"bad-deleting"}
    assert '"id": "poor-spec", "reason": "Damaged"' in daemon.said()
    with pytest.raises(holdfast.DriverError, match="is damaged") as refused:
        client.create("bad-spec", ["true"])
    assert refused.value.status == 409
    for name in DAMAGE:
        assert client.delete(name, wait=PATIENCE), name
    assert {each.id for each in client.list()} == {"well", "made-since"}
    assert client.delete("well", wait=PATIENCE)
    assert not runs(pid)
    assert daemon.box("notes.txt").read_text() == "to be looked at", "what is no sandbox is none of its business"
    daemon.box("notes.txt").unlink()


def test_a_supervisor_is_not_missing_because_there_is_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not store.has_supervisor(tmp_path, missing=False)
    (tmp_path / "lock").mkdir()
    assert not store.has_supervisor(tmp_path, missing=False)
    with pytest.raises(store.Damaged):
        store.has_supervisor(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(OSError, match="Too many open files"):
            store.has_supervisor(tmp_path, missing=False)


def test_on_a_full_disk_the_driver_starts_and_a_sandbox_can_be_deleted(start: Callable[..., Daemon]) -> None:
    """What fills the disk may be what it writes, and then nothing else would make room. A device that is always full
    stands for the disk, wherever something is about to be written. Its supervisor is never taken for one that hangs."""
    daemon = start(before="from holdfast.driver import reconcile_folder; reconcile_folder.KILL_AFTER = 3600.0")
    client = daemon.client()
    client.create("hog", ["sh", "-c", "echo $$; exec sleep 1000"], grace=0.1)
    eventually(lambda: text(client, "hog"), "it runs")
    pid = reaches(client, "hog", "Started").details["pid"]
    for name in ("deleting", "exit.json"):
        (daemon.box("hog") / f"{name}.new").symlink_to("/dev/full")
    daemon.end()
    daemon.start()
    assert client.delete("hog", wait=PATIENCE)
    assert not runs(pid)


def test_a_full_disk_keeps_no_driver_from_its_lock(tmp_path: Path) -> None:
    """The pid in it is for messages. A device that is always full stands for the disk."""
    with Path("/dev/full").open("a+", encoding="utf-8") as lock:
        _lock(tmp_path, lock)


def test_a_folder_damaged_while_its_sandbox_runs_can_be_mended_or_deleted(daemon: Daemon) -> None:
    client = daemon.client()
    for name in ("mended", "deleted"):
        client.create(name, ["sh", "-c", "echo $$; exec sleep 1000"])
        eventually(lambda name=name: text(client, name), "it runs")  # type: ignore[misc]
    started = {name: (daemon.box(name) / "started.json").read_text() for name in ("mended", "deleted")}
    pids = {name: json.loads(each)["pid"] for name, each in started.items()}
    for name in started:
        spoil(daemon.box(name) / "started.json")
        assert state(client, name) == "Damaged"
        assert runs(pids[name]), "nothing is done to it"
    spoil(daemon.box("mended") / "started.json", started["mended"])
    reaches(client, "mended", "Started")
    assert client.delete("deleted", grace=0, wait=PATIENCE)
    assert not runs(pids["deleted"])


def test_there_are_descriptors_for_all_that_may_be_there_and_sandboxes_get_the_usual_number(
    start: Callable[..., Daemon],
) -> None:
    """With a soft limit that is far too low for the driver, which would otherwise hit all at once."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (150, {hard}))"
    daemon = start("--limit", "900", before=low)
    client = daemon.client()
    client.create("a", ["sh", "-c", "ulimit -n"])
    client.create("b", ["sh", "-c", "ulimit -n"], limits={"open_files": 77})
    for name, number in (("a", "150\n"), ("b", "77\n")):
        reaches(client, name, "Exited")
        assert text(client, name) == number
    [line] = [
        each for each in Path(f"/proc/{daemon.process.pid}/limits").read_text().splitlines() if "open files" in each
    ]
    assert int(line.split()[3]) >= 900 + 512


def test_more_sandboxes_than_the_kernel_gives_descriptors_for_are_refused_at_the_start(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("there is no limit here")
    with pytest.raises(DriverStartRefused, match=rf"and this process may have {hard}: raise the limit"):
        run(DriverSettings(tmp_path / "d", limit=hard))
    assert not (tmp_path / "d").exists()
