"""Which commands there are, and what each declares of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast import HoldfastError, PolicyDenied

if TYPE_CHECKING:
    from holdfast.operator.running import Window

Steps = Iterator[list[str]]
"""A command yields once, what it is about to change; what comes before only looks, and what comes after does it."""


class CommandRefused(HoldfastError):
    """The command has looked, and there is nothing that it could or should do."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One that is optional has a default, and is an option on the command line, as is one with an ``option``."""

    help: str
    kind: type[str | int | float] = str
    default: Any = None
    optional: bool = False
    option: str | None = None
    """What the option is called, if not like the parameter."""


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    summary: str
    gate: str
    destructive: bool
    parameters: Mapping[str, Parameter]
    subject: str
    """A pattern over the parameters: what the audit says that it was done to."""
    bootstrap: bool
    """Whether it may run before there is anything to govern it with: the tables themselves."""
    _steps: Callable[..., Steps]

    def steps(self, window: Window | None, **values: Any) -> Steps:
        """Begin it: the first step looks, the second does it, and only in a window that ``run`` has opened."""
        if window is None or window.command is not self:
            raise self._denied()
        return self._in(window, values)

    def _in(self, window: Window, values: dict[str, Any]) -> Steps:
        steps = self._steps(window, **values)
        yield next(steps)
        if window not in open_windows:
            raise self._denied()
        if next(steps, None) is not None:
            raise RuntimeError(f"{self.name} yields more than once: it would change what it has not told")

    def _denied(self) -> PolicyDenied:
        return PolicyDenied(f"{self.name} runs through holdfast.operator.run alone: under the runtime lease, on record")

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
            try:
                values[name] = value if value is None else parameter.kind(value)
            except (TypeError, ValueError):
                raise ValueError(f"{name} must be {parameter.kind.__name__}, not {value!r}") from None
        return values


_registry: dict[str, Command] = {}
open_windows: set[Window] = set()
"""Those in which something may be done, for as long as it may."""


def commands() -> Mapping[str, Command]:
    """All that are declared, by name."""
    return dict(sorted(_registry.items()))


def command(
    name: str, /, *, gate: str, subject: str, destructive: bool, bootstrap: bool = False, **parameters: Parameter
) -> Callable[[Callable[..., Steps]], Command]:
    """Declare a command. The function gets a window and the parameters, looks, yields the lines that say what would
    change, and then changes it; its docstring says in one line what for."""
    if name in _registry:
        raise ValueError(f"there is a command {name!r} already")

    def declare(function: Callable[..., Steps]) -> Command:
        summary = (function.__doc__ or "").strip().partition("\n")[0]
        declared = Command(name, summary, gate, destructive, parameters, subject, bootstrap, function)
        _registry[name] = declared
        return declared

    return declare
