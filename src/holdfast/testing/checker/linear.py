"""Is there an order in which the operations could have happened one by one? The question of linearizability.

The search walks along the history (Wing and Gong, with Lowe's just-in-time linearization) and keeps every configuration
that explains what it has seen: the state, and which of the operations under way have already taken effect. An operation
is put in order no earlier than some answer demands it. Three things keep the configurations few:

- equal ones are one (Lowe's memo), and where nothing is under way all collapse into their states, so that the history
  is cut there by itself;
- an operation that no answer depends on takes effect at once where it changes nothing: waiting could only do harm;
- operations of unknown outcome stay under way for ever. Those that are alike are counted, not told apart, and of two
  configurations that differ only in this the one that has used fewer is kept.

It knows nothing about leases; a `Model` says what is possible.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from holdfast.testing.history import Operation

S = TypeVar("S", bound=Hashable)
MOST_CONFIGURATIONS = 20_000

Done = frozenset[int]
Used = tuple[int, ...]


class Model(Protocol[S]):
    """What an object does when operations come one by one."""

    def initial(self) -> S: ...

    def step(self, state: S, operation: Operation) -> Iterable[S]:
        """The states in which `operation` may leave the object; none when it cannot have ended as it did."""
        ...

    def is_needed(self, operation: Operation) -> bool:
        """Whether what this operation does may be needed to explain another's answer. A read is not, and neither is a
        refusal; a write is, even where it writes what is there already, because it may have come later."""
        ...

    def alike(self, operation: Operation) -> Hashable | None:
        """For an operation of unknown outcome: the same value for those with the same effect, None for no effect."""
        ...


class Unexplained(NamedTuple):
    """The first answer that no order explains."""

    name: str
    operation: Operation
    states: list[str]
    """What the object may have been just before."""
    under_way: list[Operation]
    """What else was going on, and may have come before."""
    gave_up: bool = False

    def __str__(self) -> str:
        if self.gave_up:
            return f"{self.name!r}: too much was going on at once to decide about {self.operation}"
        meanwhile = "; meanwhile: " + ", ".join(map(str, self.under_way)) if self.under_way else ""
        return f"{self.operation} cannot be explained: it was {' or '.join(self.states)}{meanwhile}"


def check(operations: Iterable[Operation], model: Model[S]) -> list[Unexplained]:
    """What cannot be explained: for each name the first such answer, and nothing when all is well."""
    parts: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        parts[operation.name].append(operation)
    found = (_Search(model, name, part).run() for name, part in sorted(parts.items()))
    return [each for each in found if each is not None]


class _TooMany(Exception):
    pass


class _Search(Generic[S]):
    """One object. A configuration is a state and the set of known operations under way that have taken effect; for
    each of these, how many of each kind of unknown operation were needed to get there."""

    def __init__(self, model: Model[S], name: str, part: Sequence[Operation]) -> None:
        self._model, self._name, self._part = model, name, part
        self._pending: dict[int, Operation] = {}
        self._unknown: list[Operation] = []
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
        """Invokes and completions in time order; at the same instant the invokes come first, which forbids less."""
        moments = []
        for number, operation in enumerate(self._part):
            moments.append((operation.invoked, False, number))
            if operation.outcome != "unknown":
                moments.append((operation.completed, True, number))
        for _, completes, number in sorted(moments):
            yield number, completes

    def _begin(self, number: int, operation: Operation) -> None:
        if operation.outcome == "unknown":
            self._begin_unknown(operation)
            return
        self._pending[number] = operation
        absorbed: dict[tuple[S, Done], list[Used]] = {}
        for (state, done), used in self._configurations.items():
            key = (state, done | {number}) if self._only_looks(state, operation) else (state, done)
            absorbed[key] = used
        self._configurations = absorbed

    def _begin_unknown(self, operation: Operation) -> None:
        kind = self._model.alike(operation)
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

    def _only_looks(self, state: S, operation: Operation) -> bool:
        return not self._model.is_needed(operation) and list(self._model.step(state, operation)) == [state]

    def _end(self, number: int) -> dict[tuple[S, Done], list[Used]]:
        """The configurations in which this operation has taken effect, which from now on need not be remembered."""
        ended: dict[tuple[S, Done], list[Used]] = {}
        late: list[tuple[S, Done, Used]] = []
        for (state, done), used in self._configurations.items():
            for counts in used:
                if number in done:
                    _keep(ended, (state, done - {number}), counts)
                else:
                    late.append((state, done, counts))
        for state, done, counts in self._reached(late, number):
            _keep(ended, (state, done - {number}), counts)
        return ended

    def _reached(self, late: list[tuple[S, Done, Used]], number: int) -> Iterator[tuple[S, Done, Used]]:
        """Whatever can be reached from `late` by letting operations under way take effect, up to this one."""
        seen = set(late)
        while late:
            if len(seen) > MOST_CONFIGURATIONS:
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
            if number not in done and self._only_looks(state, operation)
        )

    def _unexplained(
        self, operation: Operation, before: dict[tuple[S, Done], list[Used]], gave_up: bool = False
    ) -> Unexplained:
        states = sorted({str(state) for state, _ in before})
        others = [other for other in self._pending.values() if other is not operation]
        return Unexplained(self._name, operation, states, [*others, *self._unknown], gave_up)


def _keep(configurations: dict[tuple[S, Done], list[Used]], key: tuple[S, Done], used: Used) -> None:
    """Add it, unless one is there that needed no more of anything; and drop those that needed more."""
    there = configurations.setdefault(key, [])
    if any(_within(other, used) for other in there):
        return
    there[:] = [other for other in there if not _within(used, other)]
    there.append(used)


def _within(less: Used, more: Used) -> bool:
    return all(one <= other for one, other in zip(less, more, strict=True))
