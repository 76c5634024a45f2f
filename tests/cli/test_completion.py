"""Shell completion: what the page on the command line says to put into a shell's start-up file works there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.children import PATIENCE
from tests.cli.command import call

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8").partition("## Completion")[2]
ASKED = {
    ("op",): {"ops"},
    ("ops", "re"): {"recover", "replay", "reset"},
    ("do", "lease."): {"lease.release", "lease.wipe"},
    ("ops", "ls", "--st"): {"--status"},
    ("ops", "ls", "--status", "pa"): {"partial"},
}


def test_bash_completes_commands_options_and_choices() -> None:
    [line] = re.findall(r"^(eval .*bash_source.*?)  +#", PAGE, re.MULTILINE)
    asks = [
        f"COMP_WORDS=(holdfast {' '.join(words)}); COMP_CWORD={len(words)}; COMPREPLY=(); "
        """_holdfast_completion holdfast; echo "${COMPREPLY[@]}" """
        for words in ASKED
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "-c", "\n".join([line, *asks])], capture_output=True, text=True, env={**os.environ, "PATH": path},
        timeout=2 * PATIENCE, check=False,
    )  # fmt: skip
    line_words = [set(line.split()) for line in done.stdout.splitlines()]
    assert (line_words, done.stderr) == ([*ASKED.values()], "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_that_the_page_names_has_a_script(shell: str) -> None:
    assert f"_HOLDFAST_COMPLETE={shell}_source holdfast" in PAGE
    done = call(_HOLDFAST_COMPLETE=f"{shell}_source")
    assert (done.returncode, done.stderr) == (0, "")
    if found := shutil.which(shell):
        subprocess.run([found, "-n"], input=done.stdout, text=True, timeout=PATIENCE, check=True)
