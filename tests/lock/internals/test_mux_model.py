"""The multiplexer against a model of the server: whatever happens in whatever order, no key has two holders, nothing is
locked twice, nobody is forgotten, and nothing stays locked when nobody wants it."""

from __future__ import annotations

import os

from hypothesis import settings

from tests.lock.internals.mux_cut import CutWorld
from tests.lock.internals.mux_past import PastWorld
from tests.lock.internals.mux_world import World

EXAMPLES = int(os.environ.get("HOLDFAST_MUX_EXAMPLES", "50"))

TestMux = World.TestCase
TestMux.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
TestMuxWithFastWay = PastWorld.TestCase
TestMuxWithFastWay.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
TestMuxCutShort = CutWorld.TestCase
TestMuxCutShort.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
