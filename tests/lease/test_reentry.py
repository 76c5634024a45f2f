"""The same explicit holder once more, and what it does not get that way; a token, however it is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

import holdfast
from tests.children import eventually
from tests.conftest import migrated
from tests.pairs import EACH_ONCE
from tests.raw_session import Raw

Connect = Callable[..., Any]


@EACH_ONCE
def test_the_holder_of_a_lease_that_is_kept_waits_like_everybody(connect: Connect, either: str) -> None:
    """``at_least`` is for jobs that must not run twice within a time, and such jobs have a name."""
    client = connect(either)
    terms: dict[str, Any] = {"ttl": 60, "holder": "nightly", "at_least": 3600}
    first = client.lease("import", **terms).acquire()
    assert first.release() is True
    for again in (client, connect(either)):
        with pytest.raises(holdfast.NotAcquired) as refused:
            again.lease("import", **terms).acquire()
        assert refused.value.holder == "nightly"
    with closing(Raw(either)) as raw:
        raw.pass_time(3600)
    second = client.lease("import", **terms).acquire()
    assert second.fence > first.fence
    assert [each.outcome for each in client.leases.history("import")] == ["released"], "nobody held it in between"


@EACH_ONCE
def test_the_holder_of_a_lease_that_is_held_still_re_enters(connect: Connect, either: str) -> None:
    """Until it is released, ``at_least`` changes nothing."""
    client = connect(either)
    terms: dict[str, Any] = {"ttl": 600, "renew_every": 0.05, "holder": "nightly", "at_least": 2}
    first, second = (client.lease("import", **terms).acquire() for _ in range(2))
    assert second.fence > first.fence
    eventually(lambda: first.lost, "the first learns")
    second.check()


@EACH_ONCE
def test_a_token_may_be_written_in_capitals(connect: Connect, either: str) -> None:
    client = connect(either)
    grant = client.lease("import").acquire()
    adopted = client.lease("import").adopt(grant.token.upper())
    assert adopted.token == grant.token
    assert adopted.renew() is True
    assert adopted.release() is True
    assert client.leases.list() == []


def test_a_beat_whose_session_is_gone_takes_nothing_over_from_itself(either: str) -> None:
    """Another thread of a process asks for what the process has, when its session has just gone. The beat that both
    would live on must not be declared dead under the new grant."""
    with closing(Raw(migrated(either))) as raw:
        key = 4_711  # held by nobody
        held = raw.acquire("import", "a", session_key=key, solo=False)
        again = raw.acquire("import", "b", beat=held["beat"], session_key=key)
        assert again["status"] == "beat_lost"
        assert raw.renew("import", held["token"]), "nothing was written"
        taken = raw.acquire("import", "b", solo=False)
        assert (taken["status"], taken["held_by"]) == ("taken_over", "a")
