"""An SQLite file contains objects and results: it is its owner's alone unless the URL says otherwise, and readers
cannot lock it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast


@pytest.fixture(autouse=True)
def _generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def permissions_in_use(url: str, folder: Path) -> dict[str, str]:
    """The permissions of the file, of SQLite's own side files and of ours, while a lease and locks are held."""
    with holdfast.Client(url) as client, client.lease("a"), client.lock("a"), client.lock(("agent", 7)):
        return {each.name: f"{stat.S_IMODE(each.stat().st_mode):o}" for each in folder.iterdir()}


@pytest.mark.parametrize(
    ("option", "expected"), [("", "600"), ("?permissions=660", "660"), ("?permissions=666", "666")]
)
def test_a_file_is_created_with_the_permissions_of_its_url(tmp_path: Path, option: str, expected: str) -> None:
    found = permissions_in_use(f"sqlite:///{tmp_path}/app.db{option}", tmp_path)
    assert {"app.db", "app.db-wal", "app.db-shm", "app.db.holdfast-turn", "app.db.holdfast-locks"} <= found.keys()
    assert set(found.values()) == {expected}


@pytest.mark.parametrize(("existing", "beside"), [("644", "600"), ("664", "660"), ("640", "600")])
def test_a_reader_of_an_existing_file_cannot_open_its_locks(tmp_path: Path, existing: str, beside: str) -> None:
    (tmp_path / "app.db").touch(int(existing, 8))
    found = permissions_in_use(f"sqlite:///{tmp_path}/app.db?permissions=666", tmp_path)
    assert found.pop("app.db") == existing, "it stays as it is"
    assert {mode for name, mode in found.items() if ".holdfast-" in name} == {beside}


@pytest.mark.parametrize("given", ["", "777", "rw", "0660", "600&cache=shared"])
def test_other_permissions_are_refused_and_nothing_is_created(tmp_path: Path, given: str) -> None:
    with pytest.raises(ValueError, match=r"600 .*660 .*666"):
        holdfast.Client(f"sqlite:///{tmp_path}/app.db?permissions={given}")
    assert not list(tmp_path.iterdir())
