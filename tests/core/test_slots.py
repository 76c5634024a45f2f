"""The truth about slots, for any sessions and any leases: what both agree on counts once, and nothing goes untold."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.slots import KINDS, reconcile

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
    true, violations = reconcile(found, owners)
    assert true == {slot for slot, owner in owners.items() if (owner, slot) in living}
    unclaimed = owners.keys() - {slot for _, slot in living}
    assert len(violations) == len(living) - len(true) + len(unclaimed), "each claim and each lease is told of once"
    assert {each.kind for each in violations} <= set(KINDS)
