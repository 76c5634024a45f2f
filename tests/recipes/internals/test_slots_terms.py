"""The comparison of sessions and leases, for any of both: what they agree on counts once, the rest is a violation."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.recipes.slots_terms import KINDS, SlotLease, compare, repeated

names = st.sampled_from(["a", "b", "c", "d"])
numbers = st.integers(1, 5)
sessions = st.lists(
    st.fixed_dictionaries({"id": names, "slot": st.none() | numbers}, optional={"terminal": st.booleans()}), max_size=8
)


@given(sessions, st.dictionaries(numbers, names))
def test_a_slot_counts_when_a_living_session_claims_and_owns_it_and_all_else_is_told(
    claims: list[dict[str, Any]], owners: dict[int, str]
) -> None:
    living = [(each["id"], each["slot"]) for each in claims if each["slot"] is not None and not each.get("terminal")]
    leases = {slot: SlotLease(owner, slot) for slot, owner in owners.items()}
    in_use, violations = compare(claims, leases, leases)
    assert repeated(violations, violations) == violations
    assert repeated(violations, []) == []
    assert in_use == {slot for slot, owner in owners.items() if (owner, slot) in living}
    unclaimed = owners.keys() - {slot for _, slot in living}
    assert len(violations) == len(living) - len(in_use) + len(unclaimed), "each claim and each lease is told of once"
    assert {each.kind for each in violations} <= set(KINDS)


@given(sessions, st.dictionaries(numbers, names), st.sets(numbers))
def test_nothing_is_said_of_a_slot_that_changed_hands_while_the_sessions_were_read(
    claims: list[dict[str, Any]], owners: dict[int, str], churned: set[int]
) -> None:
    after = {slot: SlotLease(owner, 1) for slot, owner in owners.items()}
    before = {slot: SlotLease("other", 0) for slot in churned} | {
        slot: lease for slot, lease in after.items() if slot not in churned
    }
    in_use, violations = compare(claims, after, after)
    assert compare(claims, before, after) == (in_use, [each for each in violations if each.slot not in churned])
