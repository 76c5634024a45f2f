"""The truth about slots, for any sessions and any leases: what both agree on counts once, and nothing goes untold."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.recipes.slot_terms import KINDS, Lease, judge, lasting

names = st.sampled_from(["a", "b", "c", "d"])
numbers = st.integers(1, 5)
sessions = st.lists(
    st.fixed_dictionaries({"id": names, "slot": st.none() | numbers}, optional={"terminal": st.booleans()}), max_size=8
)


@given(sessions, st.dictionaries(numbers, names))
def test_a_slot_counts_when_a_living_session_claims_and_owns_it_and_all_else_is_told(
    found: list[dict[str, Any]], owners: dict[int, str]
) -> None:
    living = [(each["id"], each["slot"]) for each in found if each["slot"] is not None and not each.get("terminal")]
    leases = {slot: Lease(owner, slot) for slot, owner in owners.items()}
    true, violations = judge(found, leases, leases)
    assert lasting(violations, violations) == violations
    assert lasting(violations, []) == []
    assert true == {slot for slot, owner in owners.items() if (owner, slot) in living}
    unclaimed = owners.keys() - {slot for _, slot in living}
    assert len(violations) == len(living) - len(true) + len(unclaimed), "each claim and each lease is told of once"
    assert {each.kind for each in violations} <= set(KINDS)


@given(sessions, st.dictionaries(numbers, names), st.sets(numbers))
def test_nothing_is_said_of_a_slot_that_changed_hands_while_the_sessions_were_read(
    found: list[dict[str, Any]], owners: dict[int, str], churned: set[int]
) -> None:
    after = {slot: Lease(owner, 1) for slot, owner in owners.items()}
    before = {slot: Lease("somebody", 0) for slot in churned} | {
        slot: lease for slot, lease in after.items() if slot not in churned
    }
    true, all_told = judge(found, after, after)
    assert judge(found, before, after) == (true, [each for each in all_told if each.slot not in churned])
