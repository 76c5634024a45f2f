"""What a governed command declares: its name, its gate, its parameters and the function that does the work.

A command's function is a generator with a single ``yield``. Before it, the function only reads and plans; it yields the
lines that describe the changes; after it, the function makes them. ``holdfast.commands.run`` drives it, and every other
caller is refused: ``Command.steps`` accepts only a window that ``run`` has opened for this command.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast import HoldfastError, PolicyDenied

if TYPE_CHECKING:
    from holdfast import Client

Steps = Iterator[list[str]]
"""The generator of a command: it plans, yields the lines that describe the changes, and makes the changes."""
_TEXT_LENGTH = 200


class CommandRefused(HoldfastError):
    """The command has nothing to do, or must not do it. It has changed nothing."""


class CommandUnsettled(HoldfastError):
    """The command has started its change and could not see it complete."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a command. On the command line it is an option if it is optional or names an ``option``, and an
    argument otherwise."""

    help: str
    kind: type[str | int | float] = str
    default: Any = None
    optional: bool = False
    option: str | None = None
    """The name of the option, where it differs from the parameter's."""
    secret: str | None = None
    """The environment variable that a secret is read from, and no option: so it is not in the process list. The audit
    masks it."""
    minimum: float = -math.inf
    maximum: float = math.inf
    """The bounds of a number. For text, ``maximum`` is its length, 200 by default."""
    is_json: bool = False
    """Whether the text is JSON. It is stored in ASCII, without spaces."""

    def check(self, name: str, value: Any) -> Any:
        """Return ``value`` as the declared type. Raises ValueError that names the parameter."""
        if self.kind is str:
            return self._check_text(name, _compact_json(name, value) if self.is_json else value)
        number: Any = None
        try:
            number = self.kind(value)
            is_exact = not isinstance(value, bool) and (isinstance(value, str) or number == value)
        except (TypeError, ValueError, OverflowError):
            is_exact = False
        if not is_exact or not math.isfinite(number) or not self.minimum <= number <= self.maximum:
            limits = (("from", self.minimum), ("to", self.maximum))
            bounds = "".join(f" {word} {limit:.15g}" for word, limit in limits if math.isfinite(limit))
            kind = "an integer" if self.kind is int else "a number"
            raise ValueError(f"{name} must be {kind}{bounds}, not {value!r:.60}")
        return number

    def _check_text(self, name: str, value: Any) -> str:
        maximum = _TEXT_LENGTH if self.maximum == math.inf else int(self.maximum)
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a string, not {value!r:.60}")
        if not 1 <= len(value) <= maximum:
            raise ValueError(f"{name} must have 1 to {maximum} characters, not {len(value)}: {value[:40]!r}")
        if any(map(_is_control, value)):
            raise ValueError(f"{name} must not contain control characters: {value[:60]!r}")
        return value


def _compact_json(name: str, value: Any) -> str:
    try:
        return json.dumps(json.loads(value), allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"""{name} must be JSON, such as '{{"id": 7}}' or null, not {value!r:.60}: {error}"""
        ) from None


def _is_control(character: str) -> bool:
    """Whether it is a control character, or a lone surrogate, which no database stores."""
    return character < " " or "\x7f" <= character < "\xa0" or "\ud800" <= character < "\ue000"


class Window:
    """What a command's function is given: the database, the actor, the reason and the number of the audit entry.

    ``client`` is read-only until the command has yielded its plan and ``run`` has allowed it to write.
    """

    def __init__(
        self, command: Command, client: Client, read_only: Client, actor: str, reason: str, *, break_glass: bool
    ) -> None:
        self.command, self.actor, self.reason, self.break_glass = command, actor, reason, break_glass
        self._client, self._read_only = client, read_only
        self.entry: int | None = None
        """None on a dry run, which leaves no audit entry."""

    @property
    def client(self) -> Client:
        return self._client if _may_write.get(self) else self._read_only


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    summary: str
    gate: str
    destructive: bool
    parameters: Mapping[str, Parameter]
    subject: str
    """A format string over the parameters: the subject of the audit entry."""
    atomic: bool
    """Whether one statement makes the whole change: then an error that is certain means that nothing was changed."""
    function: Callable[..., Steps]

    def steps(self, window: Window | None, **values: Any) -> Steps:
        """The generator that plans and then makes the change.

        Raises PolicyDenied unless ``run`` has opened ``window`` for this command, and again at the second step unless
        ``run`` allows it to write.
        """
        if window is None or window.command is not self or window not in _may_write:
            raise self._denied()
        return self._steps(window, values)

    def _steps(self, window: Window, values: dict[str, Any]) -> Steps:
        steps = self.function(window, **values)
        changes = next(steps, None)
        if not isinstance(changes, list) or not all(isinstance(line, str) for line in changes):
            raise TypeError(f"command {self.name} must first yield its plan, a list of lines, not {changes!r:.60}")
        yield changes
        if not _may_write.get(window):
            raise self._denied()
        if next(steps, None) is not None:
            raise RuntimeError(
                f"command {self.name} was stopped at its second yield: a command yields its plan and nothing else. The "
                "changes after the first yield were made"
            )

    def _denied(self) -> PolicyDenied:
        return PolicyDenied(
            f"{self.name} can only be run by holdfast.commands.run: under the runtime lease, with an audit entry"
        )

    def mask_secrets(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of its parameters for the audit."""
        return {name: "***" if self.parameters[name].secret else value for name, value in values.items()}

    def check(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of its parameters, defaults filled in. Raises ValueError that names the wrong parameter."""
        if unknown := sorted(given.keys() - self.parameters.keys()):
            names = ", ".join(self.parameters) or "none"
            raise ValueError(f"{self.name} has no parameter {unknown[0]!r}; it has: {names}")
        values = {}
        for name, parameter in self.parameters.items():
            if name not in given and not parameter.optional:
                raise ValueError(f"{self.name} needs {name!r}: {parameter.help}")
            value = given.get(name, parameter.default)
            is_default = parameter.optional and value is parameter.default
            values[name] = value if is_default else parameter.check(name, value)
        return values


_registry: dict[str, Command] = {}
_may_write: dict[Window, bool] = {}
"""The windows that ``run`` has open, and whether their commands may write now. A window that a caller creates is not in
it, so it is good for nothing."""


@contextmanager
def open_window(
    command: Command, client: Client, actor: str, reason: str, *, break_glass: bool = False
) -> Iterator[Window]:
    """A window in which the command may read."""
    with client.read_only() as read_only:
        window = Window(command, client, read_only, actor, reason, break_glass=break_glass)
        _may_write[window] = False
        try:
            yield window
        finally:
            del _may_write[window]


@contextmanager
def allow_writes(window: Window) -> Iterator[None]:
    """Let the command of an open window write."""
    _may_write[window] = True
    try:
        yield
    finally:
        _may_write[window] = False


def commands() -> Mapping[str, Command]:
    """All commands by name, in alphabetical order."""
    return dict(sorted(_registry.items()))


def command(
    name: str, /, *, gate: str, subject: str, destructive: bool, atomic: bool = False, **parameters: Parameter
) -> Callable[[Callable[..., Steps]], Command]:
    """Declare a command. Raises ValueError if the name is taken, or has no dot.

    The function takes a window and the parameters. It reads, yields the lines that describe the changes, and then makes
    them. The first line of its docstring is the command's summary. ``atomic``: one statement makes the whole change.
    """
    if name in _registry:
        raise ValueError(f"there is already a command {name!r}")
    if "." not in name:
        raise ValueError(f"the name of a command must contain a dot, such as 'lease.release', not {name!r}")

    def declare(function: Callable[..., Steps]) -> Command:
        summary = (function.__doc__ or "").strip().partition("\n")[0]
        declared = Command(name, summary, gate, destructive, parameters, subject, atomic, function)
        _registry[name] = declared
        return declared

    return declare
