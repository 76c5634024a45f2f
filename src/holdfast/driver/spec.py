"""The spec of a sandbox, checked, and the description that clients see. Pure functions."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_TEXT = 131_071
"""Bytes of one argument or variable: the kernel's limit."""
MAX_ITEMS = 1024
"""Arguments, or variables."""
LIMITS = ("memory_bytes", "cpu_seconds", "open_files", "processes")
GRACE, MAX_GRACE = 10.0, 3600.0
LOG_BYTES, MIN_LOG, MAX_LOG = 10 * 2**20, 4096, 2**30
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = "HOLDFAST_SANDBOX"


class BadSpec(ValueError):
    """Lists every mistake with its place."""

    def __init__(self, mistakes: list[str]) -> None:
        super().__init__("; ".join(mistakes))
        self.mistakes = mistakes


def parse(body: object) -> dict[str, Any]:
    """The spec with its defaults. Raises BadSpec with every mistake."""
    if not isinstance(body, dict):
        raise BadSpec(["the body must be an object"])
    mistakes = [f"{name}: no such field" for name in sorted(body.keys() - _FIELDS.keys())]
    spec: dict[str, Any] = {}
    for name, (check, default) in _FIELDS.items():
        value = body.get(name, default)
        mistakes += [f"{name}{problem}" for problem in check(value)]
        spec[name] = value
    if mistakes:
        raise BadSpec(mistakes)
    return spec


def _grace(value: object) -> list[str]:
    return _number(value, 0, MAX_GRACE)


def _argv(value: object) -> list[str]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_ITEMS:
        return [f": must be a list of 1 to {MAX_ITEMS} strings"]
    problems = [f"[{at}]: {problem}" for at, each in enumerate(value) if (problem := _text(each))]
    return problems or ([] if value[0] else ["[0]: must not be empty"])


def _env(value: object) -> list[str]:
    if not isinstance(value, dict) or len(value) > MAX_ITEMS:
        return [f": must be an object with at most {MAX_ITEMS} variables"]
    problems = []
    for name, content in value.items():
        if not _VARIABLE.fullmatch(name) or len(name) > 200:
            problems.append(f": {name[:50]!r} is no name for a variable")
        elif name.startswith(_RESERVED):
            problems.append(f".{name}: names with {_RESERVED} are the driver's")
        elif problem := _text(content):
            problems.append(f".{name}: {problem}")
    return problems


def _cwd(value: object) -> list[str]:
    if value is None:
        return []
    if problem := _text(value):
        return [f": {problem}"]
    return [] if str(value).startswith("/") and len(str(value)) < 4096 else [": must be an absolute path"]


def _limits(value: object) -> list[str]:
    if not isinstance(value, dict):
        return [": must be an object"]
    unknown = [f".{name}: no such limit; known are {', '.join(LIMITS)}" for name in sorted(value.keys() - {*LIMITS})]
    bad = [name for name in LIMITS if name in value and (type(value[name]) is not int or not 1 <= value[name] < 2**62)]
    return unknown + [f".{name}: must be a whole number from 1 on" for name in bad]


def _log_bytes(value: object) -> list[str]:
    return [] if type(value) is int and MIN_LOG <= value <= MAX_LOG else [f": must be {MIN_LOG} to {MAX_LOG}"]


def _owner(value: object) -> list[str]:
    is_valid = value is None or (isinstance(value, str) and 1 <= len(value) <= 200 and value.isprintable())
    return [] if is_valid else [": must be a text of 1 to 200 printable characters"]


def _number(value: object, minimum: float, maximum: float) -> list[str]:
    is_valid = isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value <= maximum
    return [] if is_valid else [f": must be a number from {minimum:g} to {maximum:g}"]


def _text(value: object) -> str | None:
    if not isinstance(value, str):
        return "must be a string"
    if "\0" in value:
        return "must not contain a NUL"
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        return "must be valid Unicode"
    return None if size <= MAX_TEXT else f"must not be longer than {MAX_TEXT} bytes"


_FIELDS: dict[str, tuple[Any, Any]] = {
    "argv": (_argv, None),
    "env": (_env, {}),
    "cwd": (_cwd, None),
    "limits": (_limits, {}),
    "grace": (_grace, GRACE),
    "log_bytes": (_log_bytes, LOG_BYTES),
    "owner": (_owner, None),
}


@dataclass
class Facts:
    """The content of a sandbox's folder."""

    spec: Mapping[str, Any]
    deleting: Mapping[str, Any] | None = None
    started: Mapping[str, Any] | None = None
    running: bool = False
    exit: Mapping[str, Any] | None = None
    trouble: str = ""
    """Why it has not been started yet."""
    damage: str = ""
    """What is wrong with its folder."""


def describe(facts: Facts) -> dict[str, Any]:
    """What clients see: the names of environment variables, and never their values."""
    spec, started, end = facts.spec, facts.started or {}, facts.exit or {}
    return {
        "id": spec["id"],
        "conditions": [_ready(facts), *_completed(facts)],
        "deleting": facts.deleting is not None,
        "details": {
            "run": spec["run"],
            "owner": spec.get("owner"),
            "argv": spec["argv"],
            "env": sorted(spec["env"]),
            "cwd": spec["cwd"],
            "limits": spec["limits"],
            "pid": started.get("pid"),
            "created_at": spec["created_at"],
            "started_at": started.get("started_at"),
            "finished_at": end.get("finished_at"),
            "exit_code": end.get("exit_code"),
            "signal": end.get("signal"),
        },
    }


def _ready(facts: Facts) -> dict[str, Any]:
    status: bool | None = False
    if facts.damage:
        reason, message = "Damaged", f"its folder is damaged: {facts.damage}"
    elif facts.exit is not None:
        reason, message = _ended(facts.exit)
    elif facts.running:
        status, reason, message = True, "Started", ""
    else:
        status, reason, message = None, "Delayed" if facts.trouble else "Starting", facts.trouble
    terminal = facts.exit is not None or bool(facts.damage)
    return {"type": "Ready", "status": status, "reason": reason, "message": message, "terminal": terminal}


def _completed(facts: Facts) -> list[dict[str, Any]]:
    """The condition of a sandbox whose program has returned 0."""
    end = facts.exit
    if end is None or facts.damage or end.get("lost") or end["problem"] or end["exit_code"] != 0:
        return []
    return [{"type": "Completed", "status": True, "reason": "Exited", "message": "exit code 0", "terminal": True}]


def _ended(end: Mapping[str, Any]) -> tuple[str, str]:
    if end.get("lost"):
        return "SupervisorLost", "its supervisor was killed, so it was ended; its exit code is unknown"
    if end["problem"]:
        return "SpawnFailed", end["problem"]
    if end["signal"] is None:
        return "Exited", f"exit code {end['exit_code']}"
    if end["signal"] == signal.SIGXCPU:
        return "CpuLimit", "it used all its cpu_seconds"
    return "Killed", f"ended by signal {end['signal']}" + (", as was asked for" if end["ended"] else "")
