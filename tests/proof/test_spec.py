"""The protocol itself is right, and not only its code: spin searches the small instances of the model in spec/, and the
lines that the protocol rests on are seen to be needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec.check import BROKEN, FOLDER, LARGE, SMALL, Check, missing, read, run

needs_spin = pytest.mark.skipif(missing() is not None, reason=str(missing()))

HOLDING = list({check.model: check for check in reversed(SMALL)}.values())
BREAKING = list({check.model: check for check in reversed(BROKEN)}.values())
"""One instance a model that holds, and one variant that breaks it. `make spec` searches all of them."""


def name(check: Check) -> str:
    return check.name.replace(" ", "-").replace(",", "")


@needs_spin
@pytest.mark.parametrize("check", HOLDING, ids=name)
def test_the_model_keeps_its_promises(check: Check) -> None:
    result = run(check)
    assert result.violation is None, result
    assert result.complete, result
    assert result.states > 1000, "an instance in which nothing happens proves nothing"


@needs_spin
@pytest.mark.parametrize("check", BREAKING, ids=name)
def test_a_broken_protocol_is_found_out_by_the_property_it_breaks(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run leaves nothing behind, though a verifier that finds something writes a trail."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = run(check)
    assert check.breaks is not None
    assert check.breaks in (result.violation or ""), result
    assert list(tmp_path.iterdir()) == []
    assert list(FOLDER.glob("*.trail")) == []


def test_every_promise_is_checked_small_and_large_and_can_be_broken() -> None:
    models = {"effects", "belief", "locks", "progress", "owner"}
    for checks in (SMALL, LARGE, BROKEN):
        assert {check.model for check in checks} == models
        assert len({check.name for check in checks}) == len(checks)


@pytest.mark.parametrize("broken", BROKEN, ids=name)
def test_what_is_broken_is_an_instance_that_holds_otherwise(broken: Check) -> None:
    """So a clean search of that one is known to reach what the changed line is there for."""
    changed = set(broken.options.split())
    unbroken = [check for check in SMALL if check.model == broken.model and set(check.options.split()) < changed]
    assert unbroken


@pytest.mark.parametrize(
    "said",
    [
        "",
        "error: max search depth too small\nerrors: 0",
        "pan: out of memory\nerrors: 0",
        "errors: 1",
        "Warning: Search not completed\nerrors: 0",
    ],
)
def test_a_search_that_was_cut_short_proves_nothing(said: str) -> None:
    assert not read(SMALL[0], said).expected
    assert not read(BROKEN[0], said).expected
