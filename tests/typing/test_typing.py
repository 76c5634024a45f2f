"""Typical uses pass strict type checkers, and planted mistakes are found, as in a program outside of this project."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".mypy_cache" / "uses"
"""Kept from run to run: the package is most of the work."""
PATIENCE = 240.0


def mypy(folder: Path) -> dict[str, set[int]]:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--enable-error-code",
        "unused-awaitable",
    ]
    done = subprocess.run(
        [*command, "--config-file=", "--cache-dir", str(CACHE), "uses.py", "mistakes.py"],
        cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    lines: dict[str, set[int]] = {"uses.py": set(), "mistakes.py": set()}
    for file, line in re.findall(r"^(\w+\.py):(\d+): error:", done.stdout, re.MULTILINE):
        lines[file].add(int(line))
    assert done.returncode == 1, done.stdout
    return lines


def pyright(folder: Path) -> dict[str, set[int]]:
    settings = {"typeCheckingMode": "strict", "reportMissingModuleSource": "none", "pythonVersion": "3.11"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error", "--pythonpath", sys.executable, "."],
        cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    lines: dict[str, set[int]] = {"uses.py": set(), "mistakes.py": set()}
    for problem in json.loads(done.stdout)["generalDiagnostics"]:
        lines[Path(problem["file"]).name].add(problem["range"]["start"]["line"] + 1)
    return lines


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_uses_pass_and_mistakes_are_found(checker: object, tmp_path: Path) -> None:
    for name in ("uses.py", "mistakes.py"):
        (tmp_path / name).write_bytes((HERE / name).read_bytes())
    planted = {
        number
        for number, line in enumerate((HERE / "mistakes.py").read_text(encoding="utf-8").splitlines(), 1)
        if "# mistake: " in line
    }
    assert len(planted) >= 10
    assert callable(checker)
    assert checker(tmp_path) == {"uses.py": set(), "mistakes.py": planted}
