"""holdfast run --guard can be told what the guard in Python can be told."""

from __future__ import annotations

import signal

import pytest

import holdfast
from holdfast.testing import Proxy
from tests.children import eventually
from tests.cli.command import SCRIPT, at, call
from tests.cli.runs import Run, gone
from tests.recipes.guard.instances import ends_at


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--strict",), "need --guard"), (("--renew-every", "1"), "need --guard"),
        (("--wipe-on-start",), "need --guard"), (("--guard", "--holder", "me"), "cannot be used with"),
        (("--guard", "--failover", "session"), "cannot be used with --guard"),
        (("--failover", "never"), "'never' is not one of 'ttl', 'session'"), (("--at-least", "-1"), "at_least"),
        (("--guard", "--ttl", "5", "--renew-every", "3"), "at most half of --ttl 5, not 3"),
        (("--guard", "--renew-every", "0"), "--renew-every must be 0.001 seconds or more, not 0"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_and_nothing_runs(sqlite_url: str, options: tuple[str, ...], why: str) -> None:
    done = call(*at(sqlite_url, "run", *options, "job", "--", "echo", "ran"))
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr


def test_it_is_renewed_as_often_as_told(sqlite_url: str) -> None:
    with Run(sqlite_url, "--guard", "--ttl", "600", "--renew-every", "0.2") as run:
        family = run.pids()
        with holdfast.Client(sqlite_url) as client:
            assert [lease.kind for lease in client.leases.list()] == ["guard"]
        for _ in range(3):
            latest = ends_at(sqlite_url, "job")
            eventually(lambda latest=latest: ends_at(sqlite_url, "job") > latest, "a heartbeat")  # type: ignore[misc]
        run.process.send_signal(signal.SIGTERM)
        gone(family)


def test_a_short_outage_ends_a_strict_one_alone(postgres_url: str) -> None:
    with (
        Proxy(postgres_url) as way,
        Run(way.url, "--guard", "--ttl", "600", "--renew-every", "0.5", "--strict", name="strict") as strict,
        Run(way.url, "--guard", "--ttl", "600", "--renew-every", "0.5", name="patient") as patient,
    ):
        ended, lives = strict.pids(), patient.pids()
        latest = ends_at(postgres_url, "patient"), ends_at(postgres_url, "strict")
        eventually(lambda: ends_at(postgres_url, "patient") > latest[0], "its heartbeat has a session")
        eventually(lambda: ends_at(postgres_url, "strict") > latest[1], "and so has the other's")
        way.reset()
        gone(ended)
        assert strict.wait() != 0
        way.heal()
        renewed = ends_at(postgres_url, "patient")
        eventually(lambda: ends_at(postgres_url, "patient") > renewed, "the other goes on")
        patient.process.send_signal(signal.SIGTERM)
        gone(lives)


def test_a_wipe_comes_before_the_command_and_only_under_the_guard(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.lease("left over", ttl=600, auto_renew=False).acquire()
        with client.lease("job"):
            refused = call(*at(sqlite_url, "run", "--guard", "--wipe-on-start", "job", "--", "echo", "ran"))
            assert (refused.returncode, refused.stdout) == (75, "")
            assert client.leases.get("left over") is not None
        listed = call(*at(sqlite_url, "run", "--guard", "--wipe-on-start", "job", "--", SCRIPT, "ls", "--json"))
        assert '"job"' in listed.stdout
        assert "left over" not in listed.stdout
