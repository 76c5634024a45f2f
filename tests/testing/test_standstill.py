"""Pauses of this process, as ``Standstill`` records them."""

import ctypes

import pytest

from holdfast.testing.history import now
from holdfast.testing.standstill import Standstill
from tests.children import eventually


def test_a_standstill_counts_where_it_lies_in_the_span_that_was_asked_for() -> None:
    with Standstill() as standstill:
        ahead = now() + 1000
        for due, woke in ((0.0, 0.001), (1.0, 3.0), (8.0, 12.0)):
            standstill.note(ahead + due, ahead + woke)
        assert standstill.seconds(ahead, ahead + 20) == pytest.approx(6.0)
        assert standstill.seconds(ahead + 2, ahead + 10) == pytest.approx(3.0)
        assert standstill.seconds(ahead + 3, ahead + 8) == 0
        assert standstill.figures()["longest"] >= 4.0


def test_a_standstill_of_this_process_is_noticed() -> None:
    with Standstill() as standstill:
        began = now()
        ctypes.PyDLL(None).usleep(300_000)  # keeps the interpreter's lock: no thread of this process runs
        eventually(lambda: standstill.seconds(began, now()) > 0.2, "it is noticed")
