"""The checker is checked: each known mistake is caught by the check that is named for it, and the real thing is not
blamed in its place, for the reason that the scene is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import pytest

from holdfast.testing.checker import Report
from holdfast.testing.history import RecordedOperation, operations, read
from proof.bugs import BUGS, Servers, __main__, run

REFUSALS = {
    "protect in a savepoint": ("write", "fail", "cannot protect a savepoint"),
    "plain deferred trigger under REPEATABLE READ": ("write", "fail", "has passed on"),
    "sync-wait warning ignored": ("acquire", "unknown", "without waiting for its synchronous standby"),
}
"""Where the real thing is sound because it says no, what it says."""


class Played(NamedTuple):
    report: Report
    done: list[RecordedOperation]

    def answers(self, op: str) -> list[str]:
        return sorted(each.outcome for each in self.done if each.op == op)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers() as made:
        yield made


@pytest.fixture(scope="module")
def played(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Played]:
    """Each scene is played once with the mistake, and once without."""

    @cache
    def once(name: str, healthy: bool) -> Played:
        if missing := BUGS[name].missing():
            pytest.skip(missing)
        folder = tmp_path_factory.mktemp("scene")
        report = run(BUGS[name], folder, servers, healthy=healthy)
        return Played(report, operations(read(folder)))

    return once


@pytest.mark.parametrize("name", BUGS)
def test_the_mistake_is_caught_by_its_check(played: Callable[[str, bool], Played], name: str) -> None:
    assert BUGS[name].check in played(name, False).report.violated


@pytest.mark.parametrize("name", BUGS)
def test_the_real_thing_in_its_place_is_clean(played: Callable[[str, bool], Played], name: str) -> None:
    report, done = played(name, True)
    assert report.violated == []
    assert BUGS[name].check not in report.vacuous, "it would have passed for having nothing to look at"
    refused = [(each.op, each.outcome, each.data["error"]) for each in done if "error" in each.data]
    if name not in REFUSALS:
        assert refused == []
    else:
        [(op, outcome, said)] = refused
        assert (op, outcome) == REFUSALS[name][:2]
        assert REFUSALS[name][2] in said


@pytest.mark.parametrize(
    ("name", "op", "wrong", "real"),
    [
        ("no fence", "acquire", ["ok", "ok"], ["fail", "ok", "ok"]),
        ("FOR KEY SHARE", "acquire", ["ok", "ok"], ["fail", "ok", "ok"]),
        ("protect in a savepoint", "write", ["ok", "ok", "ok"], ["fail", "ok", "ok"]),
        ("advisory guard with forced steal", "acquire", ["ok", "ok"], ["fail", "ok", "ok"]),
        ("plain deferred trigger under REPEATABLE READ", "write", ["ok", "ok", "ok"], ["fail", "ok", "ok"]),
        ("fence drawn before the row is owned", "acquire", ["ok"] * 4, ["fail", "ok", "ok", "ok"]),
        ("renewal by sub-select", "renew", ["ok"], ["fail"]),
        ("sync-wait warning ignored", "acquire", ["ok", "ok"], ["ok", "unknown"]),
    ],
)
def test_the_same_steps_get_another_answer_where_the_mistake_is(
    played: Callable[[str, bool], Played], name: str, op: str, wrong: list[str], real: list[str]
) -> None:
    """In the other scenes the answers are the same, and the fences or the trust in them are not."""
    assert (played(name, False).answers(op), played(name, True).answers(op)) == (wrong, real)


def test_a_fork_hands_the_parents_answer_to_its_child(played: Callable[[str, bool], Played]) -> None:
    for healthy, told in ((False, {"child": "ok", "parent": "fail"}), (True, {"child": "fail", "parent": "ok"})):
        _, done = played("fork-shared connection", healthy)
        assert {each.worker: each.outcome for each in done if each.worker != "a"} == told


def test_two_believed_at_once_only_with_the_mistake(played: Callable[[str, bool], Played]) -> None:
    for name in ("renewal by sub-select", "trust counted from the reply"):
        for healthy in (False, True):
            report, _ = played(name, healthy)
            [beliefs] = [verdict for verdict in report.verdicts if verdict.check == "C7"]
            assert beliefs.counted >= 2
            assert (report.figures["overlap"]["total"] > 0) is not healthy


def test_the_command_says_when_a_mistake_is_missed(
    servers: Servers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(__main__, "Servers", lambda: nullcontext(servers))
    sound = {"no fence": BUGS["no fence"]}
    monkeypatch.setattr(__main__, "BUGS", sound)
    assert __main__.main() == 0
    monkeypatch.setattr(__main__, "BUGS", {"no fence": sound["no fence"]._replace(check="C1")})
    assert __main__.main() == 1
    monkeypatch.setattr(__main__, "BUGS", {"no fence": sound["no fence"]._replace(real=sound["no fence"].wrong)})
    assert __main__.main() == 1
    verdicts = [line.split("  ")[-1].split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert [word for word in verdicts if word != "verdict"] == ["caught", "MISSED", "ALARM"]
