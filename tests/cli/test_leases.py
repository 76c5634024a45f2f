"""holdfast ls, history and release, as processes of their own, on both engines."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
from datetime import UTC, datetime
from typing import Any

import pytest

import holdfast
from tests.children import eventually, pass_time
from tests.cli.command import Running, ask, at, call, columns_of, invoke, printed, valid
from tests.conftest import server

FAST: dict[str, Any] = {"ttl": 30.0, "renew_every": 0.05}


def test_ls_shows_who_holds_what_since_when_and_for_how_long(either: str) -> None:
    with holdfast.Client(either) as client:
        import_ = client.lease("nightly import", holder="cron on db1").acquire()
        client.lease("sweep", ttl=7200).acquire()
        first, second = columns_of(ask(*at(either, "ls")))
        assert first["lease"] == "nightly import"
        assert (first["holder"], first["host"], first["pid"]) == ("cron on db1", socket.gethostname(), str(os.getpid()))
        assert first["fence"] == str(import_.fence)
        assert first["age"].endswith(" s")
        assert second["left"] in ("2 h 00 m", "1 h 59 m")


def test_ls_as_json_is_as_its_schema_says_and_tells_no_secret(either: str) -> None:
    with holdfast.Client(either) as client:
        grant = client.lease("nightly import", ttl=600).acquire()
        record = client.leases.get("nightly import")
        assert record is not None
        text = printed(*at(either, "ls", "--json"))
        [row] = valid("ls", text)
        assert (row["name"], row["holder"], row["fence"]) == ("nightly import", grant.holder, grant.fence)
        assert abs(datetime.fromisoformat(row["acquired_at"]) - record.acquired_at).total_seconds() < 0.002
        assert 0 <= row["age"] < 600
        assert 0 < row["remaining"] <= 600
        lived = datetime.fromisoformat(row["expires_at"]) - datetime.fromisoformat(row["acquired_at"])
        assert abs(lived.total_seconds() - row["age"] - row["remaining"]) < 0.01
        assert grant.token not in text


def test_an_empty_list_says_so_beside_the_data(sqlite_url: str) -> None:
    done = call(*at(sqlite_url, "ls"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no lease is held\n")
    assert valid("ls", printed(*at(sqlite_url, "ls", "--json"))) == []


def test_watch_in_a_pipe_prints_when_a_lease_changes_hands_and_ends_with_ctrl_c(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client, Running(*at(sqlite_url, "ls", "--watch", "--every", "0.1")) as running:
        running.until_it_says("UTC: no lease is held\n\n")
        grant = client.lease("sweep", holder="one", **FAST).acquire()
        running.until_it_says(f"{grant.fence}  plain\n\n")
        pass_time(0.35)  # a few looks that find nothing new
        grant.release()
        eventually(lambda: running.text.count("no lease is held") == 2, "it says that it is free")
        assert running.end(signal.SIGINT) == (0, "")
        assert running.text.count("UTC: ") == 3, "nothing is printed while nothing changes"
        assert "\x1b" not in running.text


def test_watch_as_json_prints_a_valid_line_a_change(sqlite_url: str) -> None:
    with (
        holdfast.Client(sqlite_url) as client,
        Running(*at(sqlite_url, "ls", "--watch", "--json", "--every", "0.1")) as it,
    ):
        it.until_it_says("[]\n")
        client.lease("sweep", **FAST).acquire()
        it.until_it_says("}]\n")
        assert it.end(signal.SIGINT) == (0, "")
        lines = it.text.splitlines()
        assert [[each["name"] for each in valid("ls", line)] for line in lines] == [[], ["sweep"]]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_watch_on_a_terminal_is_a_live_view_that_gives_the_cursor_back(
    sqlite_url: str, number: signal.Signals, code: int
) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.lease("sweep", **FAST).acquire()
        with Running(*at(sqlite_url, "ls", "--watch", "--every", "0.1"), columns=120) as running:
            running.until_it_says("1 lease at ")
            eventually(lambda: running.text.count("1 lease at ") > 1, "it looks again")
            assert running.end(number) == (code, "")
            assert running.text.rfind("\x1b[?25h") > running.text.rfind("\x1b[?25l") >= 0


def test_watch_goes_on_when_the_database_comes_back(postgres_url: str) -> None:
    """An operator watches a failover: that is when a view must not die."""
    name = postgres_url.rpartition("/")[2]
    with Running(*at(postgres_url, "ls", "--watch", "--every", "0.1")) as running:
        running.until_it_says("no lease is held")
        try:
            server().execute(f"alter database {name} allow_connections false")
            server().execute(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'")
            eventually(lambda: "retrying every 0.1 s" in running.problems, "it reports the failure")
        finally:
            server().execute(f"alter database {name} allow_connections true")
        with holdfast.Client(postgres_url) as client:
            client.lease("sweep", **FAST).acquire()
            running.until_it_says("sweep")
        assert running.end(signal.SIGINT)[0] == 0


def test_history_tells_who_took_a_lease_away_and_why(either: str) -> None:
    with holdfast.Client(either) as client:
        client.lease("sweep", holder="one").acquire().release()
        client.lease("sweep", holder="two").acquire()
        client.leases.force_release("sweep", actor="jane", reason="db1 is being replaced")
        client.lease("other", holder="three").acquire().release()
    latest, before = columns_of(printed(*at(either, "history", "sweep")))
    assert (latest["holder"], latest["how"]) == ("two", "forced")
    assert (latest["by"], latest["reason"]) == ("jane", "db1 is being replaced")
    assert (before["holder"], before["how"], before["by"], before["reason"]) == ("one", "released", "-", "-")
    when = datetime.strptime(latest["ended (UTC)"], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    assert abs((datetime.now(UTC) - when).total_seconds()) < 600, "of this hour, in UTC"
    everything = valid("history", printed(*at(either, "history", "--json")))
    assert [each["holder"] for each in everything] == ["three", "two", "one"]
    assert everything[1]["actor"] == "jane"
    assert [each["holder"] for each in valid("history", printed(*at(either, "history", "--limit", "1", "--json")))] == [
        "three"
    ]


def test_what_holdfast_holds_for_itself_is_told_apart(either: str) -> None:
    with holdfast.Client(either) as client:
        for _ in range(3):
            client.lease("sweep").acquire()
            printed(*at(either, "release", "sweep", "--force", "--reason", "stuck"))
        with client.slots("pool", capacity=1).claim(owner="me"):
            done = invoke(*at(either, "ls"))
    assert "@slot:pool:1" in done.stdout
    assert done.stderr == "names that begin with @ or holdfast: belong to holdfast itself, such as gates and slots\n"
    for limit, count in ((2, 2), (20, 3)):
        shown = valid("history", printed(*at(either, "history", "--limit", str(limit), "--json")))
        assert [each["name"] for each in shown] == ["sweep"] * count
    everything = valid("history", printed(*at(either, "history", "--all", "--json")))
    names = {"sweep", "@slot:pool:1", "@gate:leases", "holdfast:runtime"}
    assert {each["name"] for each in everything} == names
    assert len(valid("history", printed(*at(either, "history", "@gate:leases", "--json")))) == 3


def test_the_history_of_an_unknown_lease_is_empty_and_says_so(sqlite_url: str) -> None:
    done = invoke(*at(sqlite_url, "history", "nobody's"))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == 'lease "nobody\'s" has no ended grants\n'
    assert valid("history", printed(*at(sqlite_url, "history", "nobody's", "--json"))) == []


def test_release_without_force_or_reason_is_refused_and_takes_nothing(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.lease("sweep", **FAST).acquire()
        for more, wanted in (
            ((), "add --force and --reason"),
            (("--reason", "why"), "add --force and --reason"),
            (("--force",), "needs --reason"),
            (("--force", "--reason", ""), "needs --reason"),
            (("--force", "--reason", "x" * 1001), "reason must have"),
            (("--force", "--reason", "why", "--actor", "a\nb"), "actor must not contain control"),
            (("--force", "--reason", "why", "--actor", ""), "actor must have"),
        ):
            done = invoke(*at(sqlite_url, "release", "sweep", *more))
            assert done.returncode == 2
            assert wanted in done.stderr
        assert client.leases.get("sweep") is not None
        assert client.leases.history() == []


def test_a_forced_release_is_recorded_and_its_holder_learns_of_it(either: str) -> None:
    with holdfast.Client(either) as client:
        grant = client.lease("sweep", holder="one", **FAST).acquire()
        output = ask(*at(either, "release", "sweep", "--force", "--reason", "[red]stuck"))
        assert "'sweep', held by one with fence" in output
        eventually(lambda: grant.lost, "the holder has learned")
        client.lease("sweep", **FAST).acquire()
        ask(*at(either, "release", "sweep", "--force", "--reason", "again", "--actor", "jane"))
        assert client.leases.get("sweep") is None
        latest, before = client.leases.history("sweep")
        assert (latest.outcome, latest.actor, latest.reason) == ("forced", "jane", "again")
        me = f"{getpass.getuser()}@{socket.gethostname()}"
        assert (before.outcome, before.actor, before.reason) == ("forced", me, "[red]stuck")


def test_release_says_what_was_recorded_of_a_lease_kept_by_at_least(either: str) -> None:
    with holdfast.Client(either) as client:
        client.lease("sweep", holder="one", at_least=60).acquire().release()
        output = printed(*at(either, "release", "sweep", "--force", "--reason", "stuck", "--actor", "jane"))
        latest = client.leases.history("sweep")[0]
        assert (latest.outcome, latest.actor, latest.reason) == ("forced", "jane", "stuck")
        assert output == f"released lease 'sweep', held by one with fence {latest.fence}; recorded: jane: stuck\n"


def test_a_misspelt_lease_is_answered_with_a_similar_one(either: str) -> None:
    with holdfast.Client(either) as client:
        client.lease("nightly-import").acquire()
        client.lease("old-sweep").acquire().release()
        for name, similar in (("nightly-imprt", "nightly-import"), ("old-swep", "old-sweep")):
            done = invoke(*at(either, "history", name))
            assert (done.returncode, done.stdout) == (0, "")
            assert done.stderr == f"lease {name!r} has no ended grants. Did you mean {similar!r}?\n"
        assert invoke(*at(either, "history", "nightly-import")).stderr == "lease 'nightly-import' has no ended grants\n"
        for command in (("release", "nightly-imprt", "--force"), ("do", "lease.release", "nightly-imprt")):
            done = invoke(*at(either, *command, "--reason", "x"))
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr == "holdfast: lease 'nightly-imprt' is not held. Did you mean 'nightly-import'?\n"


def test_release_of_a_lease_that_nobody_holds_says_so_with_exit_code_1(either: str) -> None:
    done = invoke(*at(either, "release", "nobody's", "--force", "--reason", "x"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == 'holdfast: lease "nobody\'s" is not held\n'


def test_version_tells_what_is_installed_and_connects_to_nothing() -> None:
    nowhere = at("postgresql://127.0.0.1:1/none", "version")
    versions = valid("version", printed(*nowhere, "--json"))
    assert versions["holdfast"] == holdfast.__version__
    for value in versions.values():
        assert str(value) in printed(*nowhere)
    assert json.dumps(versions["psycopg"]) != "null"
