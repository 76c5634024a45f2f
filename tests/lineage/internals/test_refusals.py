"""Sinks that fail: a refused event is parked, and a sink that is down is retried."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest

import holdfast
from tests.lineage.recording_sink import RecordingSink, deduplicated
from tests.lineage.sample_operations import FAR, broken, emitting, key
from tests.operations.logs import change


def test_what_a_sink_refuses_is_parked_and_told_again_when_asked(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.lineage.relay_terms.MAX_DELAY", 0.001)
    sink, poison = RecordingSink(), {"b"}

    def refuse(events: Any) -> None:
        if any(each.label in poison and each.type == "COMPLETE" for each in events):
            raise KeyError("no such field")

    sink.before = refuse
    with holdfast.Client(either) as client:
        for name in "abc":
            client.operation(name).run(lambda: 1)
        assert client.relay("r", sink, tries=3).step() == 5
        assert sink.received() == [(n, t) for n in "abc" for t in ("START", "COMPLETE") if (n, t) != ("b", "COMPLETE")]
        [record] = client.relays.list()
        assert (record.parked, record.entries, record.problem) == (1, 0, None)
        [parked] = client.relays.parked("r")
        assert (parked.event.label, parked.tries, parked.problem) == ("b", 3, "KeyError: 'no such field'")
        [finding] = [each for each in client.operations.health().findings if each.check == "lineage"]
        assert (finding.status, "relay 'r' has parked 1 events" in finding.found) == ("warn", True)
        archived = client.operations.archive(FAR, lambda lines: None)
        assert (archived.operations, list(archived.left.values())) == (2, ["its lineage is not published"])
        assert client.relays.retry("r") == 1
        assert client.relay("r", sink, tries=3).step() == 0
        assert [(each.tries, each.again) for each in client.relays.parked("r")] == [(6, False)]
        poison.clear()
        assert client.relays.retry("r", parked.id) == 1
        assert client.relay("r", sink).step() == 1
        assert client.relays.parked("r") == []
        assert sink[-1] == parked.event
        for name in ("d", "e"):
            assert client.operations.archive(FAR, lambda lines: None).operations == 1
            client.operation(name).run(lambda: 1)
            assert client.relay("r", sink).step() == 2
        assert client.operations.archive(FAR, lambda lines: None).operations == 1
        client.operation("later").run(lambda: 1)
        assert client.relay("r", sink).step() == 2, "what is archived leaves no gap that something falls into"


def test_whatever_a_sink_says_can_be_written_down(either: str) -> None:
    """Its message may quote the event, with characters that no database stores."""
    sink, kinds = RecordingSink(), [holdfast.SinkDown, ValueError]

    def refuse(events: Any) -> None:
        if any(each.label == "b" for each in events):
            raise kinds[0]("at \0 and \ud800")

    sink.before = refuse
    with holdfast.Client(either) as client:
        for name in "abc":
            client.operation(name).run(lambda: 1)
        with pytest.raises(holdfast.SinkDown):
            client.relay("r", sink).step()
        assert [each.problem for each in client.relays.list()] == ["SinkDown: at ? and ?"]
        kinds.pop(0)
        assert client.relay("r", sink, tries=1).step() == 4
        assert [each.problem for each in client.relays.parked("r")] == ["ValueError: at ? and ?"] * 2


def test_what_kills_whoever_tells_it_is_tried_no_more_often_and_parked(
    either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each life is a client of its own: it knows of earlier ones only what they saved."""
    monkeypatch.setattr("holdfast.lineage.relay_terms.MAX_DELAY", 0.001)

    class Death(BaseException):
        pass

    sink, deaths, refusals = RecordingSink(), list[int](), list[int]()

    def poison(events: Any) -> None:
        if any(each.label == "b" and each.type == "COMPLETE" for each in events):
            if len(events) == 1 and not refusals:
                refusals.append(1)
                raise KeyError("refused")
            deaths.append(len(events))
            raise Death

    sink.before = poison
    with holdfast.Client(either) as client:
        for name in "abc":
            client.operation(name).run(lambda: 1)

    def live() -> None:
        with holdfast.Client(either) as client, suppress(Death):
            client.relay("r", sink, tries=3).step()

    while "c" not in {each.label for each in sink}:
        live()
        assert len(deaths) <= 3, "in a batch, and twice by itself, where it was refused once"
    assert deaths == [6, 1, 1]
    assert [label for label, type in sink.received() if type == "START"] == ["a", "b", "c"], (
        "what it had published is saved"
    )
    with holdfast.Client(either) as client:
        [parked] = client.relays.parked("r")
        assert (parked.event.label, parked.event.type, parked.tries) == ("b", "COMPLETE", 3)
        assert parked.problem == "it was sent 3 times, and each time the relay died before the sink answered"
        assert client.relays.retry("r") == 1
        for _ in range(3):
            live()
        live()
        assert [(each.tries, each.again) for each in client.relays.parked("r")] == [(6, False)]
        assert deaths == [6, 1, 1, 1, 1, 1]
        sink.before = lambda events: None
        client.relays.retry("r")
        assert client.relay("r", sink).step() == 1
        assert client.relays.verify([json.dumps(each.as_dict()) for each in deduplicated(sink)]).problems == ()


def test_what_cannot_be_read_in_the_log_is_parked_and_stops_nobody_else(either: str) -> None:
    sink = RecordingSink()
    with holdfast.Client(either) as client:
        for name in "abc":
            client.operation(key(name)).run(lambda: 1)
        for text, subject in (("nonsense", "a"), ("[[1,2,3]]", "b")):
            change(either, f"update {{wal}} set entries = '{text}' where idem_key = '{key(subject).digest}'")
        assert client.relay("r", sink).step() == 2
        assert sink.received() == [(key("c").label, "START"), (key("c").label, "COMPLETE")]
        parked = client.relays.parked("r")
        assert {(each.event.type, each.event.dataset) for each in parked} == {("UNREADABLE", "a"), ("UNREADABLE", "b")}
        assert all("not a list of entries" in each.problem for each in parked)
        assert client.relays.retry("r") == len(parked)
        assert client.relay("r", sink).step() == 0
        assert [each.again for each in client.relays.parked("r")] == [False] * len(parked), (
            "there is no event to publish"
        )
        verification = client.relays.verify([json.dumps(each.as_dict()) for each in sink])
        assert {(each.what, each.operation) for each in verification.problems} == {
            ("tampered", key("a").digest), ("tampered", key("b").digest)
        }  # fmt: skip


def test_a_sink_that_is_down_delays_and_parks_nothing(either: str) -> None:
    sink, error = RecordingSink(), Exception()

    def down(events: Any) -> None:
        raise error

    sink.before = down
    with holdfast.Client(either) as client:
        for name in "abcdef":
            client.operation(name).run(lambda: 1)
        for error in (holdfast.SinkDown("x"), ConnectionRefusedError("x"), TimeoutError("x")):
            for _ in range(3):
                with pytest.raises(holdfast.SinkDown, match=type(error).__name__):
                    client.relay("r", sink).step()
            [record] = client.relays.list()
            assert (record.parked, record.told, record.entries) == (0, 0, 12)
            assert (record.problem, record.since is not None) == (f"{type(error).__name__}: x", True)
        sink.before = lambda events: None
        assert client.relay("r", sink).step() == 12
        assert [(each.problem, each.since, each.entries) for each in client.relays.list()] == [(None, None, 0)]


def test_a_sink_that_fails_in_the_middle_of_many_is_given_fewer(either: str) -> None:
    sink, limit = RecordingSink(), 4

    def down(events: Any) -> None:
        if len(events) > limit:
            raise TimeoutError("too many")

    sink.before = down
    with holdfast.Client(either) as client:
        for number in range(8):
            client.operation(str(number)).run(lambda: 1)
        relay = client.relay("r", sink, batch=16)
        for _ in range(2):
            with pytest.raises(holdfast.SinkDown):
                relay.step()
        with pytest.raises(holdfast.SinkDown):
            relay.step()  # it took four, and then was given eight
        assert len(sink) == 4
        limit = 100
        assert relay.step() == 12
        assert deduplicated(sink) == sink


def test_what_is_too_much_to_be_read_in_time_is_read_in_parts(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with holdfast.Client(sqlite_url) as client:
        for number in range(9):
            client.operation(f"{number}").run(int)
        call, asked, sink = client._engine.call, list[int](), RecordingSink()

        def slow(name: str, parameters: Any, **more: Any) -> Any:
            if name == "relay_read":
                asked.append(parameters["limit"])
                if parameters["limit"] > 3:
                    raise holdfast.EngineError("no answer in time")
            return call(name, parameters, **more)

        monkeypatch.setattr(client._engine, "call", slow)
        relay = client.relay("r", sink, batch=10)
        while len(sink) < 18:
            with suppress(holdfast.EngineError):
                relay.step()
            assert len(asked) < 50, "it goes on"
        assert asked[:3] == [10, 5, 2]
        assert deduplicated(sink) == sink


def test_a_sink_that_refuses_everything_is_taken_for_down(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.lineage.relay_terms.MAX_DELAY", 0.001)
    sink = RecordingSink()
    sink.before = lambda events: broken()
    with holdfast.Client(either) as client:
        for name in "abcdef":
            client.operation(name).run(lambda: 1)
        relay = client.relay("r", sink)
        for _ in range(2):
            with pytest.raises(holdfast.SinkDown, match=r"refused . events in a row: ValueError: broken"):
                relay.step()
        assert [each.parked for each in client.relays.list()] == [3]
        sink.before = lambda events: None
        client.relays.retry("r")
        assert relay.step() == 12
        assert len(deduplicated(sink)) == 12


def test_a_relay_that_starts_among_many_that_are_refused_goes_on(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows from the relay before it an event that the sink takes."""
    monkeypatch.setattr("holdfast.lineage.relay_terms.MAX_DELAY", 0.001)
    sink, topics, errors = RecordingSink(), [f"topic-{number}" for number in range(9)], list[Exception]()

    def refuse(events: Any) -> None:
        if any(each.topic for each in events):
            raise errors[-1]

    sink.before = refuse
    with holdfast.Client(either) as client:
        client.operation("a").run(emitting(*topics))
        client.operation("b").run(int)
        errors.append(holdfast.SinkDown("away"))
        with pytest.raises(holdfast.SinkDown):
            client.relay("r", sink, batch=1).step()
        assert sink.received() == [("a", "START")]
        errors.append(ValueError("broken"))
        assert client.relay("r", sink, tries=2).step() >= 3
        assert [each.event.topic for each in client.relays.parked("r")] == topics
        assert [(each.label, each.type) for each in deduplicated(sink)] == [
            (label, type) for label in "ab" for type in ("START", "COMPLETE")
        ]


def test_however_many_in_a_row_are_refused_of_a_sink_that_takes_others_the_rest_goes_on(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first pass, and when all of them are retried in vain."""
    monkeypatch.setattr("holdfast.lineage.relay_terms.MAX_DELAY", 0.001)
    sink, topics = RecordingSink(), [f"topic-{number}" for number in range(9)]
    sink.before = lambda events: broken() if any(each.topic for each in events) else None
    with holdfast.Client(sqlite_url) as client:
        relay = client.relay("r", sink, tries=2)
        client.operation("a").run(emitting(*topics))
        client.operation("b").run(int)
        for expected in ("b", "c"):
            relay.step()
            assert (sink[-1].label, sink[-1].type) == (expected, "COMPLETE")
            assert [each.event.topic for each in client.relays.parked("r")] == topics
            assert client.relays.retry("r") == 9
            relay = client.relay("r", sink, tries=2)
            client.operation("c").run(int)
        assert {each.id for each in sink} == {each.id for each in client.relays.events() if each.topic is None}
        sink.before = lambda events: None
        assert relay.step() == 9
        assert [each.topic for each in sink[-9:]] == topics, "in the order in which they were parked"
        assert client.relays.parked("r") == []
