"""holdfast doctor on SQLite: every condition that can be brought about here is really brought about."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.testing.server_user import server_user
from tests.children import PATIENCE
from tests.cli.command import SCRIPT, at, environment, invoke, valid

CHECKS = {
    "boot", "connection", "fences", "filesystem", "integrity", "journal", "schema", "space", "version", "writable",
    "lineage", "write_lock",
}  # fmt: skip
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


def read(done: subprocess.CompletedProcess[str], code: int) -> dict[str, dict[str, Any]]:
    assert done.returncode == code, done.stdout + done.stderr
    document = valid("doctor", done.stdout)
    return {finding["check"]: finding for finding in document["findings"]}


def doctor(url: str, *arguments: str, code: int = 0) -> dict[str, dict[str, Any]]:
    return read(invoke(*at(url, "doctor", "--json", "--timeout", f"{PATIENCE:g}", *arguments)), code)


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment(), stdin=subprocess.DEVNULL
    )


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'app.db'}"


@pytest.fixture
def used_url(sqlite_url: str) -> str:
    """A file that has been in use."""
    with holdfast.Client(sqlite_url) as client:
        client.lease("import").acquire().release()
    return sqlite_url


def path(url: str) -> Path:
    return Path(url.removeprefix("sqlite:///"))


def test_a_file_in_use_passes_every_check(used_url: str) -> None:
    with holdfast.Client(used_url) as client, client.lease("import") as grant:
        findings = doctor(used_url)
        grant.check()
    assert findings.keys() == CHECKS
    assert {check for check, each in findings.items() if each["status"] != "ok"} <= {"filesystem"}, "be it in memory"
    assert findings["journal"]["found"] == "WAL"


def test_a_file_that_is_not_there_is_a_warning_and_stays_away(sqlite_url: str) -> None:
    findings = doctor(sqlite_url)
    assert findings["connection"]["status"] == "warn"
    assert "there is no such file" in findings["connection"]["found"]
    assert list(path(sqlite_url).parent.iterdir()) == []


def test_a_file_that_is_not_holdfasts_yet_is_left_as_it_is(sqlite_url: str) -> None:
    """Its journal is its owner's choice until a client begins to use it."""
    with closing(sqlite3.connect(path(sqlite_url))) as file:
        file.execute("create table orders (id)")
    before = path(sqlite_url).read_bytes()
    assert doctor(sqlite_url)["journal"]["found"] == "delete: the next client that opens the file switches to WAL"
    with holdfast.Client(sqlite_url) as client, client.read_only() as onlooker:
        assert onlooker.migrations.version() == 0
    assert path(sqlite_url).read_bytes() == before


def test_a_missing_folder_fails(tmp_path: Path) -> None:
    findings = doctor(f"sqlite:///{tmp_path}/no/where.db", code=1)
    assert {check for check, each in findings.items() if each["status"] == "fail"} == {"connection", "writable"}


def test_a_file_that_is_no_database_fails(sqlite_url: str) -> None:
    path(sqlite_url).write_text("a letter to a friend, long enough to be read\n" * 30)
    findings = doctor(sqlite_url, code=1)
    assert findings["connection"]["status"] == "fail"
    assert "not a database" in findings["connection"]["found"]


def test_a_folder_that_this_user_may_not_write_to_fails(used_url: str) -> None:
    folder = path(used_url).parent
    server_user().own(folder)
    for each in folder.iterdir():
        server_user().own(each)
    folder.chmod(0o555)
    try:
        prefix = server_user().prefix if os.geteuid() == 0 else ()
        findings = read(run([*prefix, SCRIPT, *at(used_url, "doctor", "--json")]), 1)
    finally:
        folder.chmod(0o755)
    assert findings["writable"]["status"] == "fail"
    assert str(folder) in findings["writable"]["found"]


def test_a_small_disk_in_memory_is_told(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=1m none "{tmp_path}" && exec "$@"'
    prefix = [*NAMESPACE, "sh", "-c", mount, "sh"]
    if shutil.which("unshare") is None or run([*prefix, "true"]).returncode:
        pytest.skip("this system lets nobody mount anything")
    findings = read(run([*prefix, SCRIPT, *at(f"sqlite:///{tmp_path}/app.db", "doctor", "--json")]), 1)
    assert (findings["filesystem"]["status"], findings["space"]["status"]) == ("warn", "fail")
    assert "tmpfs" in findings["filesystem"]["found"]


def test_a_newer_schema_fails(used_url: str) -> None:
    with closing(sqlite3.connect(path(used_url), isolation_level=None)) as file:
        file.execute("insert into holdfast_schema_version (version, name) values (99, 'tomorrow')")
    assert doctor(used_url, code=1)["schema"]["remedy"] == "Upgrade holdfast."


def test_damage_in_our_tables_fails(used_url: str) -> None:
    with closing(sqlite3.connect(path(used_url), isolation_level=None)) as file:
        file.execute("pragma wal_checkpoint(truncate)")
        [[size]] = file.execute("pragma page_size")
        [[page]] = file.execute("select rootpage from sqlite_schema where name = 'holdfast_history'")
    with path(used_url).open("r+b") as raw:
        raw.seek((page - 1) * size)
        raw.write(b"\xff" * 64)
    findings = doctor(used_url, code=1)
    assert findings["integrity"]["status"] == "fail"
    assert "damaged" in findings["integrity"]["found"]


def test_a_write_lock_that_somebody_keeps_fails_in_bounded_time(used_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.doctor.examine._PROBE", 0.1)
    with closing(sqlite3.connect(path(used_url), isolation_level=None)) as file:
        file.execute("begin immediate")
        findings = doctor(used_url, code=1)
        file.execute("rollback")
    assert {check for check, each in findings.items() if each["status"] == "fail"} == {"write_lock"}
    monkeypatch.undo()
    assert doctor(used_url)["write_lock"]["status"] == "ok"
