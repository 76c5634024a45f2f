"""tests.standstill: a failure says how long the machine stood still."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.children import HANG

FAILS = """
import ctypes

def test_it():
    ctypes.PyDLL(None).usleep(300_000)  # keeps the interpreter's lock: no thread of this process runs
    assert False
"""


def test_a_failure_says_how_long_the_machine_stood_still(tmp_path: Path) -> None:
    (tmp_path / "test_fails.py").write_text(FAILS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.standstill", "-p", "no:cacheprovider", "-c", "/dev/null"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=HANG,
    )  # fmt: skip
    assert "1 failed" in done.stdout
    [(total, longest)] = re.findall(
        r"The machine stood still for ([\d.]+) s in all, ([\d.]+) s at the lon", done.stdout
    )
    assert float(total) >= float(longest) >= 0.2
