"""The lock is what a fresh machine installs from: every line pinned, every file hashed, and no address in it."""

from __future__ import annotations

import re
from pathlib import Path

LOCK = Path(__file__).parents[2] / "requirements-dev.lock"


def test_the_lock_pins_and_hashes_everything_and_names_no_address() -> None:
    text = LOCK.read_text()
    assert "://" not in text
    assert "index-url" not in text
    requirements = re.split(r"\n(?=\S)", text.strip())
    assert len(requirements) > 20
    for requirement in requirements:
        assert re.match(r"[\w.-]+(\[[\w,-]+\])?==\S+", requirement), requirement
        assert "--hash=sha256:" in requirement, requirement
