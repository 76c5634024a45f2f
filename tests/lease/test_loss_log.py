"""Every lost lease is one WARNING with its name and what happened, whatever ``on_lost`` is; a lock as well."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.testing import Proxy
from tests.children import Child, eventually, query
from tests.pairs import EACH_ONCE

FAST: dict[str, Any] = {"ttl": 600.0, "renew_every": 0.05}
WHY: dict[str, Any] = {"actor": "jane", "reason": "its machine is gone"}
FORCED = "it was taken away by force by jane: its machine is gone"

Connect = Callable[..., Any]


def losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Each record about a loss, whatever its event is called."""
    records = [each for each in caplog.records if " is lost" in each.getMessage() or " lost:" in each.getMessage()]
    assert all(each.levelno == logging.WARNING for each in records)
    assert all(each.event in ("lease.lost", "lock.lost") for each in records)  # type: ignore[attr-defined]
    return sorted(each.getMessage() for each in records)


@pytest.mark.parametrize("on_lost", ["flag", print])
@EACH_ONCE
def test_a_forced_release_names_who_and_why(
    connect: Connect, either: str, on_lost: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(either)
    with client.lease("import", **FAST, on_lost=on_lost) as grant:
        client.leases.force_release("import", **WHY)
        eventually(lambda: grant.lost, "the heartbeat learns of it")
        eventually(lambda: losses(caplog) == [f"lease 'import' is lost: {FORCED}"], "one WARNING")
        with pytest.raises(holdfast.LeaseLost, match=FORCED):
            grant.check()
    assert losses(caplog) == [f"lease 'import' is lost: {FORCED}"]
    [record] = [each for each in caplog.records if getattr(each, "event", "") == "lease.lost"]
    assert (record.lease, record.fence, record.kind) == ("import", grant.fence, "lease")  # type: ignore[attr-defined]


def test_a_cancelled_block_is_reported_as_well(either: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with holdfast.AsyncClient(either) as client, client.lease("import", **FAST, on_lost="cancel"):
            await client.leases.force_release("import", **WHY)
            await asyncio.sleep(600)

    with pytest.raises(holdfast.LeaseLost, match="jane"):
        asyncio.run(main())
    assert losses(caplog) == [f"lease 'import' is lost: {FORCED}"]


@EACH_ONCE
def test_leases_that_are_lost_together_are_one_warning_each(
    connect: Connect, either: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(either)
    grants = [client.lease(f"shard-{number}", **FAST).acquire() for number in range(5)]
    kept = client.lease("kept", **FAST).acquire()
    for grant in grants[:4]:
        client.leases.force_release(grant.name, actor="jane", reason=f"{grant.name} moves {{}}")
    with holdfast.Client(either) as other:
        other.lease("shard-4", **FAST).adopt(grants[4].token).release()
    eventually(lambda: all(grant.lost for grant in grants), "all are lost")
    wanted = [
        f"lease 'shard-{number}' is lost: it was taken away by force by jane: shard-{number} moves {{}}"
        for number in range(4)
    ]
    wanted.append("lease 'shard-4' is lost: it was released with its token, by another grant")
    eventually(lambda: losses(caplog) == wanted, "one WARNING each")
    assert not kept.lost


@EACH_ONCE
def test_a_twin_is_named(connect: Connect, either: str, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(either)
    terms = {**FAST, "holder": "service", "reenter": "our secret"}
    first = client.lease("import", **terms).acquire()
    with holdfast.Client(either) as twin:
        twin.lease("import", **terms).acquire()
        eventually(lambda: first.lost, "the first learns of it")
        eventually(
            lambda: losses(caplog) == ["lease 'import' is lost: another process of the same holder took it over"],
            "one WARNING",
        )


@pytest.mark.parametrize("call", ["renew", "release", "check"])
@EACH_ONCE
def test_a_lease_without_a_heartbeat_is_reported_by_the_call_that_notices(
    connect: Connect, either: str, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    client = connect(either)
    ttl = 0.1 if call == "check" else 600.0
    grant = client.lease("import", ttl=ttl, auto_renew=False).acquire()
    if call == "check":
        eventually(lambda: grant.lost, "it has expired")
        wanted = ["lease 'import' could not be confirmed in time: it may have passed on"]
        assert [each.getMessage() for each in caplog.records if each.event == "lease.lost"] == wanted  # type: ignore[attr-defined]
        return
    client.leases.force_release("import", **WHY)
    assert losses(caplog) == []
    if call == "release":
        assert grant.release() is False
    else:
        with pytest.raises(holdfast.LeaseLost, match=FORCED):
            grant.renew()
    for _ in range(2):
        assert grant.release() is False
    assert losses(caplog) == [f"lease 'import' is lost: {FORCED}"]


def test_a_lease_that_is_kept_or_released_is_not_reported(either: str, caplog: pytest.LogCaptureFixture) -> None:
    with holdfast.Client(either) as client:
        with client.lease("a", **FAST), client.lease("b", ttl=600, auto_renew=False), client.lock("c"):
            pass
        client.lease("d", **FAST).acquire()
    assert losses(caplog) == []


PAUSED = """
import logging, os, sys, holdfast
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
with holdfast.Client(sys.argv[1]) as client:
    with client.lease("import", ttl=5, on_lost=sys.argv[2]) as grant:
        os.write(1, b"held\\n")
        input()
    os.write(1, b"left\\n")
"""


@pytest.mark.parametrize(("either", "on_lost"), [("sqlite", "flag"), ("postgres", "exit")], indirect=["either"])
def test_a_pause_is_reported_with_its_length(either: str, on_lost: str) -> None:
    """Whichever thread comes first after it: the one that renews, or the one that leaves the block."""
    with holdfast.Client(either) as client, Child(PAUSED, either, on_lost) as child:
        child.expect("held")
        child.signal(signal.SIGSTOP)
        eventually(lambda: client.leases.get("import") is None, "it has expired")
        child.say("go on")
        child.signal(signal.SIGCONT)
        lines = [line for line in iter(child.line, "<end>") if line != "left"]
        expected = r"WARNING lease 'import' is lost: it expired while this process was paused for (\d+\.\d) s or more"
        assert (paused := re.fullmatch(expected, lines[0])), lines
        assert float(paused[1]) > 0
        if on_lost == "flag":
            assert len(lines) == 1
        else:
            assert lines[1:] in ([], ["CRITICAL on_lost='exit' of lease 'import': this process ends now"])


@pytest.mark.parametrize("connect", ["async"], indirect=True)
def test_a_database_that_does_not_answer_is_named(
    connect: Connect, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(postgres_url) as proxy:
        client = connect(proxy.url)
        grants = [client.lease(name, ttl=1.5).acquire() for name in ("a", "b")]
        proxy.stall()
        eventually(lambda: all(grant.lost for grant in grants), "trust in both has ended")
        start = "lease {!r} is lost: the database did not answer before our trust in it ended ("
        eventually(lambda: len(losses(caplog)) == 2, "one WARNING each")
        for name, line in zip("ab", losses(caplog), strict=True):
            assert line.startswith(start.format(name)), line
        proxy.heal()


@pytest.mark.parametrize("connect", ["async"], indirect=True)
def test_a_session_that_is_gone_is_named(connect: Connect, postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(postgres_url)
    grant = client.lease("import", ttl=600, failover="session").acquire()
    lock = client.lock("a").acquire()
    query(
        postgres_url,
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where application_name like 'holdfast:%%' and datname = current_database()",
    )
    eventually(lambda: grant.lost and lock.lost, "both are lost")
    eventually(lambda: len(losses(caplog)) == 2, "one WARNING each")
    of_lease, of_lock = losses(caplog)
    assert of_lease.startswith("lease 'import' is lost: the session that held it was lost (")
    assert of_lock.startswith("lock 'a' is lost: ")
    warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert [line for line in warnings if "lock" in line] == [of_lock]
