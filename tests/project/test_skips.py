"""tests.skips: what was skipped for what is missing stands in one line, with the command that installs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.children import HANG
from tests.skips import REASON, summary

SKIPS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_it(number):
    pytest.skip("spin is not installed: apt-get install spin")
"""
ROOT = Path(__file__).parents[2]


def test_skips_are_counted_by_what_is_missing() -> None:
    pooled = "Skipped: PgBouncer is not installed: apt-get install pgbouncer"
    spin = "spin is not installed: apt-get install spin"
    energy = "Skipped: codecarbon is not installed: pip install codecarbon"
    assert summary([]) is None
    assert summary(["Skipped: needs /proc"]) == "Skipped tests: 1 for a reason listed above."
    assert summary([pooled, spin, spin, energy, "Skipped: from Python 3.12 on"]) == (
        "Skipped tests: 2 without spin, 1 without PgBouncer, 1 without codecarbon, 1 for a reason listed above. "
        "To run them: apt-get install pgbouncer spin && pip install codecarbon"
    )


def test_a_run_ends_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPS)
    options = ["-p", "tests.skips", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        check=False, capture_output=True, text=True, cwd=ROOT, timeout=HANG,
    )  # fmt: skip
    assert "\nSkipped tests: 3 without spin. To run them: apt-get install spin\n" in done.stdout


def test_every_reason_that_names_something_not_installed_says_how_to_install_it() -> None:
    """Also in the modules that tests take their reasons from."""
    folders = ("tests", "proof", "src/holdfast/testing")
    files = [ROOT / "spec" / "check.py", *(file for name in folders for file in (ROOT / name).rglob("*.py"))]
    reasons = [
        reason
        for file in files
        if file != Path(__file__)
        for reason in re.findall(r'(?<!")"([^"\n]+ is not installed[^"\n]*)"(?!")', file.read_text())
    ]
    assert len(reasons) >= 5, "the pattern matches what is there"
    assert [reason for reason in reasons if not REASON.fullmatch(reason)] == []
