"""Does any command bypass the rules? It is looked at, and called in every way that is not allowed: none of it is run.

What it declares is put around a probe instead, and run on a database of its own: the probe looks for the runtime lease,
the open gate and the audit entry, as the command would have them.
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
from holdfast.commands.registry import Command, Steps, commands
from holdfast.commands.running import RUNTIME, Window, governed, run


def check() -> dict[str, list[str]]:
    """What is wrong with each command, by name; nothing, if all is well."""
    with tempfile.TemporaryDirectory() as folder, holdfast.Client(f"sqlite:///{Path(folder) / 'check.db'}") as client:
        return {
            name: [*_declared(name, each), *_shaped(each), *_bypassed(each), *_unrecorded(client, each)]
            for name, each in commands().items()
        }


def _declared(name: str, command: Command) -> Iterator[str]:
    if type(command) is not Command:
        yield "it is of a kind of its own, which may run as it likes"
    if name != command.name:
        yield f"it is registered as {name!r} and calls itself {command.name!r}"
    if not command.gate:
        yield "it names no gate"
    if not command.summary:
        yield "it does not say what it is for"
    fields = {field for _, field, _, _ in Formatter().parse(command.subject) if field}
    if not command.subject or fields - command.parameters.keys():
        yield "its subject does not say what it is done to"
    if fields & {each for each, parameter in command.parameters.items() if parameter.secret}:
        yield "its subject tells a secret"


def _shaped(command: Command) -> Iterator[str]:
    """One yield parts the looking from the doing; whatever it needs it has from the window."""
    function = command.function
    if not inspect.isgeneratorfunction(function):
        yield "it does not yield what it is about to change before it does"
        return
    code = function.__code__
    if sum(each.opname == "YIELD_VALUE" for each in dis.get_instructions(code)) != 1:
        yield "it does not yield exactly once"
    window, *given = inspect.signature(function).parameters.values()
    if window.name != "window" or {each.name for each in given} != command.parameters.keys():
        yield "it does not take a window and the parameters that it declares"
    if any({"Client", "AsyncClient"} & {*each.co_names, *each.co_freevars} for each in _reached(function)):
        yield "it makes a client of its own, past its window"


def _reached(function: Callable[..., Any]) -> Iterator[CodeType]:
    """Its code, that of functions in it, and of those of its module that it calls."""
    around = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    seen, waiting = set(), [function.__code__]
    while waiting:
        code = waiting.pop()
        if code in seen:
            continue
        seen.add(code)
        yield code
        called = [around.get(name) for name in (*code.co_names, *code.co_freevars)]
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
        waiting += [
            each.__code__ for each in called if inspect.isfunction(each) and each.__module__ == function.__module__
        ]


class _Untouchable:
    """Whoever asks it for anything has run code that must not run."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


def _bypassed(command: Command) -> Iterator[str]:
    values = {name: parameter.kind(7) for name, parameter in command.parameters.items()}
    nobody: Any = _Untouchable()
    forged = Window(command, nobody, nobody, "check", "check", break_glass=False)
    attempts: dict[str, Callable[[], object]] = {
        "without a window": lambda: next(command.steps(None, **values)),
        "in a window that nobody has opened": lambda: next(command.steps(forged, **values)),
    }
    for actor, reason in (("", "why"), ("who", ""), ("who", " ")):
        attempts[f"with actor {actor!r} and reason {reason!r}"] = lambda a=actor, r=reason: run(  # type: ignore[misc]
            nobody, command.name, values, actor=a, reason=r
        )
    for how, attempt in attempts.items():
        try:
            attempt()
            yield f"it runs {how}"
        except (holdfast.PolicyDenied, ValueError):
            pass
        except Exception as error:
            yield f"it runs {how}, and only then comes to {type(error).__name__}"


def _unrecorded(client: holdfast.Client, command: Command) -> Iterator[str]:
    missing: list[str] = []

    def probe(window: Window, **_: Any) -> Steps:
        held = {each.name for each in window.client.leases.list()}
        missing.extend(f"it runs without {each}" for each in {RUNTIME, f"@gate:{command.gate}"} - held)
        with suppress(holdfast.EngineError):
            window.client.lease("check").acquire()
            missing.append("it may write while it looks")
        yield ["nothing"]
        [entry] = [each for each in client.audit.list() if each.id == window.entry]
        if (entry.action, entry.actor, entry.reason, entry.outcome) != (command.name, "check", "check", None):
            missing.append("it runs without an entry in the audit")

    if not command.gate or type(command) is not Command:
        return
    values = {name: parameter.kind(7) for name, parameter in command.parameters.items()}
    outcome = governed(client, replace(command, function=probe), values, "check", "check")
    yield from missing
    [entry] = [each for each in client.audit.list() if each.id == outcome.entry]
    if entry.outcome != "done" or entry.fence is None:
        yield "its entry in the audit does not say how it ended, or under which fence"
