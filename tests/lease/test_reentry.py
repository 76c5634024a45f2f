"""The same explicit holder once more, what proves that it is the same, and what it does not get that way; a token,
however it is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

import holdfast
from tests.children import eventually
from tests.conftest import MAJORS, NEWEST, for_one_test, migrated
from tests.database.test_privileges import role
from tests.pairs import EACH_ONCE
from tests.raw_session import Raw

Connect = Callable[..., Any]
SECRET = "a long random text"


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
def test_who_repeats_the_label_of_the_holder_has_to_know_its_secret(connect: Connect, either: str) -> None:
    client, stranger = connect(either), connect(either)
    terms: dict[str, Any] = {"ttl": 600, "renew_every": 0.05, "holder": "nightly"}
    first = client.lease("import", **terms).acquire()
    for guess in (None, "a guess", "nightly", first.token):
        assert stranger.lease("import", reenter=guess, **terms).try_acquire() is None
    first.check()
    assert client.lease("import", **terms).acquire().release() is True, "it remembers its own secret"
    held = client.lease("import", reenter=SECRET, **terms).acquire()
    assert stranger.lease("import", **terms | {"holder": "other"}, reenter=SECRET).try_acquire() is None
    assert stranger.lease("import", **terms).try_acquire() is None
    with closing(Raw(either)) as raw:
        assert SECRET not in str([raw.rows(table) for table in ("lease", "beat", "history")])
    heir = stranger.lease("import", reenter=SECRET, **terms).acquire()
    assert heir.fence > held.fence
    eventually(lambda: held.lost, "the earlier grant learns")
    assert client.lease("import", **terms).acquire().fence > heir.fence, "it remembers the secret that it was given"
    heir = stranger.lease("import", reenter=SECRET, **terms).acquire()
    assert heir.release() is True
    mine = stranger.lease("import", **terms | {"holder": "third"}).acquire()
    assert client.lease("import", **terms | {"holder": "third"}, reenter=SECRET).try_acquire() is None
    mine.check()


@pytest.mark.parametrize("major", [MAJORS[0], NEWEST], indirect=False)
def test_another_role_does_not_re_enter_and_the_history_names_the_role(major: int) -> None:
    url = for_one_test(major)
    grants = ("grant usage on schema holdfast", "grant execute on all functions in schema holdfast")
    urls = [role(url, *grants) for _ in range(2)]
    terms: dict[str, Any] = {"ttl": 600, "holder": "nightly", "reenter": SECRET}
    with holdfast.Client(urls[0]) as mine, holdfast.Client(urls[1]) as other, holdfast.Client(urls[0]) as twin:
        first = mine.lease("import", **terms).acquire()
        assert other.lease("import", **terms).try_acquire() is None
        assert twin.lease("import", **terms).acquire().fence > first.fence
        assert other.leases.force_release("import", actor="jane", reason="test") is True
        other.lease("import", **terms).acquire().release()
        names = [each.partition("//")[2].partition("@")[0] for each in urls]
        assert [(each.outcome, each.role) for each in mine.leases.history("import")] == [
            ("released", names[1]), ("forced", names[0]), ("reentered", names[0]),
        ]  # fmt: skip


def test_a_file_has_no_roles(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.lease("import").acquire().release()
        assert [each.role for each in client.leases.history()] == [None]


def test_a_secret_is_checked_and_never_quoted(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        for bad in ("", "x" * 201, "line\nbreak", 7):
            with pytest.raises((ValueError, TypeError), match="reenter must") as refused:
                client.lease("import", holder="nightly", reenter=bad)  # type: ignore[arg-type]
            assert str(bad) not in str(refused.value) or not bad or bad == 7
        with pytest.raises(ValueError, match="reenter needs holder="):
            client.lease("import", reenter=SECRET)


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
