"""holdfast reviews, and the policy of holdfast.toml, as processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast import commands as operator
from tests.cli.command import ask, at, columns_of, invoke, on_terminal, printed, valid

BY_JANE = ("--actor", "jane", "--reason", "we agreed")
KEY = holdfast.OperationKey(pipeline="etl", task="load", dataset="graves", operation="upsert")
POLICY = '[datasets."graves*"]\nsovereign = true\nmay_reset = ["elder*"]\n'


def up_for_review(url: str) -> int:
    asks = holdfast.governance.Review("who has\x1b[31m seen the plan?")
    with holdfast.Client(url, policy=lambda _: asks) as client, pytest.raises(holdfast.PolicyDenied) as told:
        client.operation(KEY).run(int)
    assert told.value.review is not None
    return told.value.review


def test_reviews_are_listed_shown_and_answered(either: str) -> None:
    number = str(up_for_review(either))
    [row] = columns_of(ask(*at(either, "reviews", "ls")))
    assert (row["review"], row["operation"], row["dataset"], row["cause"], row["status"]) == (
        number, "etl/load graves upsert", "graves", "policy", "open")  # fmt: skip
    assert row["detail"] == r"who has\x1b[31m seen the plan?"
    [review] = valid("reviews-ls", printed(*at(either, "reviews", "ls", "--json")))
    assert valid("reviews-show", printed(*at(either, "reviews", "show", number, "--json"))) == review
    assert "who has" in printed(*at(either, "reviews", "show", number))
    assert "graves" in on_terminal(*at(either, "reviews", "ls"), columns=60)
    done = printed(*at(either, "reviews", "approve", number, *BY_JANE))
    assert done.splitlines() == [
        "operation 'etl/load graves upsert', under review because of policy, may run once more",
        "review.approve done; recorded: jane: we agreed",
    ]
    again = invoke(*at(either, "reviews", "reject", number, *BY_JANE))
    assert (again.returncode, again.stderr) == (
        1, f"holdfast: review {number} is already approved, by jane: we agreed\n")  # fmt: skip
    assert invoke(*at(either, "reviews", "ls")).stderr == "there are no open reviews\n"
    [review] = valid("reviews-ls", printed(*at(either, "reviews", "ls", "--status", "approved", "--json")))
    assert (review["status"], review["actor"], review["answer"], review["spent_at"]) == (
        "approved",
        "jane",
        "we agreed",
        None,
    )
    with holdfast.Client(either) as client:
        entries = [(each.action, each.subject, each.actor, each.outcome) for each in client.audit.list()]
        assert ("review.approve", f"review {number}", "jane", "done") in entries
        assert client.operation(KEY, options=holdfast.OperationOptions(sovereign=True)).run(lambda: 7).result == 7
        [record] = client.reviews.list(status=None)
        assert record.spent_at is not None


def test_a_rejected_one_that_never_began_is_let_go_by_a_reset(sqlite_url: str) -> None:
    number = str(up_for_review(sqlite_url))
    looked = printed(*at(sqlite_url, "do", "review.reject", number, "--reason", "no", "--dry-run"))
    assert (
        looked == "operation 'etl/load graves upsert', under review because of policy, is refused until it is reset\n"
    )
    assert "review.reject done" in printed(*at(sqlite_url, "reviews", "reject", number, *BY_JANE))
    done = printed(*at(sqlite_url, "ops", "reset", KEY.digest, *BY_JANE))
    assert done.startswith("operation 'etl/load graves upsert', which was refused before it began, may run again\n")
    with holdfast.Client(sqlite_url) as client:
        assert client.operation(KEY, options=holdfast.OperationOptions(sovereign=True)).run(lambda: 7).result == 7


def test_what_holdfast_toml_declares_binds_the_command_line(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = str(up_for_review(sqlite_url))
    (tmp_path / "holdfast.toml").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    for command in (("reviews", "approve", number), ("ops", "reset", KEY.digest)):
        refused = invoke(*at(sqlite_url, *command, *BY_JANE))
        assert (refused.returncode, "reviewed by elder*, not by 'jane'" in refused.stderr) == (1, True)
    assert "done" in printed(*at(sqlite_url, "reviews", "approve", number, "--actor", "elder Mary", "--reason", "yes"))
    (tmp_path / "holdfast.toml").write_text("[datasets.graves]\nsovereign = 1\nsecret = true\n")
    wrong = invoke(*at(sqlite_url, "reviews", "ls"))
    assert wrong.returncode == 2
    for each in ("sovereign must be true or false, not 1", "there is no 'secret'"):
        assert f"dataset 'graves': {each}" in wrong.stderr


def test_nobody_answers_for_others_or_what_is_not_there(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        for name in ("review.approve", "review.reject"):
            with pytest.raises(operator.CommandRefused, match="there is no review 9"):
                operator.run(client, name, {"number": 9}, actor="jane", reason="x")
        assert client.reviews.get(2**63) is None
    assert invoke(*at(sqlite_url, "reviews", "show", "9")).stderr == "holdfast: there is no review 9\n"
    assert invoke(*at(sqlite_url, "reviews", "approve", "9")).returncode == 2
