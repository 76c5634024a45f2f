"""Objects compared with a model, and their histories with a register."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import holdfast
from holdfast import MatchVersion, MustCreate, Unconditional
from holdfast.testing import Proxy, Recorder
from holdfast.testing.checker import linear
from holdfast.testing.checker.models import RegisterModel
from holdfast.testing.history import operations, read
from holdfast.testing.object_contract import drain
from tests.conftest import migrated, server
from tests.pairs import ONE_FLAVOUR
from tests.raw_session import trials

ids = st.sampled_from(["a", "b", "c"])
names = st.sampled_from([None, "x", "y"])
payloads = st.one_of(st.integers(), st.binary(max_size=4), st.lists(st.text(max_size=2), max_size=2), st.none())
labels = st.dictionaries(st.sampled_from(["k", "l"]), st.sampled_from(["1", "2"]), max_size=2)
picks = st.integers(0, 8)


class ObjectMachine(RuleBasedStateMachine):
    """Three objects of one type, two names between them."""

    def __init__(self, client: holdfast.Client) -> None:
        super().__init__()
        self.objects = client.objects
        self.there: dict[str, Any] = {}
        self.versions: list[int] = [1]
        self.done: list[tuple[str, str, int | None]] = []

    @initialize()
    def begin(self) -> None:
        for record in self.objects.list("box"):
            self.objects.delete_if("box", record.id, record.version)
        self.cursor = self.objects.cursor()

    def version(self, id: str, pick: int) -> int:
        """The right one, or in one of three cases one of the last three of any object."""
        if pick % 3 and id in self.there:
            return int(self.there[id].version)
        return self.versions[-1 - pick // 3 % len(self.versions)]

    def owner(self, id: str, name: str | None) -> str | None:
        return next((each for each, has in self.there.items() if name and has.name == name and each != id), None)

    @rule(
        id=ids, payload=payloads, how=st.sampled_from("cma"), pick=picks, name=names, named=st.booleans(), tags=labels
    )
    def put(self, id: str, payload: Any, how: str, pick: int, name: str | None, named: bool, tags: Any) -> None:
        version, before = self.version(id, pick), self.there.get(id)
        condition: Any = {"c": MustCreate(), "m": MatchVersion(version), "a": Unconditional()}[how]
        more: dict[str, Any] = {"name": name, "labels": tags} if named else {}
        current = before.version if before else None
        record = outcome(lambda: self.objects.put_if("box", id, payload, condition, **more))
        if isinstance(record, holdfast.Conflict):
            assert (how, record.current) == ("m", current)
            assert current != version
            return
        if isinstance(record, holdfast.AlreadyExists):
            if how == "c" and before:
                assert (record.owner, record.current) == (id, current)
            else:
                assert record.owner == self.owner(id, name)
                assert named
            return
        assert not (how == "c" and before)
        assert how != "m" or current == version
        assert not (named and self.owner(id, name))
        assert record.version > max(self.versions)
        assert record.name == (name if named else before.name if before else None)
        assert record.labels == (tags if named else before.labels if before else {})
        assert record.payload == payload
        self.versions.append(record.version)
        self.there[id] = record
        self.done.append((id, "updated" if before else "created", record.version))

    @rule(id=ids, pick=picks)
    def delete(self, id: str, pick: int) -> None:
        version, current = self.version(id, pick), self.there[id].version if id in self.there else None
        refused = outcome(lambda: self.objects.delete_if("box", id, version))
        if refused is not None:
            assert refused.current == current != version
        else:
            assert current == version
            del self.there[id]
            self.done.append((id, "deleted", None))

    @rule(tags=labels)
    def with_labels(self, tags: Any) -> None:
        self.pages(tags, None, 3)

    @rule(tags=labels, after=st.one_of(st.none(), ids), limit=st.integers(1, 3))
    def pages(self, tags: Any, after: str | None, limit: int) -> None:
        wanted = [self.there[id] for id in sorted(self.there) if id > (after or "")]
        wanted = [each for each in wanted if tags.items() <= each.labels.items()]
        assert self.objects.list("box", labels=tags, after=after, limit=limit) == wanted[:limit]

    @rule(name=st.sampled_from(["x", "y"]))
    def by_name(self, name: str) -> None:
        record = self.objects.get_by_name("box", name)
        assert record == next((each for each in self.there.values() if each.name == name), None)

    @rule()
    def watched(self) -> None:
        changes = [(each.id, each.kind, each.version) for each in drain(self.objects.watch("box", since=self.cursor))]
        assert [(id, kind) for id, kind, _ in changes] == [(id, kind) for id, kind, _ in self.done]
        assert all(version in (None, change[2]) for change, (_, _, version) in zip(changes, self.done, strict=True))

    @invariant()
    def the_same_objects_are_there(self) -> None:
        assert {id: self.objects.get("box", id) for id in "abc"} == {id: self.there.get(id) for id in "abc"}


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (holdfast.Conflict, holdfast.AlreadyExists) as error:
        return error


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
def test_objects_and_model_agree_on_every_answer(engine: str, sqlite_url: str) -> None:
    bounded = settings(
        max_examples=trials(20),
        stateful_step_count=30,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    with holdfast.Client(migrated(sqlite_url if engine == "sqlite" else server().database())) as client:
        machine: Any = lambda: ObjectMachine(client)  # noqa: E731
        run_state_machine_as_test(machine, settings=bounded)


def test_histories_of_an_object_are_those_of_a_register(either: str, tmp_path: Path) -> None:
    """Reads, writes and compare-and-swaps of several clients on one object, through connections that are cut."""
    history, turns = tmp_path / "history", trials(40)
    proxy = None if either.startswith("sqlite") else Proxy(either)
    try:
        with holdfast.Client(either) as client:
            begin = client.objects.put_if("box", "b-1", "begin", MustCreate()).version
        with ThreadPoolExecutor(4) as pool:
            url = proxy.url if proxy else either
            work = [pool.submit(use, url, history, number, turns, begin) for number in range(4)]
            for _ in range(4 if proxy else 0):  # each leaves some in doubt, and doubts multiply
                threading.Event().wait(0.08)
                proxy.cut()  # type: ignore[union-attr]
            assert sum(each.result() for each in work) > turns, "most of it was answered"
    finally:
        if proxy:
            proxy.close()
    done = operations(read(history))
    assert {each.op for each in done if each.outcome == "ok"} == {"read", "write", "cas"}
    assert any(each.op == "cas" and each.outcome == "fail" for each in done)
    assert linear.check(done, RegisterModel("begin")) == []


def use(url: str, history: Path, number: int, turns: int, begin: int) -> int:
    """How many were answered."""
    answered, last_read = 0, ("begin", begin)
    with Recorder(history, f"worker-{number}") as record, holdfast.Client(url) as client:
        for turn in range(turns):
            value, kind = f"{number}-{turn}", ("read", "cas", "cas", "write")[(turn + number) % 4]
            with suppress(holdfast.EngineError):
                if kind == "read":
                    last_read = look(client, record)
                elif kind == "write":
                    last_read = write(client, record, value)
                else:
                    last_read = swap(client, record, last_read, value) or last_read
                answered += 1
    return answered


def look(client: holdfast.Client, record: Recorder) -> tuple[str, int]:
    with record.invoke("read", "b-1") as call:
        current = client.objects.get("box", "b-1")
        assert current is not None
        call.ok(value=current.payload)
        return current.payload, current.version


def write(client: holdfast.Client, record: Recorder, value: str) -> tuple[str, int]:
    with record.invoke("write", "b-1", value=value) as call:
        version = client.objects.put_if("box", "b-1", value, Unconditional()).version
        call.ok()
        return value, version


def swap(client: holdfast.Client, record: Recorder, expected: tuple[str, int], value: str) -> tuple[str, int] | None:
    with record.invoke("cas", "b-1", old=expected[0], value=value) as call:
        try:
            version = client.objects.put_if("box", "b-1", value, MatchVersion(expected[1])).version
        except holdfast.Conflict:
            call.fail()
            return None
        call.ok()
        return value, version


ITSELF: list[Any] = []
ITSELF.append(ITSELF)
BAD: list[tuple[str, Callable[[Any], Any], str]] = [
    ("payload over the limit", lambda o: o.put_if("t", "i", "x" * (1 << 20), MustCreate()), "at most 1048576 bytes"),
    ("bytes over the limit", lambda o: o.put_if("t", "i", bytes((1 << 20) + 1), MustCreate()), "not 1048577"),
    ("not a number", lambda o: o.put_if("t", "i", float("nan"), MustCreate()), "payload must be"),
    ("a tuple", lambda o: o.put_if("t", "i", {"a": (1,)}, MustCreate()), "payload would be read back changed"),
    ("a key that is no str", lambda o: o.put_if("t", "i", {1: 1}, MustCreate()), "payload would be read back changed"),
    ("what JSON has not", lambda o: o.put_if("t", "i", {1, 2}, MustCreate()), "payload must be"),
    ("what contains itself", lambda o: o.put_if("t", "i", ITSELF, MustCreate()), "contains itself"),
    ("version 0", lambda o: o.put_if("t", "i", 1, MatchVersion(0)), "version must be the version of a record.*not 0"),
    ("a negative version", lambda o: o.put_if("t", "i", 1, MatchVersion(-5)), "version must be.*not -5"),
    ("deleting version 0", lambda o: o.delete_if("t", "i", 0), "version must be"),
    ("a version that is a bool", lambda o: o.delete_if("t", "i", True), "version must be an int"),
    ("no condition", lambda o: o.put_if("t", "i", 1, None), "condition must be MustCreate"),
    ("the class itself", lambda o: o.put_if("t", "i", 1, MustCreate), "condition must be"),
    ("an empty type", lambda o: o.get("", "i"), "type must have"),
    ("a long id", lambda o: o.get("t", "i" * 201), "id must have 1 to 200"),
    ("a control character", lambda o: o.put_if("t", "i\n", 1, MustCreate()), "id must not contain control"),
    ("a bad name", lambda o: o.put_if("t", "i", 1, MustCreate(), name=""), "name must have"),
    ("labels that are none", lambda o: o.put_if("t", "i", 1, MustCreate(), labels=["a"]), "labels must be a dict"),
    ("a value that is no str", lambda o: o.put_if("t", "i", 1, MustCreate(), labels={"a": 1}), "labels must be a dict"),
    ("an empty key", lambda o: o.put_if("t", "i", 1, MustCreate(), labels={"": "a"}), "the key of a label must"),
    ("a bad key", lambda o: o.list("t", labels={"a b": "c"}), "the key of a label must.*'a b'"),
    ("a long value", lambda o: o.list("t", labels={"a": "c" * 201}), "label 'a' must have"),
    ("too many", lambda o: o.list("t", labels={f"k{n}": "" for n in range(65)}), "at most 64 labels, not 65"),
    ("a selector that is none", lambda o: o.list("t", labels=""), "labels must be a dict"),
    ("a page of none", lambda o: o.list("t", limit=0), "limit must be a whole number from 1"),
    ("half a page", lambda o: o.list("t", limit=1.5), "limit must be an int"),
    ("after nothing", lambda o: o.list("t", after=""), "after must have"),
]


@ONE_FLAVOUR
@pytest.mark.parametrize(
    ("call", "message"), [(call, message) for _, call, message in BAD], ids=[what for what, _, _ in BAD]
)
def test_bad_input_is_refused_before_anything_is_written(connect: Any, tmp_path: Path, call: Any, message: str) -> None:
    client = connect(f"sqlite:///{tmp_path / 'app.db'}")
    with pytest.raises((ValueError, TypeError), match=message):
        call(client.objects)
    assert list(tmp_path.iterdir()) == []
