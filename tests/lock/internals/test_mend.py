"""An event that is cut short before its instructions, one after the other: what random cuts seldom hit."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.lock.internals.mux_cut import CutMux, CutWorld
from tests.lock.internals.mux_world import ERROR, OTHER

Step = Callable[[CutWorld], object]
STRIDE = int(os.environ.get("HOLDFAST_INTERRUPT_STRIDE", "3"))
"""Every so many instructions; 1 for all of them, in `make torture`."""


def ask(number: int, owner: int) -> Step:
    return lambda world: world.asked((b"%d" % number,), True, owner)


def release(owner: int, how: Callable[..., None] = CutWorld.release) -> Step:
    def step(world: CutWorld) -> None:
        for ticket in list(world.all):
            if ticket.owner == owner:
                how(world, ticket)

    return step


def hand_on(owner: int) -> Step:
    return release(owner, CutWorld.hand_on)


def give_up(owner: int) -> Step:
    def step(world: CutWorld) -> None:
        for ticket in [each for each in world.all if each.owner == owner]:
            world.do(world.mux.give_up(ticket))

    return step


def other_takes(number: int) -> Step:
    return lambda world: world.server.try_lock((b"%d" % number,), OTHER)


def other_frees(number: int) -> Step:
    return lambda world: world.server.unlock((b"%d" % number,), OTHER)


def lose(world: CutWorld) -> None:
    """A session ends, and whoever was in it goes on elsewhere."""
    session = next(each for each in world.alive if each.held)
    world.end(session)
    world.do(world.mux.lost(session, ERROR))


def look(world: CutWorld) -> None:
    """Connections come about, statements are answered."""
    world.step_once()


SCENES: dict[str, list[Step]] = {
    "alone": [ask(1, 1), look, look, look, release(1), look],
    "in line": [ask(1, 1), ask(1, 2), look, look, look, release(1), release(2), look],
    "handed on": [ask(1, 1), ask(1, 2), look, look, look, hand_on(1), hand_on(2), look],
    "in a batch": [ask(1, 1), look, ask(2, 2), ask(3, 3), look, look, release(2), release(3), look],
    "lost": [*(ask(each, each) for each in range(1, 5)), look, look, look, look, ask(1, 5), lose, look, look],
    "in the server's line": [other_takes(1), ask(1, 1), look, look, look, look, other_frees(1), look, release(1), look],
    "given up in the server's line": [other_takes(1), ask(1, 1), look, look, look, look, give_up(1), look, look, look],
}


@pytest.mark.parametrize("scene", SCENES)
def test_an_event_cut_short_before_any_instruction_is_put_right(scene: str) -> None:
    """Never two statements at once in a session, nobody forgotten, nothing left: the world sees to it."""
    cuts = 0
    for number, _ in enumerate(SCENES[scene]):
        at, hit = 0, True
        while hit:
            hit = _play(SCENES[scene], number, at)
            cuts += hit
            at += STRIDE
    assert cuts > 500 // STRIDE


def _play(steps: list[Step], number: int, at: int) -> bool:
    """Whether there was anything to be cut short at instruction ``at`` of the first event of that step."""
    world = CutWorld()
    mux = world.mux
    assert isinstance(mux, CutMux)
    for each, step in enumerate(steps):
        mux.cut_at = at if each == number else None
        try:
            step(world)
        except AssertionError as error:
            raise AssertionError(f"cut in step {number} at {at}") from error
    hit = mux.was_cut
    world.teardown()
    return hit
