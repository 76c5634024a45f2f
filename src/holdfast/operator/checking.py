"""Does any command bypass the rules? Each is called without them, on a database of its own, and must refuse."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import holdfast
from holdfast.operator.registry import Command, commands
from holdfast.operator.running import Window, run


def check() -> dict[str, list[str]]:
    """What is wrong with each command, by name; nothing, if all is well."""
    with tempfile.TemporaryDirectory() as folder, holdfast.Client(f"sqlite:///{Path(folder) / 'check.db'}") as client:
        return {name: _problems(client, command) for name, command in commands().items()}


def _problems(client: holdfast.Client, command: Command) -> list[str]:
    found = []
    if not command.gate:
        found.append("it names no gate")
    if not command.summary:
        found.append("it does not say what it is for")
    values = {name: parameter.kind(7) for name, parameter in command.parameters.items()}
    others = [each for each in commands().values() if each is not command][:1]
    windows = [Window(each, client, "x", "x", None, break_glass=False) for each in (*others, command)]
    for window in (None, *windows):
        try:
            list(command.steps(window, **values))
            found.append("it runs in a window that nobody has opened")
        except holdfast.HoldfastError:
            pass
    for actor, reason in (("", "why"), ("who", ""), ("who", " ")):
        try:
            run(client, command.name, values, actor=actor, reason=reason)
            found.append(f"it runs with actor {actor!r} and reason {reason!r}")
        except ValueError:
            pass
    return found + _unrecorded(client, command, values)


def _unrecorded(client: holdfast.Client, command: Command, values: dict[str, Any]) -> list[str]:
    """Run it for real, where there is nothing to harm: whatever comes of it, it took the lease and told of it."""
    before = len(client.audit.list(most=10_000))
    with suppress(Exception):
        run(client, command.name, values, actor="check", reason="check")
    told = client.audit.list(most=10_000)
    told = told[: len(told) - before]
    found = []
    if not any(each.action == command.name and each.outcome and each.actor == "check" for each in told):
        found.append("it leaves no audit entry that says how it ended")
    if not any(each.action == "gate.window" and each.subject == command.gate and each.fence for each in told):
        found.append(f"it opens no window of its gate {command.gate!r}")
    return found
