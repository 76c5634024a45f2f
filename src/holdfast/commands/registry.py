"""Which commands there are, and what each declares of itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast import HoldfastError, PolicyDenied

if TYPE_CHECKING:
    from holdfast.commands.running import Window

Steps = Iterator[list[str]]
"""A command yields once, what it is about to change; what comes before only looks, and what comes after does it."""


class CommandRefused(HoldfastError):
    """There is nothing that the command could or should do, and it has changed nothing."""


class CommandUnsettled(HoldfastError):
    """The command has begun what it is about, and could not see its end."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One that is optional has a default, and is an option on the command line, as is one with an ``option``."""

    help: str
    kind: type[str | int | float] = str
    default: Any = None
    optional: bool = False
    option: str | None = None
    """What the option is called, if not like the parameter."""
    secret: str | None = None
    """The environment variable that the command line takes it from: it is not for the list of processes, nor for the
    audit."""
    least: float = -math.inf
    most: float = math.inf
    """Of a number; of a text, how long it may be (200 unless told)."""

    def check(self, name: str, value: Any) -> Any:
        """As it is declared, or ValueError that names it."""
        if self.kind is str:
            return self._text(name, value)
        found: Any = None
        try:
            found = self.kind(value)
            fits = not isinstance(value, bool) and (isinstance(value, str) or found == value)
        except (TypeError, ValueError, OverflowError):
            fits = False
        if not fits or not math.isfinite(found) or not self.least <= found <= self.most:
            bounds = [f"{word} {bound:.15g}" for word, bound in (("from", self.least), ("to", self.most))]
            told = " ".join(each for each in bounds if "inf" not in each)
            raise ValueError(f"{name} must be {self.kind.__name__}{told and ' '}{told}, not {value!r:.60}")
        return found

    def _text(self, name: str, value: Any) -> str:
        most = 200 if self.most == math.inf else int(self.most)
        if not isinstance(value, str):
            raise ValueError(f"{name} must be str, not {value!r:.60}")
        if not 1 <= len(value) <= most:
            raise ValueError(f"{name} must have 1 to {most} characters, not {len(value)}: {value[:40]!r}")
        if any(map(_is_control, value)):
            raise ValueError(f"{name} must not contain control characters: {value[:60]!r}")
        return value


def _is_control(character: str) -> bool:
    return character < " " or "\x7f" <= character < "\xa0" or "\ud800" <= character < "\ue000"


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    summary: str
    gate: str
    destructive: bool
    parameters: Mapping[str, Parameter]
    subject: str
    """A pattern over the parameters: what the audit says that it was done to."""
    atomic: bool
    """Whether it is done by one statement: then an error that is certain means that nothing was changed."""
    function: Callable[..., Steps]

    def steps(self, window: Window | None, **values: Any) -> Steps:
        """Begin it: the first step looks, the second does it, each only in a window that ``run`` has made for it."""
        if window is None or window.command is not self or window not in windows:
            raise self._denied()
        return self._in(window, values)

    def _in(self, window: Window, values: dict[str, Any]) -> Steps:
        steps = self.function(window, **values)
        told = next(steps, None)
        if not isinstance(told, list) or not all(isinstance(line, str) for line in told):
            raise TypeError(f"{self.name} must yield the lines that say what it is about to change, not {told!r:.60}")
        yield told
        if not windows.get(window):
            raise self._denied()
        if next(steps, None) is not None:
            raise RuntimeError(f"{self.name} yields more than once: it would change what it has not told")

    def _denied(self) -> PolicyDenied:
        return PolicyDenied(f"{self.name} runs through holdfast.commands.run alone: under the runtime lease, on record")

    def told(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Its parameters, as the audit has them."""
        return {name: "***" if self.parameters[name].secret else value for name, value in values.items()}

    def check(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of its parameters, or ValueError that names the wrong one."""
        if unknown := sorted(given.keys() - self.parameters.keys()):
            known = ", ".join(self.parameters) or "none"
            raise ValueError(f"{self.name} has no parameter {unknown[0]!r}; it has: {known}")
        values = {}
        for name, parameter in self.parameters.items():
            if name not in given and not parameter.optional:
                raise ValueError(f"{self.name} needs {name!r}: {parameter.help}")
            value = given.get(name, parameter.default)
            left_out = parameter.optional and value is parameter.default
            values[name] = value if left_out else parameter.check(name, value)
        return values


_registry: dict[str, Command] = {}
windows: dict[Window, bool] = {}
"""Those that ``run`` has made, for as long as it runs; and whether something may be done in it now."""


def commands() -> Mapping[str, Command]:
    """All that are declared, by name."""
    return dict(sorted(_registry.items()))


def command(
    name: str, /, *, gate: str, subject: str, destructive: bool, atomic: bool = False, **parameters: Parameter
) -> Callable[[Callable[..., Steps]], Command]:
    """Declare a command. The function gets a window and the parameters, looks, yields the lines that say what would
    change, and then changes it; its docstring says in one line what for. ``atomic``: with one statement."""
    if name in _registry:
        raise ValueError(f"there is a command {name!r} already")

    def declare(function: Callable[..., Steps]) -> Command:
        summary = (function.__doc__ or "").strip().partition("\n")[0]
        declared = Command(name, summary, gate, destructive, parameters, subject, atomic, function)
        _registry[name] = declared
        return declared

    return declare
