"""What is declared of datasets, checked; what follows from it is in ``policy``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What is declared of the datasets that a pattern names."""

    sovereign: bool = False
    """Locked whole, marked in the log; when somebody else has the lock, a review is opened instead of a retry."""
    sensitive: bool = False
    """Changes need a justification; the same transformation is not done under another key; and what may be a retry with
    another input is up for review."""
    h3_resolution: int | None = None
    """Geometry is written as H3 cells of this resolution or a coarser one, and is given as ``payload=``."""
    may_reset: tuple[str, ...] | None = None
    """Patterns of actors who may reset it, roll it back and answer its reviews; None: everybody, empty: nobody."""
    when_locked: Literal["escalate", "fail"] | None = None
    """What it means when somebody else has the lock; None: what the operation says."""
    error_budget: int | None = None
    """Attempts that may fail within an hour; once so many have, nothing is tried again."""

    def __post_init__(self) -> None:
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        if found := list(_mistakes(said)):
            raise ValueError("; ".join(found))
        if self.may_reset is not None:
            object.__setattr__(self, "may_reset", tuple(self.may_reset))


def read_table(datasets: object) -> dict[str, Dataset]:
    """What is declared, by pattern; ValueError with all that is wrong with it."""
    if not isinstance(datasets, Mapping):
        raise ValueError(f"datasets must be a table of patterns, not {type(datasets).__name__}")
    found, wrong = {}, []
    for pattern, said in datasets.items():
        if isinstance(said, Dataset):
            problems: list[str] = []
        else:
            problems = list(_mistakes(said))
        if not isinstance(pattern, str) or not pattern:
            problems.append("the pattern must be a text that is not empty")
        wrong += [f"dataset {pattern!r}: {each}" for each in problems]
        if not problems:
            found[pattern] = said if isinstance(said, Dataset) else Dataset(**said)
    if wrong:
        raise ValueError("; ".join(wrong))
    return found


def _mistakes(said: object) -> Iterable[str]:
    """All that is wrong with a declaration, each with what to do."""
    if not isinstance(said, Mapping):
        yield f"it must be a table, such as {{sovereign = true}}, not {type(said).__name__}"
        return
    known = [each.name for each in fields(Dataset)]
    for name in said:
        if name not in known:
            yield f"there is no {name!r}; known are {', '.join(known)}"
    for name in ("sovereign", "sensitive"):
        if not isinstance(said.get(name, False), bool):
            yield f"{name} must be true or false, not {said[name]!r}"
    for name, least, most in (("h3_resolution", 0, 15), ("error_budget", 0, 1_000_000)):
        value = said.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
            yield f"{name} must be a whole number from {least} to {most}, not {value!r}"
    actors = said.get("may_reset")
    listed = isinstance(actors, list | tuple)
    if actors is not None and not (listed and all(isinstance(each, str) and each for each in actors)):
        yield f"may_reset must be a list of actors, such as ['ops@*'], not {actors!r}"
    if said.get("when_locked") not in (None, "escalate", "fail"):
        yield f"when_locked must be 'escalate' or 'fail', or be left out, not {said['when_locked']!r}"
    elif said.get("sovereign") is True and said.get("when_locked") is not None:
        yield "a sovereign dataset opens a review when it is locked: leave when_locked out"
