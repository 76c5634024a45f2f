"""The short version of `make attack`: two rounds of a fixed seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from proof.attack.__main__ import main
from proof.attack.run import attack
from proof.attack.tally import MAX_VIOLATIONS, Tally


@pytest.mark.timeout(600)
def test_nothing_is_broken_and_the_operator_is_answered_meanwhile(tmp_path: Path) -> None:
    tally, figures = attack(tmp_path, 11, rounds=2)
    assert tally.violations == []
    assert figures["rounds"] == 2
    assert tally.answers["(operator of postgresql)"].keys() == {"200"}
    for attacker in ("worker: theft", "worker: beyond its rights", "worker: forged values"):
        assert tally.answers[attacker], attacker
    assert set(tally.answers["worker: beyond its rights"]) == {"42501"}
    for target in ("sqlite", "postgresql", "driver"):
        assert tally.answers[f"{target}: malformed"]
    assert "worker: theft" in tally.table()


def test_the_judge_finds_secrets_and_keeps_a_bounded_list() -> None:
    tally = Tally(["hunter2"])
    tally.check_secrets("web", b"GET /", b"nothing")
    assert tally.violations == []
    tally.check_secrets("web", b"GET /", b"the password is hunter2")
    tally.check_secrets("web", b"GET /", b"the password is hunter2")
    assert tally.violations == ["web: b'GET /' was answered with a secret"]
    for number in range(100):
        tally.report(str(number))
    assert len(tally.violations) == MAX_VIOLATIONS


@pytest.mark.parametrize("value", ["0", "-1", "nan", "many", ""])
def test_a_bound_that_makes_no_sense_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([f"--minutes={value}"])
    assert "argument --minutes: must be a number above 0" in capsys.readouterr().err
