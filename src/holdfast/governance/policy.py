"""What may be done to which data: the answer that follows, for one who asks, from what is declared of a dataset.

    policy(context) -> Allow() | Deny("why not") | Review("what somebody has to decide")

A pure function. It is asked before an operation is claimed, under its lock, when somebody else has that, on every
retry, and before a recorded result is given again, a reset or an answer to a review. Where several rules speak, the
strictest answer counts. Nothing here asks a database or changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from holdfast.errors import PolicyDenied
from holdfast.geo import exposed
from holdfast.governance.dataset import Dataset, read_table
from holdfast.keys import OperationKey, PlainKey

Moment = Literal["claim", "retry", "locked", "replay", "reset", "review"]
_WORK = ("claim", "retry", "locked")
"""When data is about to be changed."""


@dataclass(frozen=True, slots=True)
class Allow:
    """It may be done, as far as this rule is concerned."""


@dataclass(frozen=True, slots=True)
class Deny:
    """It is not done, whoever approves: PolicyDenied, with the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Review:
    """It is not done before somebody has approved it: a review is opened, with the reason."""

    reason: str


Decision = Allow | Deny | Review
_STRICTNESS = {Allow: 0, Review: 1, Deny: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """What is about to happen. ``moment``: claim (the first attempt) | retry (a later one) | locked (the lock was
    tried: ``lock``) | replay (what is in the log is read back, and nothing is executed) | reset (or rollback) | review
    (an answer to one)."""

    moment: Moment
    key: str
    label: str
    dataset: str | None = None
    operation: str | None = None
    pipeline: str | None = None
    task: str | None = None
    checksum: str | None = None
    params_hash: str | None = None
    attempt: int = 1
    """The one that is about to begin; of what is over, the last one."""
    failures: int = 0
    """Attempts that came to nothing since it was begun or reset."""
    lock: Literal["held", "busy"] | None = None
    """When the moment is "locked": it is ours, or somebody else has it."""
    sovereign: bool = False
    actor: str | None = None
    justification: str | None = None
    same_as: str | None = None
    """Another operation that has done, or may have done, the same to a sensitive dataset."""
    retry_of: str | None = None
    """One of the same task on a sensitive dataset that has come to nothing so far, and had another input."""
    exposed: str | None = None
    """Why the payload is not masked as its dataset demands."""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    """What the operation says that it reads and writes, beside the dataset of its key."""
    failed_lately: int | None = None
    """If the dataset has an error budget: failed attempts at operations of it that did so in the last hour, and stand
    as failed."""


Rule = Callable[[PolicyContext], Decision]


class Demands(NamedTuple):
    """What is to be seen to for a dataset: all that was declared of it, taken together."""

    sovereign: bool = False
    sensitive: bool = False
    h3_resolution: int | None = None
    """The coarsest that was asked for."""
    budget: bool = False

    @property
    def whole(self) -> bool:
        """Whether its lock is in one piece: else the same could be done twice at a time, under two keys."""
        return self.sovereign or self.sensitive


class Rules:
    """Datasets by pattern (``*`` and ``?``, as in file names), and rules of one's own beside what is declared."""

    def __init__(self, datasets: Mapping[str, Dataset | Mapping[str, Any]] | None = None, *rules: Rule) -> None:
        self._datasets = read_table({} if datasets is None else datasets)
        for rule in rules:
            if not callable(rule):
                raise TypeError(f"a rule must be a function of a context, not {type(rule).__name__}")
        self._rules = rules

    def datasets(self, name: str | None) -> list[Dataset]:
        """What was declared of a dataset. The pattern ``*`` is of operations without one, too."""
        return [
            said
            for pattern, said in self._datasets.items()
            if (pattern == "*" if name is None else _fits(name, pattern))
        ]

    def demands(self, name: str | None) -> Demands | None:
        """None when there is nothing to ask about it."""
        found = self.datasets(name)
        if not found and not self._rules:
            return None
        finest = [each.h3_resolution for each in found if each.h3_resolution is not None]
        return Demands(
            any(each.sovereign for each in found), any(each.sensitive for each in found), min(finest, default=None),
            any(each.error_budget is not None for each in found),
        )  # fmt: skip

    def __call__(self, context: PolicyContext) -> Decision:
        """The strictest answer."""
        found = self.datasets(context.dataset) or [Dataset()]
        answers: list[Decision] = [answer for each in found for answer in declared(context, each)]
        for rule in self._rules:
            answer: object = rule(context)
            if type(answer) not in _STRICTNESS:
                name = getattr(rule, "__name__", type(rule).__name__)
                raise TypeError(
                    f"rule {name!r} must return Allow(), Deny(reason) or Review(reason), not {answer!r:.80}"
                )
            answers.append(answer)  # type: ignore[arg-type]
        return max(answers, key=lambda each: _STRICTNESS[type(each)], default=Allow())

    def permit(self, moment: Moment, **about: Any) -> None:
        """PolicyDenied unless it may be done: where nothing waits for an approval, a review is a no, too."""
        demands = self.demands(about["dataset"])
        context = PolicyContext(moment=moment, sovereign=demands is not None and demands.sovereign, **about)
        answer = self(context)
        if not isinstance(answer, Allow):
            raise PolicyDenied(f"operation {context.label!r}: {answer.reason}")


class Governed(NamedTuple):
    """An operation that the rules have something to say about."""

    rules: Rules
    demands: Demands
    exposed: str | None


def governed(
    rules: Rules | None, key: OperationKey | PlainKey, *, sovereign: bool, payload: object, outputs: Sequence[str] = ()
) -> Governed | None:
    """None when there is nothing to ask about it. ``sovereign``: whoever runs it says that its dataset is. ValueError
    when it would lock a part of what is locked whole, or names no dataset that could be; PolicyDenied when it writes
    one beside its own that more is demanded for."""
    demands = None if rules is None else rules.demands(key.dataset)
    if sovereign:
        if key.dataset is None:
            raise ValueError(
                f"sovereign=True is of a dataset, which is locked whole, and the key {key.label!r} names none: give an "
                "OperationKey"
            )
        demands = (demands or Demands())._replace(sovereign=True)
    if rules is not None:
        for name in outputs:
            if name != key.dataset and (why := _beside(rules.demands(name), demands or Demands())):
                raise PolicyDenied(
                    f"operation {key.label!r}: its outputs name dataset {name!r}, which is {why}, and it would be "
                    "written past what that demands: write it in an operation whose key has this dataset"
                )
    if demands is None:
        return None
    if demands.whole:
        key.check_whole("sovereign" if demands.sovereign else "sensitive")
    shown = None if demands.h3_resolution is None else exposed(payload, demands.h3_resolution)
    return Governed(rules or Rules(), demands, shown)


def _beside(other: Demands | None, mine: Demands) -> str | None:
    """Why a dataset cannot be written beside the one that is locked and asked about; None when it can."""
    if other is None:
        return None
    if other.sovereign:
        return "sovereign"
    if other.sensitive and not mine.sensitive:
        return "sensitive"
    finest = other.h3_resolution
    return "masked" if finest is not None and (mine.h3_resolution is None or mine.h3_resolution > finest) else None


def as_rules(policy: Rules | Rule | None) -> Rules | None:
    return policy if policy is None or isinstance(policy, Rules) else Rules({}, policy)


def declared(context: PolicyContext, dataset: Dataset) -> Iterator[Decision]:
    """What the declaration says, one answer for each rule that speaks."""
    name = f"dataset {context.dataset!r}"
    if context.moment in ("reset", "review"):
        allowed = dataset.may_reset
        if allowed is not None and not any(_fits(context.actor or "", each) for each in allowed):
            who = ", ".join(allowed) or "nobody"
            yield Deny(f"{name} is reset, rolled back and answered for by {who}, not by {context.actor!r}")
    if context.moment not in _WORK:
        return
    sovereign = dataset.sovereign or context.sovereign
    if dataset.sensitive and not (context.justification or "").strip():
        yield Deny(f"{name} is sensitive, and a change to it needs a justification: give justification=")
    if dataset.sensitive and context.same_as is not None:
        yield Deny(
            f"{name} is sensitive, and the same was done to it under another key: {context.same_as}. Reset that one "
            "if it has to be done anew"
        )
    if dataset.sensitive and context.retry_of is not None:
        yield Review(
            f"{name} is sensitive, and a retry sees the input that it saw first: {context.retry_of} had another one, "
            "and has come to nothing so far"
        )
    if dataset.h3_resolution is not None and context.exposed is not None:
        yield Deny(
            f"geometry in {name} is written as H3 cells of resolution {dataset.h3_resolution} or coarser, and given as "
            f"payload=, made with holdfast.mask_h3: {context.exposed}"
        )
    budget, failed = dataset.error_budget, context.failed_lately
    if context.moment == "retry" and budget is not None and failed is not None and failed >= budget:
        yield Deny(f"{name} has used up its error budget: {failed} failed in the last hour, and {budget} may")
    if context.lock == "busy":
        if sovereign or dataset.when_locked == "escalate":
            yield Review(f"somebody else has the lock of {name}{', which is sovereign' if sovereign else ''}")
        elif dataset.when_locked == "fail":
            yield Deny(f"somebody else has the lock of {name}")


def _fits(name: str, pattern: str) -> bool:
    """What is written out fits as well, whatever a pattern makes of its brackets."""
    return name == pattern or fnmatchcase(name, pattern)
