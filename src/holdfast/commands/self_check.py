"""``holdfast commands check``: proves that no command bypasses the rules, without running any command.

Four questions to each command: is its declaration complete; does its function yield once, and use no client but that
of its window (the ``Window`` that ``run`` passes to it); does it refuse every call that does not come from ``run``; and
does a run of it, with a probe in place of its function and on a temporary database, hold the runtime lease, have the
gate open and leave an audit entry?
"""

from __future__ import annotations

import dis
import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from string import Formatter
from types import CodeType
from typing import Any

import holdfast
from holdfast.commands.execute import RUNTIME, execute, run
from holdfast.commands.registry import Command, Steps, Window, commands


def check() -> dict[str, list[str]]:
    """The problems of each command, by name; an empty list if it has none."""
    with tempfile.TemporaryDirectory() as folder, holdfast.Client(f"sqlite:///{Path(folder) / 'check.db'}") as client:
        return {
            name: [
                *_check_declaration(name, command),
                *_check_function(command),
                *_check_refusals(command),
                *_check_run(client, command),
            ]
            for name, command in commands().items()
        }


def _check_declaration(name: str, command: Command) -> Iterator[str]:
    if type(command) is not Command:
        yield "it is a subclass of Command, which may bypass the checks of Command"
    if name != command.name:
        yield f"it is registered as {name!r} and calls itself {command.name!r}"
    if not command.gate:
        yield "it has no gate"
    if not command.summary:
        yield "it has no summary"
    fields = {field for _, field, _, _ in Formatter().parse(command.subject) if field}
    if not command.subject or fields - command.parameters.keys():
        yield "its subject is empty, or names an unknown parameter"
    if fields & {name for name, parameter in command.parameters.items() if parameter.secret}:
        yield "its subject contains a secret"


def _check_function(command: Command) -> Iterator[str]:
    function = command.function
    if not inspect.isgeneratorfunction(function):
        yield "it does not yield its changes before it makes them"
        return
    if sum(instruction.opname == "YIELD_VALUE" for instruction in dis.get_instructions(function.__code__)) != 1:
        yield "it does not yield exactly once"
    window, *parameters = inspect.signature(function).parameters.values()
    if window.name != "window" or {parameter.name for parameter in parameters} != command.parameters.keys():
        yield "its arguments are not a window and the declared parameters"
    if any({"Client", "AsyncClient"} & {*code.co_names, *code.co_freevars} for code in _reachable_code(function)):
        yield "it creates a client instead of using that of its window"


def _reachable_code(function: Callable[..., Any]) -> Iterator[CodeType]:
    """The code of the function, of functions nested in it, and of functions of the same module that these call."""
    namespace = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    visited, queue = set(), [function.__code__]
    while queue:
        code = queue.pop()
        if code in visited:
            continue
        visited.add(code)
        yield code
        queue += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for name in (*code.co_names, *code.co_freevars):
            called = namespace.get(name)
            if inspect.isfunction(called) and called.__module__ == function.__module__:
                queue.append(called.__code__)


class _UnusableClient:
    """In place of a client: any use of it shows that a refused call has run code of the command."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used")


def _check_refusals(command: Command) -> Iterator[str]:
    values = {name: parameter.kind(7) for name, parameter in command.parameters.items()}
    client: Any = _UnusableClient()
    forged = Window(command, client, client, "check", "check", break_glass=False)
    attempts: dict[str, Callable[[], object]] = {
        "without a window": lambda: next(command.steps(None, **values)),
        "in a window that was not opened by run": lambda: next(command.steps(forged, **values)),
    }
    for actor, reason in (("", "why"), ("who", ""), ("who", " ")):
        attempts[f"with actor {actor!r} and reason {reason!r}"] = lambda a=actor, r=reason: run(  # type: ignore[misc]
            client, command.name, values, actor=a, reason=r
        )
    for how, attempt in attempts.items():
        try:
            attempt()
            yield f"it runs {how}"
        except (holdfast.PolicyDenied, ValueError):
            pass
        except Exception as error:
            yield f"it runs {how}, until it raises {type(error).__name__}"


def _check_run(client: holdfast.Client, command: Command) -> Iterator[str]:
    problems: list[str] = []

    def probe(window: Window, **_: Any) -> Steps:
        held = {record.name for record in window.client.leases.list()}
        problems.extend(f"it runs without {lease}" for lease in {RUNTIME, f"@gate:{command.gate}"} - held)
        with suppress(holdfast.EngineError):
            window.client.lease("check").acquire()
            problems.append("it may write before it has yielded its changes")
        yield ["nothing"]
        entries = [entry for entry in client.audit.list() if entry.id == window.entry]
        recorded = [(entry.action, entry.actor, entry.reason, entry.outcome) for entry in entries]
        if recorded != [(command.name, "check", "check", None)]:
            problems.append("it runs without an audit entry")

    if not command.gate or type(command) is not Command:
        return
    values = {name: parameter.kind(7) for name, parameter in command.parameters.items()}
    outcome = execute(client, replace(command, function=probe), values, "check", "check")
    yield from problems
    [entry] = [entry for entry in client.audit.list() if entry.id == outcome.entry]
    if entry.outcome != "done" or entry.fence is None:
        yield "its audit entry lacks the outcome or the fence"
