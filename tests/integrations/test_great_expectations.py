"""Checkpoints as conditions: what the two shapes of results say, above all when they say nothing; and the real
package."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast
from holdfast.integrations.great_expectations import ExpectationsFailed, expects
from holdfast.lineage import Contract, Lineage


def validation(*met: bool, suite: str = "parcels", **other: Any) -> SimpleNamespace:
    """As an ExpectationSuiteValidationResult of 1.x has it: an empty one is a success."""
    results = [
        SimpleNamespace(success=each, expectation_config=SimpleNamespace(
            type="expect_column_values_to_not_be_null", kwargs={"column": f"c{number}"}))
        for number, each in enumerate(met)
    ]  # fmt: skip
    statistics = {"evaluated_expectations": len(met), "successful_expectations": sum(met)}
    return SimpleNamespace(success=all(met), results=results, statistics=statistics, suite_name=suite, meta={}, **other)


class Checkpoint:
    """Has run, and returned this."""

    name = "nightly"

    def __init__(self, success: bool | None, **runs: Any) -> None:
        self.asked: list[dict[str, Any]] = []
        self._result = SimpleNamespace(success=success, run_results=runs)

    def run(self, **arguments: Any) -> Any:
        self.asked.append(arguments)
        return self._result


def old(made: SimpleNamespace) -> dict[str, Any]:
    """As 0.18 wraps it, with the names it has there."""
    results = [{"success": each.success, "expectation_config": {
        "expectation_type": each.expectation_config.type, "kwargs": each.expectation_config.kwargs}}
        for each in made.results]  # fmt: skip
    meta = {"expectation_suite_name": made.suite_name}
    told = {"success": made.success, "results": results, "statistics": made.statistics, "meta": meta}
    return {"validation_result": told, "actions_results": {}}


@pytest.mark.parametrize("wrap", [lambda made: made, old], ids=["1.x", "0.18"])
@pytest.mark.parametrize(
    ("success", "runs", "told"),
    [
        (True, {"one": validation(True), "two": validation(True, True)}, None),
        (True, {"one": validation()}, "suite 'parcels' is empty: nothing was expected"),
        (True, {"one": validation(True), "two": validation(suite="roads")}, "suite 'roads' is empty"),
        (True, {}, "it validated nothing"),
        (False, {"one": validation(True, False)}, r"expect_column_values_to_not_be_null\(c1\) was not met"),
        (False, {"one": validation(*[False] * 9)}, "and 4 more"),
        (False, {"one": validation(True)}, "did not succeed, and gives no reason"),
        (None, {"one": validation(True)}, "did not succeed, and gives no reason"),
    ],
)  # fmt: skip
def test_a_checkpoint_holds_only_if_something_was_expected_and_met(
    wrap: Any, success: bool | None, runs: dict[str, Any], told: str | None
) -> None:
    condition = expects(Checkpoint(success, **{name: wrap(each) for name, each in runs.items()}))
    if told is None:
        assert condition() is True
    else:
        with pytest.raises(ExpectationsFailed, match=f"^checkpoint nightly: .*{told}"):
            condition()


def test_a_validation_by_itself_is_judged_as_well() -> None:
    assert expects(SimpleNamespace(run=lambda: validation(True)))() is True
    for empty in (
        validation(),
        SimpleNamespace(success=True, results=[], statistics=None),
        SimpleNamespace(success=True),
        None,
    ):
        with pytest.raises(ExpectationsFailed, match=r"is empty|validated nothing"):
            expects(SimpleNamespace(run=lambda made=empty: made))()


def test_as_the_check_of_a_contract_its_verdict_is_recorded_with_the_mutation(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        for number, each in enumerate((validation(True), validation(True, False), validation())):
            agreed = Contract("parcels", "2.1", expects(Checkpoint(True, one=each)))
            with (
                nullcontext() if number == 0 else pytest.raises(holdfast.OperationFailed, match=r"was not met|is empty")
            ):
                client.operation(str(number), lineage=Lineage(contract=agreed)).run(int)
        ends = [each for each in client.relays.events() if each.type in ("COMPLETE", "FAIL")]
    told = {"name": "parcels", "version": "2.1"}
    assert [each.contract for each in ends] == [{**told, "verdict": said} for said in ("passed", "failed", "failed")]


def test_it_has_a_name_and_passes_its_arguments_on() -> None:
    checkpoint = Checkpoint(True, one=validation(True))
    condition = expects(checkpoint, batch_parameters={"day": 1})
    assert (condition.__name__, expects(checkpoint, name="rows").__name__) == ("checkpoint nightly", "rows")
    assert condition("whatever a condition is given")
    assert checkpoint.asked == [{"batch_parameters": {"day": 1}}]
    with pytest.raises(TypeError, match="checkpoint must have a method run"):
        expects("nightly")


@pytest.mark.filterwarnings("ignore")  # those of the package and of what it imports
def test_great_expectations_itself_decides_what_is_committed(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GX_ANALYTICS_ENABLED", "false")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gx = pytest.importorskip(
        "great_expectations", reason="great_expectations is not installed: pip install great_expectations"
    )
    pandas = pytest.importorskip("pandas")  # which it needs itself
    context = gx.get_context(mode="ephemeral")
    asset = context.data_sources.add_pandas("memory").add_dataframe_asset("parcels")
    batch = asset.add_batch_definition_whole_dataframe("all")
    checkpoints = {}
    filled = gx.expectations.ExpectColumnValuesToNotBeNull(column="owner")
    for name, expectations in (("filled", [filled]), ("empty", [])):
        suite = context.suites.add(gx.ExpectationSuite(name=name, expectations=expectations))
        validated = gx.ValidationDefinition(name=name, data=batch, suite=suite)
        definition = context.validation_definitions.add(validated)
        checkpoints[name] = context.checkpoints.add(gx.Checkpoint(name=name, validation_definitions=[definition]))
    cases = (
        ("good", "filled", "jane", None),
        ("bad", "filled", None, r"checkpoint filled: .*expect_column_values_to_not_be_null\(owner\) was not met"),
        ("unchecked", "empty", "jane", "checkpoint empty: suite 'empty' is empty"),
    )
    with (
        holdfast.Client(sqlite_url) as client,
        closing(sqlite3.connect(tmp_path / "app.db", isolation_level=None)) as conn,
    ):
        conn.execute("create table parcels (key, owner)")
        for key, name, owner, told in cases:
            frame = pandas.DataFrame({"owner": ["joe", owner]})
            check = expects(checkpoints[name], batch_parameters={"dataframe": frame})
            operation = client.operation(key, tx=conn, lineage=Lineage(contract=Contract("parcels", "2.1", check)))
            with nullcontext() if told is None else pytest.raises(holdfast.OperationFailed, match=told):
                operation.run(lambda row=(key, owner): list(conn.execute("insert into parcels values (?, ?)", row)))
        assert conn.execute("select key, owner from parcels").fetchall() == [("good", "jane")]
        ends = [each for each in client.relays.events() if each.type in ("COMPLETE", "FAIL")]
    assert [each.contract and each.contract["verdict"] for each in ends] == ["passed", "failed", "failed"]
