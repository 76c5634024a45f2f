"""The policy of a client: what may be done to which datasets.

    client = holdfast.Client(url, policy=Policy({"burials*": {"sovereign": True, "sensitive": True}}))
    client = holdfast.Client(url, policy=Policy.read("holdfast.toml"))

    policy(context) -> Allow() | Deny("why not") | Review("what has to be decided")

A policy is a pure function of its context: it asks no database and changes nothing. It is called before an operation is
claimed, when its lock was tried, before each retry, before a recorded result is returned, before a reset, a rollback or
a completion, and before a review is answered. When several rules apply, the strictest decision counts: Deny, then
Review, then Allow.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from holdfast.errors import PolicyDenied
from holdfast.geo import find_exposure
from holdfast.governance.dataset import REQUIRABLE, Dataset, parse_datasets
from holdfast.keys import OperationKey, PlainKey

Moment = Literal["claim", "retry", "locked", "replay", "reset", "review"]
_CHANGES_DATA = ("claim", "retry", "locked")
_TOP_LEVEL = frozenset({"datasets", "gateway", "schema", "url"})
"""The keys of holdfast.toml, which may hold a policy beside other settings."""


@dataclass(frozen=True, slots=True)
class Allow:
    """This rule does not object."""


@dataclass(frozen=True, slots=True)
class Deny:
    """Refused with PolicyDenied and this reason; no review can approve it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Review:
    """Refused until it is approved: a review is opened with this reason."""

    reason: str


Decision = Allow | Deny | Review
_STRICTNESS = {Allow: 0, Review: 1, Deny: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """What is about to happen.

    | moment | |
    |---|---|
    | claim | the first attempt |
    | retry | a later attempt |
    | locked | the lock was tried, see ``lock`` |
    | replay | the recorded result is returned, nothing is executed |
    | reset | a reset, a rollback or a completion |
    | review | the answer to a review |
    """

    moment: Moment
    key: str
    label: str
    dataset: str | None = None
    operation: str | None = None
    pipeline: str | None = None
    task: str | None = None
    checksum: str | None = None
    params_hash: str | None = None
    bucket: str | None = None
    version: str | None = None
    attempt: int = 1
    """The attempt that is about to begin; of a finished operation the last one."""
    failures: int = 0
    """Failed attempts since the operation was begun or reset."""
    lock: Literal["held", "busy"] | None = None
    """When ``moment`` is "locked": whether this operation has the lock, or another one has it."""
    sovereign: bool = False
    actor: str | None = None
    justification: str | None = None
    asked_by: str | None = None
    """When ``moment`` is "review" and it is to be approved: the actor whose operation opened it."""
    same_as: str | None = None
    """Another operation that has done, or may have done, the same to a sensitive dataset."""
    retry_of: str | None = None
    """An operation of the same task on a sensitive dataset that has not succeeded so far, and had another input."""
    exposed: str | None = None
    """Why the payload is not masked as its dataset requires."""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    """Datasets that the operation declares to read and write, beside the dataset of its key."""
    failed_lately: int | None = None
    """If the dataset has an error budget: attempts that failed in the last hour, of operations that have not since
    succeeded or been reset."""


Rule = Callable[[PolicyContext], Decision]


class Demands(NamedTuple):
    """What all declarations that match a dataset demand together."""

    sovereign: bool = False
    sensitive: bool = False
    h3_resolution: int | None = None
    """The coarsest resolution demanded."""
    h3_properties: frozenset[str] = frozenset()
    """The properties that all declarations with a resolution allow."""
    budget: bool = False
    """Whether there is an error budget."""
    four_eyes: bool = False

    @property
    def locks_whole_dataset(self) -> bool:
        """Whether the lock must not be split into shards: two keys could do the same at the same time."""
        return self.sovereign or self.sensitive


class Policy:
    """What may be done to which datasets: ``Policy(datasets, *rules)``, or ``Policy.read(file, *rules)``.

    ``datasets``: by pattern (``*`` and ``?``, as in file names), a ``Dataset`` or a dict of its fields. ``rules``:
    functions of a ``PolicyContext`` that return ``Allow()``, ``Deny(reason)`` or ``Review(reason)``.
    """

    def __init__(self, datasets: Mapping[str, Dataset | Mapping[str, Any]] | None = None, *rules: Rule) -> None:
        self._datasets = tuple(parse_datasets({} if datasets is None else datasets).items())
        for rule in rules:
            if not callable(rule):
                raise TypeError(f"a rule must be a function of a context, not {type(rule).__name__}")
        self._rules = rules

    @classmethod
    def read(cls, path: str | os.PathLike[str], *rules: Rule) -> Self:
        """The tables ``[datasets."pattern"]`` of a TOML file, and ``rules`` beside them.

        ValueError that lists everything that is wrong with them, or when the file has no such table.
        """
        import tomllib

        name = os.fspath(path)
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{name} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"{name} is not valid TOML: {error}") from None
        if unknown := sorted(table.keys() - _TOP_LEVEL):
            raise ValueError(f'{name}: unknown key {unknown[0]!r}; a policy is in tables such as [datasets."burials*"]')
        if "datasets" not in table:
            raise ValueError(f'{name} declares no dataset: it needs tables such as [datasets."burials*"]')
        try:
            return cls(table["datasets"], *rules)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def _with(self, other: Policy) -> Policy:
        """Both: of two declarations and rules, the stricter one decides."""
        both = Policy()
        both._datasets, both._rules = (*self._datasets, *other._datasets), (*self._rules, *other._rules)
        return both

    def datasets(self, name: str | None) -> list[Dataset]:
        """The declarations that match a dataset. ``*`` also matches operations without a dataset."""
        return [
            dataset
            for pattern, dataset in self._datasets
            if (pattern == "*" if name is None else matches(dataset_form(name), dataset_form(pattern)))
        ]

    def demands(self, name: str | None) -> Demands | None:
        """What the declarations demand of a dataset; None when neither a declaration nor a rule concerns it."""
        datasets = self.datasets(name)
        if not datasets and not self._rules:
            return None
        resolutions = [dataset.h3_resolution for dataset in datasets if dataset.h3_resolution is not None]
        allowed = [frozenset(dataset.h3_properties) for dataset in datasets if dataset.h3_resolution is not None]
        return Demands(
            sovereign=any(dataset.sovereign for dataset in datasets),
            sensitive=any(dataset.sensitive for dataset in datasets),
            h3_resolution=min(resolutions, default=None),
            h3_properties=frozenset.intersection(*allowed) if allowed else frozenset(),
            budget=any(dataset.error_budget is not None for dataset in datasets),
            four_eyes=any(dataset.has_four_eyes for dataset in datasets),
        )

    def __call__(self, context: PolicyContext) -> Decision:
        """The strictest decision of all declarations and rules."""
        datasets = self.datasets(context.dataset) or [Dataset()]
        decisions: list[Decision] = [decision for dataset in datasets for decision in _decide(context, dataset)]
        for rule in self._rules:
            decision: object = rule(context)
            if type(decision) not in _STRICTNESS:
                name = getattr(rule, "__name__", type(rule).__name__)
                raise TypeError(
                    f"rule {name!r} must return Allow(), Deny(reason) or Review(reason), not {decision!r:.80}"
                )
            decisions.append(decision)  # type: ignore[arg-type]
        return max(decisions, key=lambda decision: _STRICTNESS[type(decision)], default=Allow())

    def permit(self, moment: Moment, **fields: Any) -> None:
        """PolicyDenied unless the decision is Allow. Review is denied, too: the callers cannot wait for an approval."""
        demands = self.demands(fields["dataset"])
        context = PolicyContext(moment=moment, sovereign=demands is not None and demands.sovereign, **fields)
        decision = self(context)
        if not isinstance(decision, Allow):
            raise PolicyDenied(f"operation {context.label!r}: {decision.reason}")


def as_policy(policy: Policy | Rule | None) -> Policy | None:
    """A single rule becomes a policy without declarations."""
    return policy if policy is None or isinstance(policy, Policy) else Policy({}, policy)


class GovernedOperation(NamedTuple):
    """An operation that a policy applies to."""

    policy: Policy
    demands: Demands
    exposed: str | None
    """Why its payload is not masked as the dataset demands."""
    version: int | None = None
    """Of the policy in the database, if that concerns the dataset."""


def govern(
    policy: Policy | None,
    key: OperationKey | PlainKey,
    *,
    sovereign: bool,
    payload: object,
    outputs: Sequence[str] = (),
    version: int | None = None,
) -> GovernedOperation | None:
    """What the policy demands of an operation; None when no policy applies to it.

    ``sovereign``: the caller declares the dataset to be sovereign. ValueError when the key would lock only a part of a
    dataset that is locked as a whole, or names no dataset. PolicyDenied when ``outputs`` name a dataset with stricter
    demands than the dataset of the key.
    """
    demands = None if policy is None else policy.demands(key.dataset)
    if sovereign:
        if key.dataset is None:
            raise ValueError(
                f"sovereign=True locks a dataset as a whole, and the key {key.label!r} names none: give an OperationKey"
            )
        demands = (demands or Demands())._replace(sovereign=True, four_eyes=True)
    if policy is not None:
        for name in outputs:
            if name != key.dataset and (stricter := _stricter_demand(policy.demands(name), demands or Demands())):
                raise PolicyDenied(
                    f"operation {key.label!r}: its outputs name dataset {name!r}, which is {stricter}. Write this "
                    "dataset in an operation whose key names it, so that its rules apply"
                )
    if demands is None:
        return None
    if demands.locks_whole_dataset:
        key._check_whole("sovereign" if demands.sovereign else "sensitive")
    resolution, properties = demands.h3_resolution, demands.h3_properties
    exposed = None if resolution is None else find_exposure(payload, resolution, properties)
    return GovernedOperation(policy or Policy(), demands, exposed, version)


def _stricter_demand(other: Demands | None, own: Demands) -> str | None:
    """What ``other`` demands that an operation governed by ``own`` would not respect; None if there is nothing."""
    if other is None:
        return None
    if other.sovereign:
        return "sovereign"
    if other.sensitive and not own.sensitive:
        return "sensitive"
    limit = other.h3_resolution
    if limit is None or (
        own.h3_resolution is not None and own.h3_resolution <= limit and own.h3_properties <= other.h3_properties
    ):
        return None
    return "masked"


def _decide(context: PolicyContext, dataset: Dataset) -> Iterator[Decision]:
    """The decisions that follow from a declaration. None of them: Allow."""
    name = f"dataset {context.dataset!r}"
    if context.moment in ("reset", "review"):
        allowed = dataset.may_reset
        if allowed is not None and not any(matches(context.actor or "", pattern) for pattern in allowed):
            who = ", ".join(allowed) or "no one"
            yield Deny(f"{name} may be reset, rolled back, completed and reviewed by {who}, not by {context.actor!r}")
    if dataset.has_four_eyes and context.asked_by is not None and context.actor == context.asked_by:
        yield Deny(f"{name} needs four eyes: {context.actor!r} asked for this review, and another actor approves it")
    if context.moment not in _CHANGES_DATA:
        return
    if missing := [field for field in dataset.required if not (getattr(context, field) or "").strip()]:
        yield Deny(f"{name} requires {', '.join(missing)}: give {', '.join(REQUIRABLE[field] for field in missing)}")
    if dataset.review and context.moment != "locked":
        yield Review(f"each change of {name} needs an approved review")
    sovereign = dataset.sovereign or context.sovereign
    if dataset.sensitive and not (context.justification or "").strip():
        yield Deny(f"{name} is sensitive, and a change to it needs a justification: give justification=")
    if dataset.sensitive and context.same_as is not None:
        add = "" if context.checksum else ", or give the key the checksum of its input, or the bucket that it is for"
        yield Deny(
            f"{name} is sensitive, and the same was done to it under another key: {context.same_as}. Reset that "
            f"operation to repeat it{add}"
        )
    if dataset.sensitive and context.retry_of is not None:
        yield Review(
            f"{name} is sensitive, and a retry must have the input of the first attempt: {context.retry_of} had "
            "another one and has not succeeded so far"
        )
    if dataset.h3_resolution is not None and context.exposed is not None:
        yield Deny(
            f"geometry in {name} is written as H3 cells of resolution {dataset.h3_resolution} or coarser, made with "
            f"holdfast.geo.mask_h3 and passed as payload=: {context.exposed}"
        )
    budget, failed = dataset.error_budget, context.failed_lately
    if context.moment == "retry" and budget is not None and failed is not None and failed >= budget:
        yield Deny(f"{name} has used up its error budget: {failed} failed in the last hour, and {budget} may")
    if context.lock == "busy":
        if sovereign or dataset.when_locked == "escalate":
            yield Review(f"{name}{', which is sovereign,' if sovereign else ''} is locked by another operation")
        elif dataset.when_locked == "fail":
            yield Deny(f"{name} is locked by another operation")


_LOOK_ALIKE = str.maketrans(
    "аеорсухіјѕһԁԛԝӏвкмнтαβεζηικμνορτυχı",
    "aeopcyxijshdqwlbkmhtabezhikmvoptyxi",
)
"""Cyrillic and Greek letters, and the Latin ones that they look like, small or as capitals. The SQL function
dataset_form has the same."""


def dataset_form(name: str) -> str:
    """A dataset's name as a policy compares it: case, width, invisible characters, surrounding spaces and Cyrillic and
    Greek letters that look like Latin ones make no other dataset."""
    text = unicodedata.normalize("NFKC", name)
    visible = "".join(each for each in text if unicodedata.category(each) != "Cf")
    return visible.strip().lower().translate(_LOOK_ALIKE)


def matches(name: str, pattern: str) -> bool:
    """A pattern also matches its own text, even if its brackets mean something else."""
    return name == pattern or fnmatchcase(name, pattern)
