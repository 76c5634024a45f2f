"""Electors and slots on a PostgreSQL without LISTEN and session locks: the same tests, where polling has to do."""

from __future__ import annotations

import pytest

from tests.children import eventually
from tests.recipes.electors import STEADY, replicas, replicas_beside
from tests.recipes.slots.test_slots import (  # noqa: F401
    client,
    slots,
    test_a_handle_waits_skips_and_gives_up_as_everywhere,
    test_any_free_slot_is_claimed_and_no_more_than_there_are,
    test_one_owner_may_have_several_and_each_goes_on_its_own,
    test_pools_do_not_disturb_each_other_whatever_they_are_called,
    test_the_capacity_grows_and_shrinks_while_slots_are_held,
)
from tests.recipes.test_elector import (  # noqa: F401
    test_on_a_loop_the_work_is_cancelled_and_its_end_is_waited_for,
    test_the_lease_is_held_until_the_work_has_ended,
    test_the_work_that_ends_by_itself_ends_the_run_and_its_error_is_told,
)


@pytest.fixture
def either(poor_url: str) -> str:
    """What these tests call their database."""
    return poor_url


def test_resigning_hands_over_at_the_next_poll(poor_url: str) -> None:
    """The one that resigns stands by after ten minutes: the other one need not be faster."""
    with (
        replicas(poor_url, 1, **STEADY | {"retry_every": 600.0, "ttl": 3600.0}) as (one,),
        replicas_beside(f"{poor_url}?application_name=other", **STEADY | {"ttl": 3600.0}) as other,
    ):
        assert one.elector.resign() is True
        eventually(lambda: other.leads, "the other one leads")
        assert one.log == ["begin", "end"]
        assert other.terms[0].fence > one.terms[0].fence
