"""The short version of `make succession`: the leader is taken away a few times, with the faults of a fixed seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.testing.history import Recorder
from proof.chaos.__main__ import main as chaos
from proof.succession.__main__ import main
from proof.succession.run import FAULTS, SuccessionRun
from proof.succession.verdicts import ExpectedState, judge


@pytest.mark.timeout(600)
def test_whoever_leads_is_taken_away_and_records_stay_true(tmp_path: Path) -> None:
    with SuccessionRun(tmp_path, 5, ttl=1.0, grace=4.0, records=12) as run:
        for kind in FAULTS:
            run.replace_leader(kind)
        verdicts = run.verdicts()
    assert [each for each in verdicts if not each.ok] == []


def test_a_blink_that_lasted_longer_than_the_grace_is_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine stood still in between: the leader removes the record, and is right."""
    for grace, lost in ((5.0, []), (4.0, ["sb-000"])):
        (folder := tmp_path / f"{grace:g}").mkdir()
        run = SuccessionRun(folder, 5, ttl=1.0, grace=grace, records=1)
        run._set_random_state("sb-000")
        with monkeypatch.context() as patch:
            patch.setattr("proof.succession.run.time.time", iter([10.0, 14.0]).__next__)
            run._remove_briefly("sb-000")
        assert list(run._expected.lost) == lost
        assert [each.id for each in run._driver.list()] == ([] if lost else ["sb-000"])


def test_the_judge_finds_what_must_not_be(tmp_path: Path) -> None:
    """Two leaders at once, a fence that fell, a note that was overwritten unseen, a record lost, one pruned, and one
    pruned too early."""
    with Recorder(tmp_path, "one") as one, Recorder(tmp_path, "two") as two:
        for record, fence in ((one, 7), (two, 5)):
            record.invoke("acquire", "reconciler").ok(fence)
            record.info("believe", "reconciler", fence, **{"from": 1.0, "until": 2.0})
        one.invoke("cas", "sb-1", old=None, value="a").ok()
        two.invoke("read", "sb-1", value=None).ok()

    class Removal:
        id, kind = "sb-1", "deleted"

    expected = ExpectedState({"sb-1": True}, {"sb-2": 1.0}, {"sb-2": 4.9}, 4.0)
    verdicts = judge(tmp_path, expected, set(), [Removal()])
    assert [each.check for each in verdicts if each.ok] == []


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "many", ""])
def test_numbers_that_make_no_sense_are_refused_before_anything_starts(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, options in (
        (main, ("--times", "--records", "--ttl", "--grace")),
        (chaos, ("--minutes", "--size", "--ttl")),
    ):
        for option in options:
            with pytest.raises(SystemExit, match="2"):
                command([f"{option}={value}"])
            assert f"argument {option}: must be a " in capsys.readouterr().err


def test_a_folder_that_has_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    for command, folder in ((main, tmp_path), (main, tmp_path / "mine"), (chaos, tmp_path / "mine")):
        with pytest.raises(SystemExit, match="2"):
            command([f"--folder={folder}"])
        assert "--folder: " in capsys.readouterr().err
