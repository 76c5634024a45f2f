"""Each check accepts what is right, notices what is not, and says so when it had nothing to look at."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.testing.checker import Report, check
from holdfast.testing.checker.__main__ import main
from holdfast.testing.checker.checks import CHECKS, CheckVerdict
from holdfast.testing.history import DatabaseRows, Event, RecordedOperation, Recorder, operations, write_database
from tests.testing.simulated_history import World, events, info, operation

some = settings(max_examples=40, deadline=None, derandomize=True, database=None)
randoms = st.integers(0, 2**32).map(random.Random)
ALL = ["C1", "C2", "C3", "C4", "C6", "C7", "C8", "C9"]


def judged(report: Report, name: str) -> CheckVerdict:
    [verdict] = [verdict for verdict in report.verdicts if verdict.check == name]
    return verdict


def verdict(name: str, *history: Event, database: DatabaseRows | None = None, sane_clocks: bool = True) -> CheckVerdict:
    return judged(check(history, database, sane_clocks=sane_clocks), name)


def simulated(source: random.Random) -> World:
    world = World(source, names=2, workers=4).run(400)
    world.events += [info("reacquired", after=0.5, bound=1.0), info("leftover", what="rows", count=0)]
    return world


@some
@given(randoms)
def test_a_history_that_is_right_by_construction_passes_every_check(source: random.Random) -> None:
    world = simulated(source)
    report = check(world.events, world.database)
    assert [verdict.violations for verdict in report.verdicts] == [[]] * len(CHECKS)
    assert [verdict.check for verdict in report.verdicts] == ALL


def test_nothing_at_all_is_not_ok_and_not_violated_either() -> None:
    report = check([])
    assert (report.ok, report.violated, report.vacuous) == (False, [], ALL)
    assert {verdict.ok for verdict in report.verdicts} == {False}
    assert str(report.verdicts[0]) == "C1 says nothing: none to count"


GRANTS = (operation("acquire", "ok", 5, 0, 1), operation("acquire", "ok", 6, 2, 3, worker="x"))


def test_c1_one_grant_a_fence() -> None:
    assert verdict("C1", *events(*GRANTS)) == ("C1", True, 2, [])
    twice = verdict("C1", *events(GRANTS[0], GRANTS[1]._replace(fence=5, name="other")))
    [result] = twice.violations
    assert result == (
        "fence 5 was granted 2 times: acquire 'job' ok fence 5 by w at 0.000000 to 1.000000; "
        "acquire 'other' ok fence 5 by x at 2.000000 to 3.000000"
    )


@pytest.mark.parametrize("table", ["takeovers", "grants"])
def test_c1_counts_the_grants_that_only_the_database_knows_of(table: str) -> None:
    def rows(*pairs: tuple[str, int]) -> DatabaseRows:
        return DatabaseRows(**{table: [{"name": name, "fence": fence, "older": 0} for name, fence in pairs]})  # type: ignore[arg-type]

    assert verdict("C1", *events(*GRANTS), database=rows(("job", 5), ("job", 7))).ok
    assert verdict("C1", *events(*GRANTS), database=rows(("job", 7), ("job", 7))).violations
    assert verdict("C1", *events(*GRANTS), database=rows(("other", 5))).violations, "another name's"


def test_c2_fences_rise() -> None:
    assert verdict("C2", *events(*GRANTS)) == ("C2", True, 2, [])
    for lower in (5, 4):
        assert verdict("C2", *events(GRANTS[0], GRANTS[1]._replace(fence=lower))).violations
    overlapping = GRANTS[1]._replace(fence=4, invoked=0.5)
    assert verdict("C2", *events(GRANTS[0], overlapping)).ok, "who asked at once may be granted in either order"
    assert verdict("C2", *events(GRANTS[0], GRANTS[1]._replace(fence=4, name="other"))).ok


def test_c2_notices_a_grant_that_comes_to_work_after_a_higher_fence_did() -> None:
    """Its acquire overlapped with the other's, which proves nothing; but its work came after."""
    early = operation("acquire", "ok", 4, 0, 20, worker="slow")
    other = [GRANTS[0], operation("takeover", "ok", 5, 2, 3, older=0)]
    late = operation("takeover", "ok", 4, 21, 22, worker="slow", older=0)
    assert verdict("C2", *events(early, *other)).ok
    [result] = verdict("C2", *events(early, *other, late)).violations
    assert result.startswith("takeover 'job' ok fence 4 by slow at 21")


def test_c2_notices_a_write_that_comes_after_a_higher_fence_was_given_out() -> None:
    """Its successor has not worked yet, so no takeover has counted: the answers alone tell."""
    writes = [operation("write", "ok", 5, invoked, invoked + 1, key=str(invoked)) for invoked in (1.5, 3.5)]
    assert verdict("C2", *events(*GRANTS, writes[0])).ok
    [result] = verdict("C2", *events(*GRANTS, *writes)).violations
    assert result.startswith("write 'job' ok fence 5")


def test_c2_notices_a_counter_that_goes_back_in_a_restore() -> None:
    risen = GRANTS[1]._replace(fence=27_799_000_000_001)
    assert verdict("C2", *events(GRANTS[0]._replace(fence=27_798_000_000_009), risen)).ok
    assert verdict("C2", *events(GRANTS[0]._replace(fence=27_799_000_000_009), risen)).violations


WRITES = [{"name": "job", "fence": fence, "key": f"k{fence}"} for fence in (1, 2, 2, 3)]


@pytest.mark.parametrize(("older", "ok"), [(0, False), (1, True), (2, False)])
def test_c3_a_takeover_saw_all_the_older_writes_that_there_are(older: int, ok: bool) -> None:
    """Fewer: one came after it. More: one that it saw is gone."""
    taken = [{"name": "job", "fence": 2, "older": older}, {"name": "other", "fence": 9, "older": 0}]
    result = verdict("C3", database=DatabaseRows(WRITES, taken))
    assert (result.ok, result.counted) == (ok, 2)
    if not ok:
        assert f"saw {older} older writes, but there are 1, the last with fence 1" in result.violations[0]


def test_c3_a_takeover_that_saw_a_newer_one_came_too_late() -> None:
    taken = [{"name": "job", "fence": 2, "older": 1, "newest": newest} for newest in (None, 1, 3)]
    assert verdict("C3", database=DatabaseRows(WRITES, taken[:2])).ok
    assert "came after that of 3" in verdict("C3", database=DatabaseRows(WRITES, taken)).violations[0]


@some
@given(randoms)
def test_c3_any_stale_write_is_noticed(source: random.Random) -> None:
    world = simulated(source)
    assume(world.takeovers)
    taken = source.choice(world.takeovers)
    stale = {"name": taken["name"], "fence": taken["fence"] - 1, "key": "stale"}
    late = DatabaseRows([*world.writes, stale], world.takeovers)
    assert verdict("C3", *world.events, database=late).violations


def written(outcome: str, key: str = "a") -> Any:
    return operation("write", outcome, 1, 0, 1, key=key)


@pytest.mark.parametrize(
    ("outcome", "rows", "message"),
    [
        ("ok", 1, None),
        ("fail", 0, None),
        ("unknown", 0, None),
        ("unknown", 1, None),
        ("ok", 0, "acknowledged, but not in the database"),
        ("fail", 1, "failed, but in the database"),
        ("ok", 2, "is in the database 2 times"),
    ],
)
def test_c4_what_was_acknowledged_is_there_and_what_failed_is_not(outcome: str, rows: int, message: str | None) -> None:
    there = DatabaseRows([{"name": "job", "fence": 1, "key": "a"}] * rows)
    result = verdict("C4", *events(written(outcome)), database=there)
    assert result.counted == (outcome != "unknown")
    assert bool(result.violations) == bool(message)
    assert message is None or message in result.violations[0]


def test_c4_a_grant_that_was_acknowledged_is_known_to_the_database() -> None:
    ended = [{"name": "job", "fence": 5, "outcome": "released"}]
    for all_grants, ok in ((False, True), (True, False)):
        result = verdict(
            "C4", *events(*GRANTS, written("fail")), database=DatabaseRows(grants=ended, all_grants=all_grants)
        )
        assert result.ok is ok
    assert "unknown to the database: acquire 'job' ok fence 6" in result.violations[0]


def test_c4_notices_what_nobody_wrote_and_what_was_changed() -> None:
    ghost = verdict("C4", database=DatabaseRows([{"name": "job", "fence": 1, "key": "a"}]))
    assert "no worker made it" in ghost.violations[0]
    assert not ghost.vacuous
    changed = DatabaseRows([{"name": "job", "fence": 2, "key": "a"}])
    assert len(verdict("C4", *events(written("ok")), database=changed).violations) == 2


def test_c4_a_write_tried_again_needs_only_one_answer_to_be_true() -> None:
    again = written("ok")._replace(id="again", invoked=2.0, completed=3.0)
    there = DatabaseRows([{"name": "job", "fence": 1, "key": "a"}])
    assert verdict("C4", *events(written("fail"), again), database=there).ok


@some
@given(randoms)
def test_c4_any_acknowledged_write_or_takeover_that_is_lost_is_noticed(source: random.Random) -> None:
    world = simulated(source)
    acknowledged = [each for each in operations(world.events) if each.op == "write" and each.outcome == "ok"]
    assume(acknowledged)
    lost = source.choice(acknowledged)
    left = [row for row in world.writes if row["key"] != lost.data["key"]]
    [result] = verdict("C4", *world.events, database=DatabaseRows(left, world.takeovers)).violations
    assert lost.data["key"] in result


def test_c6_tells_what_cannot_be_explained() -> None:
    assert verdict("C6", *events(*GRANTS)).ok
    result = verdict("C6", *events(*GRANTS, operation("renew", "ok", 5, 4, 5)))
    assert (result.counted, result.ok) == (3, False)
    assert "held under fence 6" in result.violations[0]


FREE = (operation("acquire", "ok", 5, 0, 1), operation("release", "ok", 5, 2, 3))
"""What comes after finds the lease free."""


def refused(start: float, end: float, holder: str | None, **data: Any) -> RecordedOperation:
    return operation("acquire", "fail", None, start, end, worker="x", holder=holder, **data)


@pytest.mark.parametrize(
    "asks",
    [
        operation("acquire", "fail", None, 4, 9, error="Refused: the disk is full"),
        operation("acquire", "fail", None, 2.5, 9, holder="w"),
    ],
    ids=["failed", "refused"],
)
def test_c6_who_is_just_asking_may_keep_another_away_whatever_becomes_of_it(asks: RecordedOperation) -> None:
    """A row that is being inserted and not yet committed is seen by nobody, and in everybody's way."""
    assert verdict("C6", *events(*FREE, asks, refused(5, 6, None))).ok
    for wrong, why in (
        ((asks, refused(9.5, 10, None)), "nobody asked any more"),
        ((asks, refused(5, 6, "w")), "it says that w has it"),
        ((refused(5, 6, None),), "nobody else asked"),
    ):
        assert not verdict("C6", *events(*FREE, *wrong)).ok, why


def test_c6_an_acquire_may_have_been_granted_before_it_was_refused() -> None:
    """The first answer was lost, and it was asked again: so it may have been granted, and given back or expired. No
    earlier than it was asked for, and no more often than that."""
    seen, asked = refused(5, 6, "y"), refused(4, 9, "z", abandoned=1)
    taken, given_back = operation("acquire", "ok", 6, 7, 8, worker="z"), operation("release", "ok", 6, 10, 11)
    assert verdict("C6", *events(*FREE, asked, seen, taken)).ok
    for wrong, why in (
        ((refused(4, 9, "z", abandoned=0), seen, taken), "it was asked once"),
        ((refused(6.5, 9, "z", abandoned=1), seen, taken), "it was asked later"),
        ((asked, seen, taken, given_back, refused(12, 13, "y")), "it was granted twice"),
    ):
        assert not verdict("C6", *events(*FREE, *wrong)).ok, why


def believed(worker: str, fence: int, start: float, end: float, name: str = "job") -> Event:
    return info("believe", name, worker, fence, **{"from": start, "until": end})


def test_c7_measures_overlap_and_blames_it_only_where_clocks_are_sane() -> None:
    spans = [
        believed("a", 1, 0, 10), believed("a", 1, 5, 12), believed("b", 2, 11, 20), believed("c", 3, 19.5, 30),
        believed("b", 2, 12, 15, "other"),
    ]  # fmt: skip
    report = check(spans, sane_clocks=False)
    assert judged(report, "C7") == ("C7", True, 5, [])
    assert report.figures["overlap"] == {"total": 1.5, "longest": 1.0}
    [result] = verdict("C7", *spans).violations
    assert result == (
        "'job' was believed in by a (fence 1) and b (fence 2) at 11.000000 to 12.000000: 1.000000 s, in all 1.500000 s"
    )


def test_c7_one_after_the_other_is_no_overlap_but_one_grant_in_two_workers_is() -> None:
    assert verdict("C7", believed("a", 1, 0, 10), believed("b", 2, 10, 20), believed("a", 3, 20, 20)).ok
    assert verdict("C7", believed("parent", 1, 0, 10), believed("child", 1, 5, 6)).violations


@some
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(0, 10)), max_size=8))
def test_c7_measures_what_counting_instant_by_instant_does(spans: list[tuple[str, int, int]]) -> None:
    result = check([believed(who, 1, start, start + length) for who, start, length in spans]).figures["overlap"]
    crowded = [
        len({who for who, start, length in spans if start <= instant < start + length}) > 1 for instant in range(50)
    ]
    stretches = [len(stretch) for stretch in "".join("x" if each else " " for each in crowded).split()]
    assert (result["total"], result["longest"]) == (sum(stretches), max(stretches, default=0))


@pytest.mark.parametrize(("after", "ok"), [(0.4, True), (1.0, True), (1.1, False), (None, False)])
def test_c8_everything_is_acquired_again_in_time(after: float | None, ok: bool) -> None:
    result = verdict("C8", info("reacquired", after=after, bound=1.0), info("reacquired", after=0.1, bound=1.0))
    assert (result.ok, result.counted, len(result.violations)) == (ok, 2, int(not ok))


def test_c8_does_not_count_what_the_machine_stood_still() -> None:
    assert verdict("C8", info("reacquired", after=6.0, bound=1.0, standstill=5.0)).ok
    [result] = verdict("C8", info("reacquired", after=6.1, bound=1.0, standstill=5.0)).violations
    assert result == "'job' was acquired after 6.100 s, 5.000 s of which the machine stood still, not within 1.000 (w)"
    assert verdict("C8", info("reacquired", after=None, bound=1.0, standstill=5.0)).violations


@pytest.mark.parametrize("what", ["connections", "locks", "rows", "processes"])
def test_c9_nothing_is_left_over(what: str) -> None:
    assert verdict("C9", info("leftover", what=what, count=0)).ok
    assert verdict("C9", info("leftover", what=what, count=3)).violations == [f"3 {what} left over"]


HELD = [
    operation("acquire", "ok", 5, 0, 1, kept=True),
    operation("acquire", "ok", 6, 0, 1, kept=True, worker="x"),
    operation("acquire", "fail", None, 0.1, 1, kept=True),
    operation("acquire", "ok", 7, 0.2, 1, kept=False),
    operation("release", "ok", 6, 6, 7, worker="x"),
]
"""5 is held until its loss is told at 4, 6 until it is given back."""


@pytest.mark.parametrize(
    ("at", "right"), [(0.5, [0, 1, 2, 3]), (2.0, [1, 2]), (3.5, [0, 1, 2]), (5.0, [0, 1]), (6.5, [0, 1]), (8.0, [0])]
)
def test_c10_a_gauge_is_between_what_was_certainly_held_and_what_may_have_been(at: float, right: list[int]) -> None:
    """Who is sure to have had it has said so until 3."""
    beliefs: list[dict[str, Any]] = [{"from": 1.5, "until": 3.0}, {"from": 1.5, "until": 9.0}]
    believed, unsure = (
        info("believe", fence=5, sure=True, **beliefs[0]),
        info("believe", fence=6, sure=False, **beliefs[1]),
    )
    lost = info("lost", fence=5)._replace(time=4.0)
    for value in range(5):
        read = info("gauge", value=value, workers=["w", "x"], since=at, until=at + 0.1)
        result = verdict("C10", *events(*HELD), believed, unsure, lost, read)
        assert (result.ok, result.counted) == (value in right, 1), f"{value} at {at}: {result}"


def test_figures_say_what_was_going_on() -> None:
    faults = [info("fault", worker="nemesis", fault="cut", phase=phase) for phase in ("begin", "heal", "begin", "heal")]
    report = check([*events(*GRANTS, written("fail")), *faults], DatabaseRows(timelines=[1, 2]))
    assert report.figures["operations"] == {"acquire": {"ok": 2}, "write": {"fail": 1}}
    assert (report.figures["faults"], report.figures["timelines"]) == ({"cut": 2}, 2)


def keep(folder: Path, history: list[Event], database: DatabaseRows) -> None:
    with Recorder(folder, "all") as record:
        for event in history:
            record._write(event)
    write_database(folder, database)


def sound(world: World) -> World:
    return world


def missing(world: World) -> World:
    world.events[:] = [event for event in world.events if event.op != "leftover"]
    return world


def broken(world: World) -> World:
    world.writes.append({"name": "lease-0", "fence": 1, "key": "nobody's"})
    return world


@pytest.mark.parametrize(("change", "status"), [(sound, 0), (broken, 1), (missing, 2)])
def test_a_kept_history_is_checked_again_by_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[World], World], status: int
) -> None:
    world = change(simulated(random.Random(3)))
    keep(tmp_path, world.events, world.database)
    assert main([str(tmp_path)]) == status
    text = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in text if not line.startswith(" ")] == ALL
    assert ("no worker made it" in "".join(text)) == (status == 1)
    assert ("C9 says nothing" in "".join(text)) == (status == 2)
    assert main([str(tmp_path), "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] == (status == 0)
    assert [each["check"] for each in document["verdicts"]] == ALL


def test_the_command_runs_as_a_module_and_says_what_it_cannot_read(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast.testing.checker", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no history here" in done.stderr
    assert "Traceback" not in done.stderr


CUTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a time that is a text": lambda row: row.update(time="noon"),
    "a time that is no number": lambda row: row.update(time=float("nan")),
    "no data": lambda row: row.update(data=None),
    "an empty span": lambda row: row["data"].clear(),
    "a fence that is a text": lambda row: row.update(fence="7"),
    "a column too few": lambda row: row.pop("op"),
    "a column too many": lambda row: row.update(more=1),
    "no name": lambda row: row.update(name=["lease-0"]),
}


@pytest.mark.parametrize("op", ["believe", "write", "leftover", "reacquired"])
@pytest.mark.parametrize("cut", CUTS)
def test_what_is_damaged_is_named_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], op: str, cut: str
) -> None:
    world = simulated(random.Random(3))
    keep(tmp_path, world.events, world.database)
    file = tmp_path / "all.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in [row for row in rows if row["op"] == op]:
        CUTS[cut](row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert any(
        each in output.err for each in ("all.jsonl, line ", "no key in its data: write", "an event is damaged: ")
    )


@pytest.mark.parametrize(
    "text", ["", "[]", '{"writes": 3}', '{"writes": [7]}', '{"takeovers": [{"name": "a"}]}', '{"timelines": 1}', "\0"]
)
def test_what_the_database_said_is_named_when_it_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    keep(tmp_path, simulated(random.Random(3)).events, DatabaseRows())
    (tmp_path / "database.json").write_text(text)
    assert main([str(tmp_path)]) == 2
    assert "database.json does not describe a database" in capsys.readouterr().err


@pytest.mark.parametrize("bytes_", [b"\xff\xfe\n", b"null\n", b"[]\n", b"{\n"])
def test_a_line_that_is_no_event_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], bytes_: bytes) -> None:
    (tmp_path / "one.jsonl").write_bytes(bytes_)
    assert main([str(tmp_path)]) == 2
    assert "one.jsonl, line 1 is not an event" in capsys.readouterr().err


@pytest.mark.parametrize(("history", "violated"), [("for-key-share", ["C3"])])
def test_a_history_that_was_found_wanting_still_is(history: str, violated: list[str]) -> None:
    """Kept from chaos, with the word that was changed in holdfast as its name: the checker must not forget."""
    report = check(Path(__file__).parent / "histories" / history)
    assert report.violated == violated


def test_c5_every_key_has_one_effect_and_one_result() -> None:
    runs = events(*(operation("run", "ok", None, n, n + 1, worker=f"w{n}", result="a") for n in (0, 2)))

    def effects(*values: str, name: str = "job") -> DatabaseRows:
        return DatabaseRows(effects=[{"name": name, "value": value} for value in values])

    assert verdict("C5", *runs, database=effects("a")) == ("C5", True, 2, [])
    for wrong, why in (
        (effects("a", "a"), "had 2 effects"),
        (effects(), "has no effect"),
        (effects("b"), "had the effect 'b', and the result 'a'"),
        (effects("a", name="other"), "no worker ran it"),
    ):
        assert why in str(verdict("C5", *runs, database=wrong).violations)
    other = events(operation("run", "ok", None, 4, 5, worker="x", result="b"))
    assert "had 2 results" in str(verdict("C5", *runs, *other, database=effects("a")).violations)
    unknown = events(operation("run", "unknown", None, 0, 1, result="a"))
    assert verdict("C5", *unknown, database=effects("a")).violations == []
    assert "C5" not in [each.check for each in check([]).verdicts]
