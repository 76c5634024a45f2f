"""An SQLite file that is replaced under those who have it open: they go on with the new one and are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.testing.server import until

Connect = Callable[..., Any]


def replace(path: Path) -> None:
    """As whoever restores a backup does, or begins anew."""
    with holdfast.Client(f"sqlite:///{path}.new") as client:
        client.objects.put_if("box", "new", {}, holdfast.MustCreate())
    for beside in ("-wal", "-shm", ".holdfast-turn", ".holdfast-live"):
        Path(f"{path}{beside}").unlink()
    Path(f"{path}.new").replace(path)


def held(client: Any, *ttls: float, **options: Any) -> Any:
    """A lease that heartbeats have renewed: the session for that stays open. Of several TTLs the first that the machine
    does not outlast by standing still."""
    for ttl in ttls:
        grant = client.lease(f"import-{ttl}", ttl=ttl, renew_every=0.05, **options).acquire()
        first = grant._trusted_until
        until(lambda: grant.lost or grant._trusted_until > first + 0.1, what="some heartbeats")  # noqa: B023
        if not grant.lost:
            return grant
    raise AssertionError(f"none of the TTLs {ttls} was long enough")


@pytest.mark.parametrize(("connect", "failover"), [("sync", "ttl"), ("async", "session")], indirect=["connect"])
def test_a_lease_in_the_old_file_is_lost(connect: Connect, tmp_path: Path, failover: str) -> None:
    """Its holder renewed it there for ever, and another process got it in the new one."""
    client = connect(f"sqlite:///{tmp_path / 'app.db'}")
    grant = held(client, 600, failover=failover)
    replace(tmp_path / "app.db")
    until(lambda: grant.lost, what="it is told")
    with pytest.raises((holdfast.LeaseLost, holdfast.OwnershipUnknown)):
        grant.check()
    assert client.lease(grant.name, ttl=60).acquire(timeout=60).fence


@pytest.mark.parametrize("connect", ["sync"], indirect=True)
def test_a_file_that_is_gone_keeps_no_lease(connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(f"sqlite:///{tmp_path / 'app.db'}")
    grant = held(client, 1.0, 5.0, 25.0)
    (tmp_path / "app.db").rename(tmp_path / "away.db")
    until(lambda: grant.lost, what="it is told")
    with pytest.raises(holdfast.OwnershipUnknown):
        grant.check()
    assert "was removed" in caplog.text
    assert not (tmp_path / "app.db").exists(), "and a heartbeat makes none, while somebody may be about to"


def test_a_client_in_steady_use_goes_on_with_the_new_file(connect: Connect, tmp_path: Path) -> None:
    client = connect(f"sqlite:///{tmp_path / 'app.db'}")
    client.objects.put_if("box", "old", {}, holdfast.MustCreate())
    replace(tmp_path / "app.db")
    until(lambda: client.objects.get("box", "new") is not None, what="it is seen")
    assert client.objects.get("box", "old") is None
