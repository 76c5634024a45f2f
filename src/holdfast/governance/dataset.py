"""What a policy declares about datasets, checked. What follows from a declaration is decided in ``policy``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal


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
    may_reset: tuple[str, ...] | None = None
    """Patterns of the actors who may reset it, roll it back and answer its reviews. None: any actor; empty: no one."""
    when_locked: Literal["escalate", "fail"] | None = None
    """What to do when the lock is taken. None: what the operation asks for."""
    error_budget: int | None = None
    """Failed attempts allowed within an hour. Once it is used up, nothing is retried."""

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if problems := list(_problems(values)):
            raise ValueError("; ".join(problems))
        if self.may_reset is not None:
            object.__setattr__(self, "may_reset", tuple(self.may_reset))


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


def _problems(declaration: object) -> Iterable[str]:
    """Everything that is wrong with a declaration, each with what to do about it."""
    if not isinstance(declaration, Mapping):
        yield f"it must be a table, such as {{sovereign = true}}, not {type(declaration).__name__}"
        return
    names = [field.name for field in fields(Dataset)]
    for name in declaration:
        if name not in names:
            yield f"there is no {name!r}; known are {', '.join(names)}"
    for name in ("sovereign", "sensitive"):
        if not isinstance(declaration.get(name, False), bool):
            yield f"{name} must be true or false, not {declaration[name]!r}"
    for name, minimum, maximum in (("h3_resolution", 0, 15), ("error_budget", 0, 1_000_000)):
        value = declaration.get(name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum
        ):
            yield f"{name} must be a whole number from {minimum} to {maximum}, not {value!r}"
    actors = declaration.get("may_reset")
    is_list = isinstance(actors, list | tuple)
    if actors is not None and not (is_list and all(isinstance(actor, str) and actor for actor in actors)):
        yield f"may_reset must be a list of actors, such as ['ops@*'], not {actors!r}"
    if declaration.get("when_locked") not in (None, "escalate", "fail"):
        yield f"when_locked must be 'escalate' or 'fail', or be left out, not {declaration['when_locked']!r}"
    elif declaration.get("sovereign") is True and declaration.get("when_locked") is not None:
        yield "a sovereign dataset opens a review when it is locked: leave when_locked out"
