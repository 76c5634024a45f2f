"""holdfast policy: a file becomes the stored policy, by an audited command."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from tests.cli.command import ask, at, columns_of, invoke, printed, valid

BY_JANE = ("--actor", "jane", "--reason", "the council agreed")
POLICY = '[datasets."burials*"]\nsovereign = true\nrequires = ["checksum"]\nmay_reset = ["elder*"]\n'


def test_a_policy_is_planned_applied_shown_and_kept_in_versions(either: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(POLICY)
    assert invoke(*at(either, "policy", "show")).stderr == "holdfast: no policy is stored\n"
    assert invoke(*at(either, "policy", "history")).stderr == "no policy is stored\n"
    line = """dataset 'burials*' is governed: may_reset = ["elder*"], requires = ["checksum"], sovereign = true"""
    planned = invoke(*at(either, "policy", "apply", str(file), "--dry-run", *BY_JANE))
    assert (planned.stdout, planned.stderr) == (f"{line}\n", "dry run: nothing was changed\n")
    assert printed(*at(either, "policy", "apply", str(file), *BY_JANE)).splitlines() == [
        line,
        "version 1 is in force; recorded: jane: the council agreed",
    ]
    again = invoke(*at(either, "policy", "apply", str(file), *BY_JANE))
    assert (again.returncode, again.stderr) == (
        1, "holdfast: nothing would change: this policy is stored as version 1\n")  # fmt: skip
    copy = tmp_path / "copy.toml"
    copy.write_text(printed(*at(either, "policy", "show")))
    assert "nothing would change" in invoke(*at(either, "policy", "apply", str(copy), *BY_JANE)).stderr
    copy.write_text("[datasets]\n")
    done = valid("policy-apply", printed(*at(either, "policy", "apply", str(copy), "--json", *BY_JANE)))
    assert done == {"version": 2, "changes": ["dataset 'burials*' is governed no more"], "dry_run": False}
    assert printed(*at(either, "policy", "show")).endswith("\n\n[datasets]\n")
    shown = valid("policy-show", printed(*at(either, "policy", "show", "1", "--json")))
    assert shown["datasets"] == {"burials*": {"sovereign": True, "requires": ["checksum"], "may_reset": ["elder*"]}}
    assert [row["version"] for row in columns_of(ask(*at(either, "policy", "history")))] == ["2", "1"]
    assert valid("policy-history", printed(*at(either, "policy", "history", "--json")))[1] == shown
    with holdfast.Client(either) as client:
        entry = client.audit.list(action="policy.apply")[-1]
        assert (entry.actor, entry.reason) == ("jane", "the council agreed")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[datasets.a\n", "is not valid TOML: "),
        ("[dataset.a]\n", "unknown key 'dataset'"),
        ("url = 'x'\n", "declares no dataset"),
        ("[datasets.a]\nsovereing = true\n[datasets.b]\nreview = 1\n", "dataset 'a': there is no 'sovereing'"),
        ("[datasets.a]\nrequires = ['cheksum']\n", "dataset 'a': requires must be a list of actor, justification"),
        ("[datasets.'a[b]']\nreview = true\n", "pattern 'a[b]': a stored policy knows * and ?, and no brackets"),
    ],
)
def test_a_bad_file_is_refused_with_what_is_wrong_in_it(sqlite_url: str, tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(text)
    refused = invoke(*at(sqlite_url, "policy", "apply", str(file), *BY_JANE))
    assert refused.returncode == 2
    assert why in refused.stderr
    assert "line 1" in refused.stderr or "TOML" not in why
