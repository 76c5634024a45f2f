"""The environment is made once: a second `make` is fast; other ingredients or another address make it anew."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUP = 'mkdir -p "$1" && echo made >>made\n'
OF_MAKE = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "ARGS", "PYTHON"}
"""What a make that runs these tests hands on to every make below it."""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in OF_MAKE}


def make(folder: Path) -> int:
    """How often the environment has been made, after one more `make setup`."""
    subprocess.run(["make", "setup"], cwd=folder, env=ENVIRONMENT, check=True, capture_output=True, timeout=60)
    return len((folder / "made").read_text().split())


def test_the_environment_is_made_anew_only_when_the_lock_or_its_address_changed(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "scripts").mkdir(parents=True)
    (here / "scripts/setup.sh").write_text(SETUP)
    for name in ("Makefile", "pyproject.toml", "requirements-dev.lock"):
        shutil.copy(ROOT / name, here / name)
    assert [make(here), make(here)] == [1, 1]
    (here / "requirements-dev.lock").touch()
    assert [make(here), make(here)] == [2, 2]
    here.rename(there)
    assert [make(there), make(there)] == [3, 3]


def test_the_demo_makes_a_light_environment_unless_there_is_one_or_it_needs_postgresql(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "deploy").mkdir()
    program = 'printf "#!/bin/sh\\necho $1 $2 \\"\\$@\\"\\n" >"$1/bin/python" && chmod +x "$1/bin/python"'
    program = f'mkdir -p "$1/bin" && {program}\n'
    (tmp_path / "scripts/setup.sh").write_text(program)
    for name in ("Makefile", "pyproject.toml", "requirements-dev.lock", "deploy/requirements.lock"):
        shutil.copy(ROOT / name, tmp_path / name)

    def demo(*arguments: str) -> str:
        command = ["make", "demo", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=ENVIRONMENT, check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout.strip()

    assert demo() == ".venv-demo deploy/requirements.lock examples/demo.py"
    assert demo("ARGS=--postgres") == ".venv examples/demo.py --postgres"
    assert demo() == ".venv examples/demo.py"
