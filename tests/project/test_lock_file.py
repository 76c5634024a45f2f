"""A fresh machine and the image install from lock files: every line pinned, every file hashed, and no address in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["requirements-dev.lock", "deploy/requirements.lock"])
def test_a_lock_pins_and_hashes_everything_and_names_no_address(name: str) -> None:
    text = (ROOT / name).read_text()
    assert "://" not in text
    assert "index-url" not in text
    requirements = re.split(r"\n(?=\S)", text.strip())
    assert len(requirements) > 20
    for requirement in requirements:
        assert re.match(r"[\w.-]+(\[[\w,-]+\])?==\S+", requirement), requirement
        assert "--hash=sha256:" in requirement, requirement
