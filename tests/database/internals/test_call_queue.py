"""Which calls travel together, checked against a model of a database that rolls back a batch with its refused call."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.database import call_queue
from holdfast.database.call_dispatcher import abandoned_rows
from holdfast.database.call_queue import (
    MAX_CALLS,
    MAX_ROLLBACKS,
    READS,
    Again,
    Answer,
    CallQueue,
    QueuedCall,
    row_of,
    written_row,
)
from holdfast.database.statements import statements
from holdfast.errors import Refused, Unanswered

STATEMENTS = ["lease_acquire", "lease_release", "lease_renew", "object_swap", "object_get", "operation_write"]


def call(statement: str, name: str = "a") -> QueuedCall:
    return QueuedCall(statement, {"name": name, "id": name, "key": name}, 0.0)


def added(queue: CallQueue, *calls: QueuedCall) -> list[QueuedCall]:
    for each in calls:
        queue.add(each)
    return list(calls)


def taken(queue: CallQueue) -> list[QueuedCall]:
    batch: list[QueuedCall] = []
    queue.take(batch)
    return batch


def test_what_may_share_a_transaction_is_a_statement_with_the_parameter_that_sorts_it() -> None:
    known = statements("postgres")
    for name, (_, *parameters) in call_queue._WRITES.items():
        assert set(parameters) <= set(known[name].parameters), name
    for name, row in call_queue._READS.items():
        assert set(row[1:]) <= set(known[name].parameters), name
        assert known[name].reads_only, name


def test_whatever_only_reads_holds_nothing_up() -> None:
    """SQLite says of each statement whether it writes; those with a dot are parts of others."""
    known = statements("sqlite")
    reads = {name for name in statements("postgres") if name in known and known[name].reads_only}
    ours = {name for name in reads if not name.startswith(("examine_", "beat_", "schema_", "hello", "session_"))}
    assert "lease_history" in ours
    assert {name for name in ours if written_row(call(name))} == set()


def test_calls_of_a_gate_or_an_operation_wait_for_its_abandoned_write() -> None:
    gate = {"name": "import"}
    opening, claim = QueuedCall("gate_open", gate, 0.0), QueuedCall("operation_claim", {"name": "l", "key": "k"}, 0.0)
    for abandoned, name, parameters, waits in (
        (opening, "gate_close", gate, True), (opening, "lease_list", {"name": "@gate:import"}, True),
        (opening, "object_get", {"type": "t", "id": "import"}, False),
        (claim, "operation_claim", claim.parameters, True),
        (claim, "operation_get", {"key": "k"}, True), (claim, "operation_get", {"key": "l"}, False),
    ):  # fmt: skip
        queue = CallQueue()
        queue.abandoned = [row for row in (written_row(abandoned),) if row is not None]
        added(queue, QueuedCall(name, parameters, 0.0))
        assert (queue.oldest() is None) is waits, (abandoned, name)


def test_what_waits_is_sent_as_one_in_the_order_of_what_it_writes() -> None:
    queue = CallQueue()
    added(queue, *(call("lease_acquire", name) for name in "cab"), call("operation_write"), call("lease_release", "b"))
    assert [(each.name, each.parameters["name"]) for each in taken(queue)] == [
        ("lease_acquire", "a"),
        ("lease_acquire", "b"),
        ("lease_release", "b"),
        ("lease_acquire", "c"),
        ("operation_write", "a"),
    ]
    assert taken(queue) == []


def test_leases_slots_gates_and_operations_share_a_batch_and_objects_another() -> None:
    queue = CallQueue()
    calls = added(queue, *map(call, call_queue._WRITES))
    objects = [each for each in calls if each.name.startswith("object_")]
    assert {each.name for each in taken(queue)} == set(call_queue._WRITES) - {each.name for each in objects}
    assert taken(queue) == objects


def test_what_may_wait_for_a_row_is_sent_alone_in_its_turn() -> None:
    queue = CallQueue()
    first, renew, last = added(queue, call("lease_acquire"), call("lease_renew"), call("lease_release", "b"))
    assert taken(queue) == [first, last]
    added(queue, call("lease_acquire", "c"))
    assert taken(queue) == [renew], "calls that came later have not kept it waiting"


def test_reads_wait_for_no_commit() -> None:
    queue = CallQueue()
    write, read, other = added(queue, call("object_swap"), call("object_get"), call("operation_get"))
    batch: list[QueuedCall] = []
    queue.take(batch, reads=True)
    assert batch == [read, other]
    added(queue, read)
    assert taken(queue) == [write]
    assert taken(queue) == [read]


def test_no_lease_is_held_up_while_its_batch_waits_for_an_object() -> None:
    """A user's transaction may have locked the object, and another process needs the row of the lease's beat."""
    queue = CallQueue()
    put, acquire, delete = added(queue, call("object_put"), call("slot_claim"), call("object_delete"))
    assert taken(queue) == [put, delete]
    assert taken(queue) == [acquire]


def test_a_batch_has_an_end() -> None:
    queue = CallQueue()
    calls = added(queue, *(call("lease_acquire", f"{number:04}") for number in range(MAX_CALLS + 1)))
    assert taken(queue) == calls[:-1]
    assert taken(queue) == calls[-1:]


def test_a_refusal_among_others_is_not_believed_and_the_others_keep_their_places() -> None:
    queue = CallQueue()
    calls = added(queue, call("lease_acquire", "b"), call("lease_acquire", "a"), call("lease_acquire", "c"))
    batch = taken(queue)
    added(queue, call("lease_acquire", "0"))
    assert queue.settle(batch, [Again.ALONE, Again.TOGETHER, Again.TOGETHER]) == []
    assert queue.waiting[:3] == calls
    assert [each.parameters["name"] for each in taken(queue)] == ["0", "b", "c"]
    alone = taken(queue)
    assert alone == [calls[1]]
    refusal = Refused("no")
    assert queue.settle(alone, [refusal]) == alone
    assert calls[1].answer is refusal


def test_what_was_rolled_back_twice_because_of_others_is_sent_alone() -> None:
    queue = CallQueue()
    [victim] = added(queue, call("lease_acquire", "victim"))
    for _ in range(MAX_ROLLBACKS):
        added(queue, call("lease_acquire", "bad"))
        batch = taken(queue)
        assert victim in batch
        queue.settle(batch, [Again.TOGETHER if each is victim else Refused("no") for each in batch])
    added(queue, call("lease_acquire", "other"))
    assert taken(queue) == [victim]


def test_a_call_whose_caller_has_left_is_not_sent_again() -> None:
    queue = CallQueue()
    gone, stays = added(queue, call("lease_acquire", "a"), call("lease_acquire", "b"))
    batch = taken(queue)
    assert queue.leave(gone) is False, "it is being sent: what becomes of it is not known"
    queue.settle(batch, [Again.TOGETHER, Again.TOGETHER])
    assert taken(queue) == [stays]
    [late] = added(queue, call("lease_acquire", "c"))
    assert queue.leave(late) is True
    assert taken(queue) == []


def test_a_call_of_the_row_of_an_abandoned_write_waits_for_it() -> None:
    queue = CallQueue()
    [left] = added(queue, call("lease_acquire", "a"))
    batch = taken(queue)
    assert queue.leave(left) is False
    queue.abandoned = abandoned_rows([batch], [])
    same, any_row = added(queue, call("lease_release", "a"), call("lease_renew", "b"))
    others = added(queue, call("lease_acquire", "b"), call("operation_write", "a"))
    [read, other_read, statement] = added(
        queue, call("lease_list", "a"), call("lease_list", "b"), call("object_changes")
    )
    assert queue.oldest() is others[0]
    assert queue.next_batch(reads=True) == [other_read]
    assert [taken(queue), taken(queue), taken(queue), taken(queue)] == [others, [other_read], [statement], []]
    queue.abandoned = abandoned_rows([], [])
    assert [taken(queue), taken(queue), taken(queue)] == [[same], [any_row], [read]]


def test_a_statement_of_any_row_is_waited_for_by_all_of_its_noun() -> None:
    """But a lost session is ended whatever is under way."""
    queue = CallQueue()
    [left] = added(queue, call("lease_renew", "a"))
    batch = taken(queue)
    queue.leave(left)
    queue.abandoned = abandoned_rows([batch], [])
    added(queue, call("lease_acquire", "b"), call("lease_force_release", "c"))
    put, end = added(queue, call("object_put", "a"), call("session_end"))
    assert [taken(queue), taken(queue), taken(queue)] == [[put], [end], []]
    assert row_of(end) is None


class World(RuleBasedStateMachine):
    """Callers come and leave, batches are answered, refused and lost, two of them at a time."""

    @initialize()
    def begin(self) -> None:
        self.queue = CallQueue()
        self.calls: list[QueuedCall] = []
        self.flying: list[list[QueuedCall]] = []
        self.committed: dict[int, int] = {}

    @rule(statement=st.sampled_from(STATEMENTS), name=st.sampled_from("abc"))
    def add(self, statement: str, name: str) -> None:
        self.calls += added(self.queue, call(statement, name))

    @rule(number=st.integers(min_value=0, max_value=50))
    def leave(self, number: int) -> None:
        unanswered = [each for each in self.calls if each.answer is None and not each.has_left]
        if unanswered:
            leaving = unanswered[number % len(unanswered)]
            assert self.queue.leave(leaving) is not any(leaving in batch for batch in self.flying)

    @rule()
    def send(self) -> None:
        if len(self.flying) == 2 or not self.queue.waiting:
            return
        self.queue.abandoned = abandoned_rows(self.flying, [])
        oldest = self.queue.oldest()
        batch = taken(self.queue)
        if oldest is None:
            assert batch == []
            return
        assert oldest in batch, "the oldest is served first"
        assert not {row_of(each) for each in batch} & set(self.queue.abandoned), "a call has overtaken a write"
        kinds = {each.key and call_queue._kind(each.key) for each in batch}
        assert len(kinds) == 1
        assert len(batch) == 1 or None not in kinds
        assert [each.key for each in batch] == sorted(each.key or READS for each in batch) or len(batch) == 1
        self.flying.append(batch)

    @rule(which=st.integers(0, 1), refused=st.none() | st.integers(0, 9), lost=st.booleans())
    def answer(self, which: int, refused: int | None, lost: bool) -> None:
        if which >= len(self.flying):
            return
        batch = self.flying.pop(which)
        waiting = [each for each in batch if not each.has_left]
        if lost:
            assert self.queue.fail(batch, Unanswered("lost")) == batch
            return
        if refused is None or len(batch) == 1:
            answers: list[Answer] = [[] if refused is None else Refused("no") for _ in batch]
            if refused is None:
                for each in batch:
                    self.committed[each.number] = self.committed.get(each.number, 0) + 1
            assert self.queue.settle(batch, answers) == batch
            return
        bad = refused % len(batch)
        assert self.queue.settle(batch, [Again.ALONE if i == bad else Again.TOGETHER for i in range(len(batch))]) == []
        assert all(each in self.queue.waiting for each in waiting)

    @invariant()
    def each_call_is_in_one_place(self) -> None:
        if not hasattr(self, "queue"):
            return
        for each in self.calls:
            places = self.queue.waiting.count(each) + sum(batch.count(each) for batch in self.flying)
            assert places == (0 if each.answer is not None else 1) or (each.has_left and places <= 1)
        assert [each.number for each in self.queue.waiting] == sorted(each.number for each in self.queue.waiting)

    @invariant()
    def nothing_happens_twice(self) -> None:
        assert all(times == 1 for times in getattr(self, "committed", {}).values())

    def teardown(self) -> None:
        """Without further faults, everything is answered."""
        if not hasattr(self, "queue"):
            return
        for batch in self.flying:
            self.queue.settle(batch, [[] for _ in batch])
        self.queue.abandoned = []
        for _ in range(len(self.calls) + 1):
            batch = taken(self.queue)
            if not batch:
                break
            self.queue.settle(batch, [[] for _ in batch])
        assert all(each.answer is not None or each.has_left for each in self.calls)


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=60, deadline=None)
