"""What a policy declares about datasets, checked. What follows from a declaration is decided in ``policy``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

REQUIRABLE = {
    "actor": "actor= of the operation",
    "justification": "justification= of the operation",
    "checksum": "checksum= of its OperationKey",
    "bucket": "bucket= of its OperationKey",
    "version": "version= of its OperationKey",
}
"""What ``requires`` may name, and where an operation gives it."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The declaration for the datasets that match a pattern."""

    sovereign: bool = False
    """Locked as a whole and marked in the log. When the lock is taken, a review is opened instead of a retry."""
    sensitive: bool = False
    """A change needs a justification; the same transformation is not done again under another key; a possible retry
    with another input needs a review."""
    h3_resolution: int | None = None
    """Geometry is written as H3 cells of this resolution or a coarser one, and is passed as ``payload=``."""
    h3_properties: tuple[str, ...] = ()
    """The properties of such geometry that may be written. All others must be dropped."""
    may_reset: tuple[str, ...] | None = None
    """Patterns of the actors who may reset it, roll it back and answer its reviews. None: any actor; empty: no one."""
    when_locked: Literal["escalate", "fail"] | None = None
    """What to do when the lock is taken. None: what the operation asks for."""
    error_budget: int | None = None
    """Failed attempts allowed within an hour. Once it is used up, nothing is retried."""
    requires: tuple[str, ...] = ()
    """What an operation must give: parts of its key (checksum, bucket, version), actor, justification."""
    review: bool = False
    """Each attempt needs an approved review."""
    four_eyes: bool | None = None
    """True: who asks for a review does not approve it, and an operation must give its actor. None: as True for a
    sovereign dataset, but an operation without an actor may be approved by anybody."""

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if problems := list(_problems(values)):
            raise ValueError("; ".join(problems))
        if self.may_reset is not None:
            object.__setattr__(self, "may_reset", tuple(self.may_reset))
        object.__setattr__(self, "h3_properties", tuple(self.h3_properties))
        object.__setattr__(self, "requires", tuple(self.requires))

    @property
    def has_four_eyes(self) -> bool:
        return self.sovereign if self.four_eyes is None else self.four_eyes

    @property
    def required(self) -> tuple[str, ...]:
        """What an operation must give, beside the justification of a sensitive dataset."""
        return tuple([name for name in REQUIRABLE if name in self.requires or (name == "actor" and self.four_eyes)])


def parse_datasets(table: object) -> dict[str, Dataset]:
    """The declarations by pattern. ValueError that lists everything that is wrong with the table."""
    if not isinstance(table, Mapping):
        raise ValueError(f"datasets must be a table of patterns, not {type(table).__name__}")
    datasets, errors = {}, []
    for pattern, declaration in table.items():
        problems = [] if isinstance(declaration, Dataset) else list(_problems(declaration))
        if not isinstance(pattern, str) or not pattern:
            problems.append("the pattern must be a text that is not empty")
        errors += [f"dataset {pattern!r}: {problem}" for problem in problems]
        if not problems:
            datasets[pattern] = declaration if isinstance(declaration, Dataset) else Dataset(**declaration)
    if errors:
        raise ValueError("; ".join(errors))
    return datasets


def dump_datasets(datasets: Iterable[tuple[str, Dataset]]) -> dict[str, dict[str, object]]:
    """The declarations as tables of the settings that differ from the defaults: the opposite of ``parse_datasets``."""
    return {
        pattern: {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in fields(Dataset)
            if (value := getattr(dataset, field.name)) != field.default
        }
        for pattern, dataset in datasets
    }


def _problems(declaration: object) -> Iterable[str]:
    """Everything that is wrong with a declaration, each with what to do about it."""
    if not isinstance(declaration, Mapping):
        yield f"it must be a table, such as {{sovereign = true}}, not {type(declaration).__name__}"
        return
    names = [field.name for field in fields(Dataset)]
    for name in declaration:
        if name not in names:
            yield f"there is no {name!r}; known are {', '.join(names)}"
    if declaration.get("four_eyes") not in (None, True, False):
        yield f"four_eyes must be true or false, not {declaration['four_eyes']!r}"
    for name in ("sovereign", "sensitive", "review"):
        if not isinstance(declaration.get(name, False), bool):
            yield f"{name} must be true or false, not {declaration[name]!r}"
    for name, minimum, maximum in (("h3_resolution", 0, 15), ("error_budget", 0, 1_000_000)):
        value = declaration.get(name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum
        ):
            yield f"{name} must be a whole number from {minimum} to {maximum}, not {value!r}"
    properties = declaration.get("h3_properties", ())
    is_list = isinstance(properties, list | tuple)
    if not (is_list and all(isinstance(name, str) and name for name in properties)):
        yield f"h3_properties must be a list of names, such as ['kind'], not {properties!r}"
    elif properties and declaration.get("h3_resolution") is None:
        yield "h3_properties names properties of masked geometry: give h3_resolution as well"
    actors = declaration.get("may_reset")
    is_list = isinstance(actors, list | tuple)
    if actors is not None and not (is_list and all(isinstance(actor, str) and actor for actor in actors)):
        yield f"may_reset must be a list of actors, such as ['ops@*'], not {actors!r}"
    required = declaration.get("requires", ())
    if not isinstance(required, list | tuple) or not all(name in REQUIRABLE for name in required):
        yield f"requires must be a list of {', '.join(REQUIRABLE)}, not {required!r}"
    if declaration.get("when_locked") not in (None, "escalate", "fail"):
        yield f"when_locked must be 'escalate' or 'fail', or be left out, not {declaration['when_locked']!r}"
    elif declaration.get("sovereign") is True and declaration.get("when_locked") is not None:
        yield "a sovereign dataset opens a review when it is locked: leave when_locked out"
