"""Linearizability: is there an order of the operations, one after the other, that explains every answer?

The search walks along the history (Wing and Gong, with Lowe's just-in-time linearization) and keeps every configuration
that explains the answers so far: the state, and which of the operations under way have already taken effect. An
operation takes effect no earlier than some answer requires it. Three things keep the configurations few:

- Equal configurations are kept once (Lowe's memo). Where no operation is under way, a configuration is only a state.
- An operation that no other answer can depend on takes effect at once where it changes nothing: nothing is gained by
  letting it take effect later.
- Operations of unknown outcome stay under way for ever. Equivalent ones are counted, not distinguished; of two
  configurations that differ only in these counts, the one that has used fewer is kept.

This module knows nothing about leases; a `Model` says what is possible.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from holdfast.testing.history import RecordedOperation

S = TypeVar("S", bound=Hashable)
MAX_CONFIGURATIONS = 20_000

Done = frozenset[int]
"""Operations under way that have taken effect, as indexes."""
Used = tuple[int, ...]
"""How many unknown operations of each kind have taken effect."""


class Model(Protocol[S]):
    """How an object behaves when operations come one after the other."""

    def initial(self) -> S: ...

    def step(self, state: S, operation: RecordedOperation) -> Iterable[S]:
        """The states that the object may have after `operation`; none if its answer is impossible in this state."""
        ...

    def is_needed(self, operation: RecordedOperation) -> bool:
        """Whether the effect of this operation may be needed to explain the answer to another one.

        That of a read or a refusal is not. That of a write is, even if it writes the value that is there, because it
        may have taken effect later.
        """
        ...

    def kind_of(self, operation: RecordedOperation) -> Hashable | None:
        """A kind for an operation of unknown outcome, equal for equal effects. None if it has no effect."""
        ...


class Unexplained(NamedTuple):
    """The first answer that no order explains."""

    name: str
    operation: RecordedOperation
    states: list[str]
    """The states that were possible just before."""
    under_way: list[RecordedOperation]
    """The other operations under way, which may have taken effect before."""
    gave_up: bool = False

    def __str__(self) -> str:
        if self.gave_up:
            return f"{self.name!r}: too many operations overlap to decide about {self.operation}"
        meanwhile = "; meanwhile: " + ", ".join(map(str, self.under_way)) if self.under_way else ""
        return f"{self.operation} cannot be explained: it was {' or '.join(self.states)}{meanwhile}"


def check(operations: Iterable[RecordedOperation], model: Model[S]) -> list[Unexplained]:
    """For each name the first answer that no order explains. Empty if the history is linearizable."""
    parts: dict[str, list[RecordedOperation]] = defaultdict(list)
    for operation in operations:
        parts[operation.name].append(operation)
    results = (_Search(model, name, part).run() for name, part in sorted(parts.items()))
    return [result for result in results if result is not None]


class _TooMany(Exception):
    pass


class _Search(Generic[S]):
    """The search for one name.

    A configuration is a state and the set of known operations under way that have taken effect. For each one the search
    keeps how many unknown operations of each kind were needed to reach it.
    """

    def __init__(self, model: Model[S], name: str, part: Sequence[RecordedOperation]) -> None:
        self._model, self._name, self._part = model, name, part
        self._pending: dict[int, RecordedOperation] = {}
        """Operations under way whose outcome is known."""
        self._unknown: list[RecordedOperation] = []
        """One operation of each kind with an unknown outcome, in the order of ``Used``."""
        self._kinds: dict[Hashable, int] = {}
        self._available: list[int] = []
        self._configurations: dict[tuple[S, Done], list[Used]] = {(model.initial(), frozenset()): [()]}

    def run(self) -> Unexplained | None:
        for number, completes in self._moments():
            operation = self._part[number]
            if not completes:
                self._begin(number, operation)
                continue
            before = self._configurations
            try:
                self._configurations = self._end(number)
            except _TooMany:
                return self._unexplained(operation, before, gave_up=True)
            if not self._configurations:
                return self._unexplained(operation, before)
            del self._pending[number]
        return None

    def _moments(self) -> Iterator[tuple[int, bool]]:
        """Invokes and completions in time order. At the same time invokes come first: that allows more orders."""
        moments = []
        for number, operation in enumerate(self._part):
            moments.append((operation.invoked, False, number))
            if operation.outcome != "unknown":
                moments.append((operation.completed, True, number))
        for _, completes, number in sorted(moments):
            yield number, completes

    def _begin(self, number: int, operation: RecordedOperation) -> None:
        if operation.outcome == "unknown":
            self._begin_unknown(operation)
            return
        self._pending[number] = operation
        absorbed: dict[tuple[S, Done], list[Used]] = {}
        for (state, done), used in self._configurations.items():
            key = (state, done | {number}) if self._changes_nothing(state, operation) else (state, done)
            absorbed[key] = used
        self._configurations = absorbed

    def _begin_unknown(self, operation: RecordedOperation) -> None:
        kind = self._model.kind_of(operation)
        if kind is None:
            return
        if kind not in self._kinds:
            self._kinds[kind] = len(self._unknown)
            self._unknown.append(operation)
            self._available.append(0)
            self._configurations = {
                key: [(*counts, 0) for counts in used] for key, used in self._configurations.items()
            }
        self._available[self._kinds[kind]] += 1

    def _changes_nothing(self, state: S, operation: RecordedOperation) -> bool:
        return not self._model.is_needed(operation) and list(self._model.step(state, operation)) == [state]

    def _end(self, number: int) -> dict[tuple[S, Done], list[Used]]:
        """The configurations in which this operation has taken effect. Its number is removed from ``done``: it is not
        under way any more. ``late``: those in which it has not yet taken effect, and has to now."""
        ended: dict[tuple[S, Done], list[Used]] = {}
        late: list[tuple[S, Done, Used]] = []
        for (state, done), used in self._configurations.items():
            for counts in used:
                if number in done:
                    _add(ended, (state, done - {number}), counts)
                else:
                    late.append((state, done, counts))
        for state, done, counts in self._reached(late, number):
            _add(ended, (state, done - {number}), counts)
        return ended

    def _reached(self, late: list[tuple[S, Done, Used]], number: int) -> Iterator[tuple[S, Done, Used]]:
        """All configurations reached from `late` by operations that take effect, the last of them this one."""
        seen = set(late)
        while late:
            if len(seen) > MAX_CONFIGURATIONS:
                raise _TooMany
            for after in self._successors(*late.pop()):
                if number in after[1]:
                    yield after
                elif after not in seen:
                    seen.add(after)
                    late.append(after)

    def _successors(self, state: S, done: Done, used: Used) -> Iterator[tuple[S, Done, Used]]:
        for number, operation in self._pending.items():
            if number not in done:
                for after in self._model.step(state, operation):
                    yield after, self._absorb(after, done | {number}), used
        for kind, operation in enumerate(self._unknown):
            if used[kind] < self._available[kind]:
                for after in self._model.step(state, operation):
                    if after != state:
                        more = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                        yield after, self._absorb(after, done), more

    def _absorb(self, state: S, done: Done) -> Done:
        return done.union(
            number
            for number, operation in self._pending.items()
            if number not in done and self._changes_nothing(state, operation)
        )

    def _unexplained(
        self, operation: RecordedOperation, before: dict[tuple[S, Done], list[Used]], gave_up: bool = False
    ) -> Unexplained:
        states = sorted({str(state) for state, _ in before})
        others = [other for other in self._pending.values() if other is not operation]
        return Unexplained(self._name, operation, states, [*others, *self._unknown], gave_up)


def _add(configurations: dict[tuple[S, Done], list[Used]], key: tuple[S, Done], used: Used) -> None:
    """Add a configuration, unless an equal one has used no more of any kind; drop equal ones that have used more."""
    alternatives = configurations.setdefault(key, [])
    if any(_is_within(other, used) for other in alternatives):
        return
    alternatives[:] = [other for other in alternatives if not _is_within(used, other)]
    alternatives.append(used)


def _is_within(less: Used, more: Used) -> bool:
    return all(one <= other for one, other in zip(less, more, strict=True))
