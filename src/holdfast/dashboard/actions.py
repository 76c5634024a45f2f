"""Governed commands from the pages: a dry run, a reason, the audit entry.

Only these commands have a dialog; what needs a secret, writes a file or belongs to the deployment has none.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from holdfast import commands as governed
from holdfast.dashboard.formats import link
from holdfast.dashboard.stream import Panel

ACTIONS = (
    "gate.close", "leader.resign", "lease.release", "lock.end", "operation.complete", "operation.reset",
    "operation.rollback", "problem.acknowledge", "review.approve", "review.reject", "schedule.pause", "schedule.resume",
    "schedule.run", "schedule.skip", "session.cancel", "slot.release",
)  # fmt: skip
MAX_CHANGES = 100
_DEFAULTS = {("leader.resign", "wait"): "10"}
"""What a field of the dialog contains at first: a request should not last as long as a command may."""


def actions_panel(actions: Sequence[tuple[str, Mapping[str, str]]]) -> Panel:
    """``actions``: commands with the parameters that the page knows."""
    declared = governed.commands()
    rows = [
        {
            "name": name,
            "summary": declared[name].summary,
            "destructive": declared[name].destructive,
            "href": link(f"/act/{name}", **parameters),
            "command": command_line(name, parameters, "…"),
        }
        for name, parameters in actions
    ]
    return {"kind": "actions", "title": "Actions", "rows": rows}


def command_line(name: str, parameters: Mapping[str, Any], reason: str) -> str:
    """The command as a shell takes it."""
    declared = governed.commands()[name].parameters
    words = ["holdfast", "do", name]
    positional: list[str] = []
    options: list[str] = []
    for key, parameter in declared.items():
        value = parameters.get(key)
        if value in (None, ""):
            continue
        if parameter.optional or parameter.option:
            options += [f"--{parameter.option or key}", str(value)]
        else:
            positional.append(str(value))
    if any(word.startswith("-") for word in positional):
        return shlex.join([*words, *options, "--reason", reason, "--", *positional])
    return shlex.join([*words, *positional, *options, "--reason", reason])


def fields(name: str, given: Mapping[str, str]) -> list[dict[str, str]]:
    """The parameters that the page does not know, for the form."""
    return [
        {"name": key, "help": parameter.help, "value": _DEFAULTS.get((name, key), str(parameter.default or ""))}
        for key, parameter in governed.commands()[name].parameters.items()
        if key not in given
    ]


def clean(name: str, given: Mapping[str, str]) -> dict[str, str]:
    """The parameters of the command that have a value."""
    return {key: given[key] for key in governed.commands()[name].parameters if given.get(key)}


def plan_digest(changes: Sequence[str]) -> str:
    """Names a plan, so that a plan which has changed since the operator has read it is not executed."""
    return sha256("\n".join(changes).encode(errors="replace")).hexdigest()[:16]
