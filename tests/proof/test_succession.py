"""The short version of `make succession`: the leader is taken away a few times, with the faults of a fixed seed."""

from __future__ import annotations

from pathlib import Path

from holdfast.testing.history import Recorder
from holdfast.testing.succession.judge import Truth, judge
from holdfast.testing.succession.play import FAULTS, Play


def test_whoever_leads_is_taken_away_and_records_stay_true(tmp_path: Path) -> None:
    with Play(tmp_path, 5, ttl=1.0, grace=4.0, records=12) as play:
        for kind in FAULTS:
            play.act(kind)
        verdicts = play.verdicts()
    assert [each for each in verdicts if not each.ok] == []


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

    truth = Truth({"sb-1": True}, {"sb-2": 1.0}, {"sb-2": 4.9}, 4.0)
    verdicts = judge(tmp_path, truth, set(), [Removal()])
    assert [each.check for each in verdicts if each.ok] == []
