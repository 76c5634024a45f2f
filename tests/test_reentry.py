"""The same explicit holder once more, and what it does not get that way; a token, however it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from tests.children import eventually

Connect = Callable[..., Any]


def test_the_holder_of_a_lease_that_is_kept_waits_like_everybody(connect: Connect, either: str) -> None:
    """``at_least`` is for jobs that must not run twice within a time, and such jobs have a name."""
    client = connect(either)
    terms: dict[str, Any] = {"ttl": 5, "holder": "nightly", "at_least": 0.8}
    first = client.lease("import", **terms).acquire()
    assert first.release() is True
    for again in (client, connect(either)):
        with pytest.raises(holdfast.NotAcquired) as refused:
            again.lease("import", **terms).acquire()
        assert refused.value.holder == "nightly"
    second = client.lease("import", **terms).acquire(timeout=20)
    assert second.fence > first.fence
    assert [each.outcome for each in client.leases.history("import")] == ["released"], "nobody held it in between"


def test_the_holder_of_a_lease_that_is_held_still_re_enters(connect: Connect, either: str) -> None:
    """Until it is released, ``at_least`` changes nothing."""
    client = connect(either)
    terms: dict[str, Any] = {"ttl": 5, "renew_every": 0.05, "holder": "nightly", "at_least": 2}
    first, second = (client.lease("import", **terms).acquire() for _ in range(2))
    assert second.fence > first.fence
    eventually(lambda: first.lost, "the first learns")
    second.check()


def test_a_token_may_be_written_in_capitals(connect: Connect, either: str) -> None:
    client = connect(either)
    grant = client.lease("import").acquire()
    adopted = client.lease("import").adopt(grant.token.upper())
    assert adopted.token == grant.token
    assert adopted.renew() is True
    assert adopted.release() is True
    assert client.leases.list() == []
