"""A promise that names a test which is not there is no promise."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROMISES = (ROOT / "docs/explanation/guarantees.md").read_text()
EVIDENCE = (ROOT / "docs/explanation/evidence.md").read_text()
DESIGNS = (ROOT / "docs/explanation/designs.md").read_text()


def existing_tests() -> set[str]:
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("src/holdfast/testing/*.py")]
    return set(re.findall(r"def (test_\w+)", "\n".join(file.read_text() for file in files)))


def test_every_test_that_a_promise_names_exists_and_every_promise_names_one() -> None:
    tests = existing_tests()
    sections = re.split(r"^### (?=\d+\. )", EVIDENCE.partition("## Chaos tests")[0], flags=re.MULTILINE)[1:]
    assert len(sections) == 14
    for section in sections:
        named = set(re.findall(r"`(test_\w+)`", section))
        assert named, section
        assert named <= tests, named - tests


def test_every_requirement_of_a_design_names_tests_that_exist() -> None:
    rows = [row for row in re.findall(r"^\| (.*) \|$", DESIGNS, re.MULTILINE) if not row.startswith("Requirement |")]
    for row in rows:
        assert re.findall(r"`test_\w+`", row.rpartition("|")[2]), row
    named = set(re.findall(r"`(test_\w+)`", DESIGNS))
    assert named <= existing_tests(), named - existing_tests()


def test_every_promise_links_to_its_tests() -> None:
    rows = re.findall(r"^\| (\d+) \| .*\[tests\]\(evidence\.md#(\d+)-", PROMISES, re.MULTILINE)
    assert rows == [(str(number), str(number)) for number in range(1, 15)]


def test_the_last_long_run_says_with_which_seed_and_commit_it_can_be_had_again() -> None:
    run = EVIDENCE.partition("### The last long run")[2].partition("### Leader succession")[0]
    assert re.search(r"seed \d+", run)
    assert re.search(r"commit `[0-9a-f]{7,}`", run)
