"""Fair shares of shards, without a database."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.recipes.shards_terms import ShardTerms, plan, shard_of

members = st.sets(st.sampled_from([f"r{number}" for number in range(9)]), min_size=1)


def settle(count: int, everyone: set[str], owners: dict[int, str], seed: int = 0) -> tuple[dict[int, str], int]:
    """Let the replicas plan in turn until none has anything to do. Returns the owners, and how many shards moved."""
    owners = {shard: owner for shard, owner in owners.items() if owner in everyone}
    order, moved = random.Random(seed), 0
    for _ in range(200):
        idle = True
        for me in order.sample(sorted(everyone), len(everyone)):
            todo = plan(me, count, everyone, owners)
            for shard in todo.release:
                assert owners.pop(shard) == me
                moved += 1
            for shard in todo.take:
                assert shard not in owners
                owners[shard] = me
            idle = idle and not (todo.release or todo.take or todo.is_short)
        if idle:
            return owners, moved
    raise AssertionError("never settled")


@given(st.integers(1, 64), members, st.integers(0, 5))
def test_everyone_ends_with_a_fair_share_and_every_shard_with_an_owner(count: int, who: set[str], seed: int) -> None:
    owners, moved = settle(count, who, {}, seed)
    shares = Counter(dict.fromkeys(who, 0)) + Counter(owners.values())
    assert len(owners) == count
    assert max(Counter(owners.values()).values()) - min(shares.get(each, 0) for each in who) <= 1
    assert moved == 0, "what is free is taken, never given back"


@given(st.integers(1, 64), members, members, st.integers(0, 5))
def test_joining_and_leaving_move_no_more_than_they_must(count: int, old: set[str], new: set[str], seed: int) -> None:
    before, _ = settle(count, old, {}, seed)
    after, moved = settle(count, new, before, seed)
    kept = {shard: owner for shard, owner in before.items() if owner in new}
    held = sorted(Counter({each: sum(owner == each for owner in kept.values()) for each in new}).values(), reverse=True)
    small, larger = divmod(count, len(new))
    least = sum(max(0, have - (small + (rank < larger))) for rank, have in enumerate(held))
    assert moved == least
    assert sum(after[shard] != owner for shard, owner in kept.items()) == least


def test_a_shard_of_a_key_is_the_same_for_ever_and_spread_evenly() -> None:
    assert [shard_of(key, 64) for key in ("sb-1", "sb-2", "é")] == [15, 33, 47]
    spread = Counter(shard_of(f"sb-{number}", 16) for number in range(16_000))
    assert len(spread) == 16
    assert min(spread.values()) > 800


def test_leases_are_read_as_members_and_owners() -> None:
    terms = ShardTerms.check("sweep", 4, ttl=30.0, holder=None)
    leases = [
        (terms.member_lease("n1"), "a/n1"), (terms.member_lease("n2"), "b/n2"), (terms.shard_lease(3), "a/n1"),
        ("sweep/shard/x", "odd"), ("sweep/shard/²", "odd"), ("sweeper/shard/1", "other"), ("sweep", "elector"),
    ]  # fmt: skip
    assert terms.parse_leases(leases) == ({"a/n1", "b/n2"}, {3: "a/n1"})


@pytest.mark.parametrize(
    ("options", "named"),
    [({"count": 0}, "count"), ({"count": 4097}, "count"), ({"count": True}, "count"), ({"name": "x" * 151}, "name"),
     ({"ttl": 0}, "ttl"), ({"holder": "x" * 181}, "holder")],
)  # fmt: skip
def test_wrong_terms_are_named(options: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {"name": "sweep", "count": 8, "ttl": 30.0, "holder": None} | options
    with pytest.raises(ValueError, match=named):
        ShardTerms.check(**arguments)
