"""The policy matrix: every class of dataset, lock outcome, attempt and justification has the answer that was declared,
on the first try and on every later one; and an error lists everything that is wrong with a declaration."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

import holdfast
from holdfast.governance import Allow, Dataset, Deny, PolicyContext, Review
from holdfast.governance.policy import _LOOK_ALIKE, Demands, Moment, dataset_form, govern
from holdfast.keys import OperationKey, PlainKey
from tests.children import query

Policy = holdfast.governance.Policy
MASKED = holdfast.geo.mask_h3({"type": "Point", "coordinates": [16.37, 48.21]}, 5)
CLASSES: dict[str, dict[str, Any]] = {
    "open": {},
    "sovereign": {"sovereign": True},
    "sensitive": {"sensitive": True},
    "both": {"sovereign": True, "sensitive": True},
    "masked": {"h3_resolution": 5},
    "escalating": {"when_locked": "escalate"},
    "failing": {"when_locked": "fail"},
    "budgeted": {"error_budget": 3},
    "theirs": {"may_reset": ["ops@*"]},
    "nobody's": {"may_reset": []},
}
POLICY = Policy(CLASSES)
MOMENTS: tuple[Moment, ...] = get_args(Moment)


def context(**fields: Any) -> PolicyContext:
    return PolicyContext(**{"moment": "claim", "key": "k", "label": "load", "dataset": "open", **fields})


def expected(dataset: str, moment: str, lock: str | None, justification: str | None, more: dict[str, Any]) -> type:
    """The table that the page on governance has, as words of its own: not as the code decides it."""
    works = moment in ("claim", "retry", "locked")
    if moment in ("reset", "review"):
        refused = dataset == "nobody's" or (dataset == "theirs" and more["actor"] != "ops@host")
        return Deny if refused else Allow
    if not works:
        return Allow
    if dataset in ("sensitive", "both") and (justification in (None, " ") or more["same_as"]):
        return Deny
    if dataset in ("sensitive", "both") and more["retry_of"]:
        return Review
    if dataset == "masked" and more["exposed"]:
        return Deny
    if dataset == "budgeted" and moment == "retry" and more["failed_lately"] == 3:
        return Deny
    if moment == "locked" and lock == "busy":
        return {"sovereign": Review, "both": Review, "escalating": Review, "failing": Deny}.get(dataset, Allow)
    return Allow


def test_every_combination_has_the_declared_answer() -> None:
    """On the first attempt and on each later one: the number of attempts matters only for an error budget."""
    asked = 0
    facts = [
        {"same_as": same, "retry_of": retry, "exposed": exposed, "failed_lately": failed, "actor": actor}
        for same, retry, exposed, failed, actor in product(
            (None, "other"), (None, "earlier"), (None, "bare"), (None, 2, 3), (None, "jane", "ops@host")
        )
    ]
    for dataset, moment, attempt, justification in product(CLASSES, MOMENTS, (1, 7), (None, " ", "the council agreed")):
        for lock in ("held", "busy") if moment == "locked" else (None,):
            for more in facts:
                answer = POLICY(
                    context(
                        dataset=dataset, moment=moment, lock=lock, attempt=attempt, justification=justification, **more
                    )
                )
                assert type(answer) is expected(dataset, moment, lock, justification, more), (
                    dataset,
                    moment,
                    lock,
                    justification,
                    more,
                )
                assert isinstance(answer, Allow) or dataset in answer.reason
                asked += 1
    assert asked == 10 * 7 * 2 * 3 * 72


def test_of_several_that_speak_the_strictest_counts() -> None:
    """Declared under several patterns, or by a rule of one's own: Deny before Review before Allow."""
    answers = (Allow(), Review("look"), Deny("no"))
    for mine, other in product(answers, answers):
        policy = Policy({}, lambda _, decision=mine: decision, lambda _, decision=other: decision)  # type: ignore[misc]
        strictest = max((mine, other), key=answers.index)
        assert policy(context()) == strictest
    several = Policy({"parcels*": {"sensitive": True}, "*_at": {"sovereign": True}, "*": Dataset(may_reset=("jane",))})
    assert several.demands("parcels_at") == Demands(sovereign=True, sensitive=True, four_eyes=True)
    assert several.demands("roads") == several.demands(None) == Demands()
    busy = context(dataset="parcels_at", moment="locked", lock="busy")
    assert type(several(busy)) is Deny, "there is no justification, and that is stricter than a review"
    for actor, answer in (("jane", Allow), ("joe", Deny), (None, Deny)):
        assert type(several(context(dataset="parcels_at", moment="reset", actor=actor))) is answer
    both = Policy({"a*": Dataset(may_reset=("j*",)), "*b": Dataset(may_reset=("*e",))})
    for actor, answer in (("jane", Allow), ("jack", Deny), ("joe", Allow), ("mae", Deny)):
        assert type(both(context(dataset="ab", moment="reset", actor=actor))) is answer
    strict = Policy({"*": {"h3_resolution": 7}, "graves": {"h3_resolution": 4}})
    operation = govern(strict, key("graves"), sovereign=False, payload=MASKED)
    assert operation is not None
    assert operation.exposed is not None, "cells of resolution 5 are too fine where 4 was asked for, too"
    named = Policy(
        {
            "*": {"h3_resolution": 5, "h3_properties": ["kind", "age"]},
            "graves": {"h3_resolution": 5, "h3_properties": ["age", "name"]},
        }
    )
    assert named.demands("graves") == Demands(h3_resolution=5, h3_properties=frozenset({"age"}))
    with pytest.raises(holdfast.PolicyDenied, match="'graves', which is masked"):
        govern(named, key("roads"), sovereign=False, payload=MASKED, outputs=["graves"])


def test_a_name_that_is_written_out_is_declared_whatever_is_in_it() -> None:
    policy = Policy({"graves[1871]": {"sovereign": True, "may_reset": ["ops [Vienna]"]}})
    assert policy.demands("graves[1871]") == policy.demands("graves1") == Demands(sovereign=True, four_eyes=True)
    assert policy.demands("graves[1]") is None
    by = context(dataset="graves[1871]", moment="reset", actor="ops [Vienna]")
    assert policy(by) == Allow()


SPELLINGS = [
    "Burials-1871",
    " burials",
    "burials ",
    "bur\u200bials",
    "buri\u00adals",
    "\uff42urials",
    "BURIALS",
    "b\u2060urials",
    "bur\u0456als",
    "\u0412URI\u0410LS",
    "\u0392uri\u03b1ls",
]


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_dataset_is_declared_however_its_name_is_spelled(name: str) -> None:
    policy = Policy({"burials*": {"sensitive": True}})
    assert policy.demands(name) == Demands(sensitive=True)
    assert policy.demands("b*") is None


def test_case_makes_no_other_dataset_in_any_of_the_alphabets() -> None:
    for name in ("вода", "νερό", "parcels", "β-cells"):
        assert dataset_form(name) == dataset_form(name.upper())
        assert Policy({name: {"sensitive": True}}).demands(name) == Demands(sensitive=True)
    assert dataset_form("roads") == "roads"


def test_the_stored_policy_compares_names_in_the_same_way(postgres_url: str) -> None:
    names = [*SPELLINGS, *map(chr, _LOOK_ALIKE), *(chr(each).upper() for each in _LOOK_ALIKE), "вода", "νερό"]
    for name in names:
        assert query(postgres_url, "select holdfast.dataset_form(%s)", name) == [(dataset_form(name),)], name


def test_what_nothing_was_declared_of_is_not_asked_about() -> None:
    assert Policy({"parcels": {"sensitive": True}}).demands("roads") is None
    assert Policy({"parcels": {"sensitive": True}}).demands(None) is None
    assert govern(None, key("roads"), sovereign=False, payload=None) is None
    assert Policy({}, lambda _: Allow()).demands("roads") == Demands()
    operation = govern(None, key("roads"), sovereign=True, payload=None)
    assert operation is not None
    assert operation.demands == Demands(sovereign=True, four_eyes=True)


@pytest.mark.parametrize("declaration", [{"sovereign": True}, {"sensitive": True}])
def test_what_is_locked_whole_has_no_shards(declaration: dict[str, bool]) -> None:
    policy = Policy({"graves": declaration})
    with pytest.raises(
        ValueError, match=f"'graves' is {next(iter(declaration))} and is locked as a whole: shards must be 1, not 4"
    ):
        govern(policy, key("graves", shards=4), sovereign=False, payload=None)
    assert govern(policy, key("roads", shards=4), sovereign=False, payload=None) is None
    with pytest.raises(ValueError, match="locked as a whole"):
        govern(policy, key("roads", shards=4), sovereign=True, payload=None)
    assert govern(Policy({"*": declaration}), PlainKey("charge:42"), sovereign=False, payload=None) is not None


def test_a_rule_that_gives_no_answer_is_an_error_and_no_permission() -> None:
    for answer in (None, True, "Allow", Allow, holdfast):
        with pytest.raises(TypeError, match=r"must return Allow\(\), Deny\(reason\) or Review\(reason\)"):
            Policy({}, lambda _, value=answer: value)(context())  # type: ignore[misc]
    with pytest.raises(ZeroDivisionError):
        Policy({}, lambda _: 1 / 0)(context())  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="a rule must be a function"):
        Policy({}, "deny")  # type: ignore[arg-type]


def test_all_that_is_wrong_with_a_declaration_is_told_at_once(tmp_path: Path) -> None:
    wrong = """
        [datasets."burials*"]
        sovereign = "yes"
        when_locked = "wait"
        h3_resolution = 16
        [datasets.roads]
        secret = true
        may_reset = "jane"
        error_budget = -1
        h3_properties = ["kind"]
        [datasets.graves]
        sovereign = true
        when_locked = "fail"
        [datasets.""]
    """
    (tmp_path / "holdfast.toml").write_text(wrong)
    with pytest.raises(ValueError, match=r"holdfast\.toml: ") as refused:
        holdfast.governance.Policy.read(tmp_path / "holdfast.toml")
    for each in (
        "dataset 'burials*': sovereign must be true or false, not 'yes'",
        "dataset 'burials*': when_locked must be 'escalate' or 'fail', or be left out, not 'wait'",
        "dataset 'burials*': h3_resolution must be a whole number from 0 to 15, not 16",
        "dataset 'roads': there is no 'secret'; known are sovereign, sensitive, h3_resolution, h3_properties,",
        "dataset 'roads': h3_properties names properties of masked geometry: give h3_resolution as well",
        "dataset 'roads': may_reset must be a list of actors, such as ['ops@*'], not 'jane'",
        "dataset 'roads': error_budget must be a whole number",
        "dataset 'graves': a sovereign dataset opens a review when it is locked: leave when_locked out",
        "dataset '': the pattern must be a text that is not empty",
    ):
        assert each in str(refused.value)
    for text, why in (
        ("url = 'x'", "declares no dataset"), ("datasets = 1", "must be a table of patterns, not int"),
        ("[datasets]\nroads = true", "dataset 'roads': it must be a table"), ("[", "not valid TOML"),
    ):  # fmt: skip
        (tmp_path / "other.toml").write_text(text)
        with pytest.raises(ValueError, match=why):
            holdfast.governance.Policy.read(tmp_path / "other.toml")
    with pytest.raises(ValueError, match="cannot be read"):
        holdfast.governance.Policy.read(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="h3_resolution must be"):
        Dataset(h3_resolution=99)
    (tmp_path / "good.toml").write_text("[datasets.roads]\nsensitive = true\nmay_reset = ['jane']\n")
    read = holdfast.governance.Policy.read(tmp_path / "good.toml", lambda _: Review("look"))
    assert read.datasets("roads") == [Dataset(sensitive=True, may_reset=("jane",))]
    assert read(context()) == Review("look")


def key(dataset: str, **more: Any) -> OperationKey:
    return OperationKey(pipeline="etl", task="load", dataset=dataset, operation="upsert", **more)
