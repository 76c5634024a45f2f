"""The short version of `make owners`: a few owners of operations are killed while another process retries."""

from __future__ import annotations

import pytest

from proof.owners.run import Kills, Resets, kill_owners, reset_owner


def test_each_retry_rolls_back_once_and_none_begins_while_its_owner_lives(either: str) -> None:
    kills = kill_owners(either, 2, 5)
    assert len(kills.seconds) == 2
    assert kills.is_safe, kills


@pytest.mark.realtime
def test_two_hundred_resets_of_a_living_owner_let_nobody_in(postgres_url: str) -> None:
    resets = reset_owner(postgres_url, 200, 5)
    assert resets.is_safe, resets


def test_the_verdicts_find_what_must_not_be() -> None:
    assert Kills([0.5] * 99 + [2.0], [1] * 100, 0).is_safe
    assert not Kills([0.5], [2], 0).is_safe
    assert not Kills([0.5], [0], 0).is_safe
    assert not Kills([0.5], [1], 1).is_safe
    assert Kills([0.5], [1], 0).is_fast
    assert not Kills([0.5] * 98 + [2.0] * 2, [1] * 100, 0).is_fast
    for wrong in (Resets(9, 1, 0, True), Resets(9, 0, 1, True), Resets(9, 0, 0, owner_finished=False)):
        assert not wrong.is_safe
