"""The lease against a model of it, on a virtual clock: whatever is asked in whatever order, both give the same answer.

Time passes by making the rows older. Lifetimes and steps are chosen so that no comparison is ever closer than 150 s to
its instant, which is the time an example may take.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from holdfast.errors import FencedOut
from holdfast.lease.protect import protect
from tests.conftest import migrated, server
from tests.raw_session import Raw, Row, acquisition, trials

NAMES = ("one", "two", "three")
names = st.sampled_from(NAMES)
holders = st.integers(0, 4)
ttls = st.sampled_from([950.0, 3350.0])
at_leasts = st.sampled_from([0.0, 550.0, 950.0])
picks = st.integers(0, 10**6)


@dataclass
class Beat:
    ttl: float
    expires: float
    solo: bool
    dead: bool = False


@dataclass
class Held:
    holder: str
    token: str
    beat: str
    fence: int
    keep_until: float
    kept: bool = False
    secret: str | None = None


class LeaseMachine(RuleBasedStateMachine):
    """Two explicit holders, who may re-enter with one of two secrets, and three default ones; beats of one lease
    alone and shared ones."""

    def __init__(self, raw: Raw) -> None:
        super().__init__()
        self.raw = raw
        self.now = 0.0
        self.beats: dict[str, Beat] = {}
        self.leases: dict[str, Held] = {}
        self.told: list[tuple[str, str, int, str]] = []
        self.fences: list[int] = []
        self.requests: list[Row] = []
        self.shared: list[tuple[str, float]] = []
        self.kept = 0

    @initialize(wishes=st.lists(st.tuples(names, holders, ttls, at_leasts, picks), min_size=2, max_size=6))
    def begin(self, wishes: list[tuple[str, int, float, float, int]]) -> None:
        """With some of them taken, or asked for in vain: few examples would come to much by themselves."""
        self.raw.clear()
        for wish in wishes:
            self.acquire(*wish)

    def live(self, name: str) -> bool:
        return name in self.leases and self.breathes(self.leases[name].beat)

    def breathes(self, beat: str) -> bool:
        return beat in self.beats and not self.beats[beat].dead and self.beats[beat].expires > self.now

    def tell(self, name: str, outcome: str) -> None:
        held = self.leases[name]
        if not held.kept or outcome == "forced":
            self.told.append((name, held.holder, held.fence, outcome))

    def end(self, name: str, outcome: str) -> None:
        self.tell(name, outcome)
        held = self.leases[name]
        if self.beats.get(held.beat) and self.beats[held.beat].solo:
            del self.beats[held.beat]
        if outcome == "released" and held.keep_until > self.now:
            self.kept += 1
            beat = f"kept {self.kept}"
            self.beats[beat] = Beat(0, held.keep_until, solo=True)
            self.leases[name] = Held(held.holder, "", beat, held.fence, 0, kept=True)
        else:
            del self.leases[name]

    def owner_of(self, pick: int) -> tuple[str, str]:
        """Some name, and a token it was once asked for with."""
        if not self.requests:
            return NAMES[pick % 3], acquisition("x")["token"]
        request = self.requests[-1 - pick % min(len(self.requests), 6)]
        return request["name"], request["token"]

    def holds(self, name: str, token: str) -> bool:
        return name in self.leases and self.leases[name].token == token

    @rule(name=names, holder=holders, ttl=ttls, at_least=at_leasts, way=picks)
    def acquire(self, name: str, holder: int, ttl: float, at_least: float, way: int) -> None:
        """On a beat of its own, on one that was made before, or on one that the first to be granted makes."""
        beat = None
        if way % 3 == 1:
            beat = acquisition("x")["token"]
            self.shared.append((beat, ttl))
        elif way % 3 and self.shared:
            beat, ttl = self.shared[way % len(self.shared)]
        label = f"explicit {holder}" if holder < 2 else f"default {holder}"
        request = acquisition(
            name,
            label,
            ttl=ttl,
            at_least=at_least,
            reenter=f"secret {way % 2}" if holder < 2 else None,
            beat=beat,
            solo=beat is None and not way % 2,
        )
        if beat in self.beats and way % 2:
            request["process"] = None
        self.requests.append(request)
        self.ask(request)

    @rule(pick=picks)
    def acquire_again(self, pick: int) -> None:
        """The same request once more, as after an answer that was lost."""
        if self.requests:
            self.ask(self.requests[-1 - pick % min(len(self.requests), 3)])

    def ask(self, request: Row) -> None:
        name, token = request["name"], request["token"]
        before = self.everything()
        beats = {each[0]: each[2] for each in self.raw.rows("lease")}
        [row] = self.raw.call("lease_acquire", **request)
        held = self.leases.get(name)
        if self.live(name) and held is not None and held.token == token:
            assert (row["status"], row["fence"]) == ("acquired", held.fence)
            assert self.everything() == before
        elif self.live(name) and held is not None and (held.kept or not self.reenters(held, request)):
            assert (row["status"], row["held_by"], row["fence"]) == ("held", held.holder, None)
            assert row["remaining"] == pytest.approx(self.beats[held.beat].expires - self.now, abs=150)
            assert self.everything() == before
        elif self.needs(request) and not self.breathes(request["beat"]):
            assert (row["status"], row["fence"]) == ("beat_lost", None)
            assert self.everything() == before
        else:
            self.granted(request, row, beats)

    def needs(self, request: Row) -> bool:
        """Whether it has to live on a beat that is there already."""
        return request["beat"] is not None and (request["process"] is None or request["beat"] in self.beats)

    def reenters(self, held: Held, request: Row) -> bool:
        return request["reenter"] is not None and (held.holder, held.secret) == (request["holder"], request["reenter"])

    def granted(self, request: Row, row: Row, stored: dict[str, Any]) -> None:
        """``stored``: the ids of the beats in the database, by lease, before the request."""
        beat = request["beat"] or f"drawn by the database, for {row['fence']}"
        name, held = request["name"], self.leases.get(request["name"])
        expected = "acquired" if held is None else "reentered" if self.live(name) else "taken_over"
        assert row["status"] == expected
        assert row["fence"] > max(self.fences, default=0), "a fence went back, or came twice"
        self.fences.append(row["fence"])
        if held is not None:
            self.tell(name, "reentered" if expected == "reentered" else "expired")
            if self.beats.get(held.beat):
                self.beats[held.beat].dead |= expected == "taken_over"
                if self.beats[held.beat].solo and held.beat != beat:
                    del self.beats[held.beat]
                    assert stored[name] not in {each[0] for each in self.raw.rows("beat")}, "it is of no use"
        if beat not in self.beats:
            self.beats[beat] = Beat(request["ttl"], self.now + request["ttl"], request["solo"])
        assert row["remaining"] == pytest.approx(self.beats[beat].expires - self.now, abs=150)
        keep = self.now + request["at_least"] if request["at_least"] else 0.0
        self.leases[name] = Held(
            request["holder"], request["token"], beat, row["fence"], keep, secret=request["reenter"]
        )  # fmt: skip

    @rule(pick=picks)
    def renew(self, pick: int) -> None:
        name, token = self.owner_of(pick)
        expected = self.holds(name, token) and self.live(name)
        assert self.raw.renew(name, token) is expected
        if expected:
            beat = self.beats[self.leases[name].beat]
            beat.expires = self.now + beat.ttl

    @rule(pick=picks)
    def beat(self, pick: int) -> None:
        if self.shared:
            beat, ttl = self.shared[-1 - pick % min(len(self.shared), 3)]
            renewed = self.raw.call("beat_renew", beat=beat)
            assert bool(renewed) is self.breathes(beat), "a dead beat came back, or a living one was refused"
            if renewed:
                self.beats[beat].expires = self.now + ttl

    @rule(pick=picks)
    def release(self, pick: int) -> None:
        name, token = self.owner_of(pick)
        expected = self.holds(name, token)
        assert self.raw.release(name, token) is expected
        if expected:
            self.end(name, "released")

    @rule(name=names)
    def force_release(self, name: str) -> None:
        assert self.raw.force(name) is (name in self.leases)
        if name in self.leases:
            self.end(name, "forced")

    @rule(pick=picks)
    def adopt(self, pick: int) -> None:
        name, token = self.owner_of(pick)
        found = self.raw.call("lease_status", name=name, token=token)
        assert bool(found) is (self.holds(name, token) and self.live(name))
        assert all(row["fence"] == self.leases[name].fence for row in found)

    @rule(pick=picks, at=st.sampled_from(["start", "commit"]))
    def protect(self, pick: int, at: str) -> None:
        name, token = self.owner_of(pick)
        with self.transaction() as connection:
            if self.holds(name, token) and self.live(name):
                assert protect(self.raw.database, name, token, connection, at) == self.leases[name].fence
                connection.commit()
            else:
                with pytest.raises(FencedOut):
                    protect(self.raw.database, name, token, connection, at)

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        if self.raw.sqlite:
            with closing(sqlite3.connect(self.raw.database.target, isolation_level=None)) as connection:
                connection.execute("begin immediate")
                yield connection
        else:
            with closing(psycopg.connect(self.raw.url)) as other:
                other.execute("select 1")
                yield other

    @rule(pick=picks)
    def beat_end(self, pick: int) -> None:
        if self.shared:
            beat, _ = self.shared.pop(pick % len(self.shared))
            self.raw.call("beat_end", beat=beat)
            for name in [name for name, held in self.leases.items() if held.beat == beat]:
                self.end(name, "released")
            self.beats.pop(beat, None)

    @rule()
    def purge(self) -> None:
        self.raw.call("purge")
        for name in [name for name in self.leases if not self.live(name)]:
            self.end(name, "expired")
        self.beats = {beat: self.beats[beat] for beat in self.beats if self.breathes(beat)}
        assert len(self.raw.rows("beat")) == len(self.beats), "purge left rows behind, or took living ones"
        assert len(self.raw.rows("lease")) == len(self.leases)

    @rule(steps=st.sampled_from([1, 2, 4, 10]))
    def advance(self, steps: int) -> None:
        self.now += 200 * steps
        self.raw.pass_time(200 * steps)

    @invariant()
    def the_same_leases_live(self) -> None:
        listed = {row["name"]: (row["holder"], row["fence"]) for row in self.raw.call("lease_list", name=None)}
        assert listed == {name: (held.holder, held.fence) for name, held in self.leases.items() if self.live(name)}

    @invariant()
    def every_end_is_told_once(self) -> None:
        found = [(row["name"], row["holder"], row["fence"], row["outcome"]) for row in self.raw.history()]
        assert sorted(found) == sorted(self.told)
        for forced in (False, True):  # what was released, and kept after that, may still be taken away
            fences = [fence for _, _, fence, outcome in found if (outcome == "forced") is forced]
            assert len(set(fences)) == len(fences)

    def everything(self) -> list[list[tuple[Any, ...]]]:
        return [self.raw.rows(table) for table in ("lease", "beat", "history")]


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
def test_lease_and_model_agree_on_every_answer(engine: str, sqlite_url: str) -> None:
    raw = Raw(migrated(sqlite_url if engine == "sqlite" else server().database()))
    bounded = settings(
        max_examples=trials(20),
        stateful_step_count=40,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    machine: Any = lambda: LeaseMachine(raw)  # noqa: E731
    try:
        run_state_machine_as_test(machine, settings=bounded)
    finally:
        raw.close()
