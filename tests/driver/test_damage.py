"""A folder that somebody has damaged is told as such, and harms no other sandbox; and there are descriptors for all."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from itertools import product
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


def fifo(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    """More than the memory of most machines, and next to nothing on the disk."""
    path.touch()
    os.truncate(path, 3 * 2**30)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


HOSTILE: dict[str, Callable[[Path], object]] = {
    "fifo": fifo,
    "sparse": sparse,
    "endless": endless,
    "folder": Path.mkdir,
}
FILES = (
    "spec.json",
    "deleting",
    "started.json",
    "exit.json",
    "running",
    "lock",
    "orders",
    "life",
    "log.0",
    "supervisor.err",
)
WHEN = ("in", "now", "after")
"""While it runs, to be deleted at the end or by the driver that runs then; after its exit."""
LOGS = ("log.999999999999999999", "log.00", "log.\u0663", "log.5")


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


def test_nothing_in_the_place_of_a_file_stops_the_driver(start: Callable[..., Daemon]) -> None:
    """Before its start and while it runs. A FIFO has no other end; two of the files have no end. All are deleted.

    Each kind is in the place of each file, at one of three times: of each two of these there is every pair."""
    daemon = start(before="from holdfast.driver import reconcile_folder; reconcile_folder.KILL_AFTER = 0.5")
    client = daemon.client()
    client.create("well", ["sleep", "1000"])
    pid = reaches(client, "well", "Started").details["pid"]
    pids, places = [], {}
    for (row, name), (column, kind) in product(enumerate(FILES), enumerate(HOSTILE)):
        when = WHEN[(row + column) % len(WHEN)]
        places[f"{when}-{kind}-{name}"] = kind, name
    for id in places:
        is_over = id.startswith("after-")
        client.create(id, ["true"] if is_over else ["sh", "-c", "echo begun; exec sleep 1000"], grace=0.1)
    for id in places:
        if id.startswith("after-"):
            reaches(client, id, "Exited")
        else:
            pids.append(reaches(client, id, "Started").details["pid"])
    for id, (kind, name) in places.items():
        path = daemon.box(id) / name
        if path.exists():
            path.rename(path.with_name("away"))
        HOSTILE[kind](path)
        for log in LOGS:
            path.with_name(log).symlink_to("nothing")
        HOSTILE[kind](path.with_name("deleting.new"))
    for _ in range(2):
        for each in client.list():
            client.get(each.id)
            with suppress(holdfast.DriverError):
                b"".join(client.log(each.id, tail=3))
            with suppress(holdfast.DriverError):
                b"".join(client.log(each.id))
        client.create("since", ["sh", "-c", "exit 3"])
        assert reaches(client, "since", "Exited").details["exit_code"] == 3
        assert client.delete("since", wait=PATIENCE)
        peak = Path(f"/proc/{daemon.process.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
        assert int(peak) < 300_000, "kB"
        assert state(client, "well") == "Started"
        for id in places:
            if id.startswith("now-"):
                assert client.delete(id, wait=PATIENCE), id
        assert daemon.end(signal.SIGTERM) == 0
        daemon.start()
    for each in client.list():
        if each.id != "well":
            client.delete(each.id)
    for each in client.list():
        assert each.id == "well" or client.delete(each.id, wait=PATIENCE), each.id
    assert runs(pid)
    assert not [each for each in pids if runs(each)]
    eventually(lambda: [each.name for each in daemon.folder.glob("work/*")] == ["well"], "their folders are removed")


def test_a_sandbox_that_lies_about_its_files_ends_and_kills_no_other(start: Callable[..., Daemon]) -> None:
    """It stops its supervisor, names the driver as its supervisor, and wants no number as its grace."""
    daemon = start(before="from holdfast.driver import reconcile_folder; reconcile_folder.KILL_AFTER = 0.5")
    client = daemon.client()
    client.create("liar", ["sleep", "1000"], grace=0.1)
    pid = reaches(client, "liar", "Started").details["pid"]
    numbers = json.loads((daemon.box("liar") / "started.json").read_text())
    os.kill(numbers["supervisor"], signal.SIGSTOP)
    for field, value in (("pid", 2**70), ("started_at", float("inf")), ("started_at", 10**400), ("pid", -(2**31))):
        spoil(daemon.box("liar") / "started.json", json.dumps({**numbers, field: value}))
        assert state(client, "liar") == "Damaged"
    spoil(daemon.box("liar") / "started.json", json.dumps({**numbers, "supervisor": daemon.process.pid}))
    assert state(client, "liar") == "Started"
    spoil(daemon.box("liar") / "deleting", '{"grace": NaN}')
    assert client.delete("liar", grace=0, wait=PATIENCE)
    assert not runs(pid)
    assert runs(daemon.process.pid)


def test_a_supervisor_is_not_missing_because_there_is_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not store.has_supervisor(tmp_path, missing=False)
    (tmp_path / "lock").mkdir()
    assert not store.has_supervisor(tmp_path, missing=False)
    with pytest.raises(store.Damaged):
        store.has_supervisor(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(OSError, match="Too many open files"):
            store.has_supervisor(tmp_path, missing=False)


def test_on_a_full_disk_the_driver_starts_and_a_sandbox_can_be_deleted(start: Callable[..., Daemon]) -> None:
    """What fills the disk may be what it writes, and then nothing else would make room. Instead of the disk, the driver
    may write no byte to any file, and its supervisor writes to a device that is always full; it is never taken for one
    that hangs."""
    daemon = start()
    client = daemon.client()
    client.create("hog", ["sh", "-c", "echo $$; exec sleep 1000"], grace=0.1)
    eventually(lambda: text(client, "hog"), "it runs")
    pid = reaches(client, "hog", "Started").details["pid"]
    (daemon.box("hog") / "exit.json.new").symlink_to("/dev/full")
    daemon.end()
    start(
        before="import resource; from holdfast.driver import reconcile_folder; reconcile_folder.KILL_AFTER = 3600.0; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (0, {resource.getrlimit(resource.RLIMIT_FSIZE)[1]}))"
    )
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
