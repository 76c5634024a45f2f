"""Files of settings for agents, in one folder. A change is merged into the current file under the file's lock.

The second writer waits, reads what the first one wrote, and merges into that. The file is replaced atomically: an agent
that reads it without the lock sees the old file or the new one.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import holdfast
from holdfast.problem_json import Problem

MAX_BYTES = 1 << 20
NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$"


def find_file(folder: str | None, name: str) -> Path:
    """The path of ``name``, which has no dot and no slash. Raises Problem 404 for a link out of the folder."""
    if folder is None:
        raise Problem(404, "this replica edits no settings of agents: set agent_config")
    home = Path(folder).resolve()
    file = home / f"{name}.json"
    try:
        is_inside = re.match(NAME, name) and _resolve(file).is_relative_to(home)
    except OSError:  # a link to itself
        is_inside = False
    if not is_inside:
        raise Problem(404, f"{name!r} is not in the folder of settings")
    return file


def _resolve(file: Path) -> Path:
    """The target of links. Raises OSError for a loop of links, which ``resolve`` alone does in some Pythons only."""
    with suppress(FileNotFoundError):
        file.stat()
    return file.resolve()


def read(file: Path) -> dict[str, Any]:
    """Raises Problem 404 when there is no file, and 409 when it is not a JSON object."""
    try:
        return _parse(file, file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Problem(404, f"there are no settings {file.stem!r}") from None
    except (UnicodeDecodeError, OSError):
        raise _unreadable(file) from None


async def edit(file: Path, patch: dict[str, Any]) -> dict[str, Any]:
    """Apply a JSON merge patch (RFC 7396) and return the result: null removes, objects merge, the rest replaces.

    Raises Problem 404, 409, 413, or 503 when the lock is not acquired in time.
    """
    if not file.parent.is_dir():
        raise Problem(404, "the folder agent_config does not exist: create it")
    try:
        async with holdfast.file_lock(file) as grant:
            try:
                before = _parse(file, grant.read_text(default="{}"))
            except (UnicodeDecodeError, OSError):
                raise _unreadable(file) from None
            after = merge(before, patch)
            text = json.dumps(after, indent=2, allow_nan=False)  # ValueError before anything is written
            if len(text) > MAX_BYTES:
                raise Problem(
                    413, f"settings {file.stem!r} would have {len(text)} bytes; at most {MAX_BYTES} are allowed"
                )
            grant.write_text(f"{text}\n")
            return after
    except IsADirectoryError:
        raise _unreadable(file) from None
    except holdfast.AcquireTimeout as error:
        raise Problem(503, f"settings {file.stem!r} are busy; ask again", headers={"Retry-After": "1"}) from error


def merge(before: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    after = dict(before)
    for name, value in patch.items():
        if value is None:
            after.pop(name, None)
        elif isinstance(value, dict):
            inner = after.get(name)
            after[name] = merge(inner if isinstance(inner, dict) else {}, value)
        else:
            after[name] = value
    return after


def _parse(file: Path, text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise _unreadable(file) from None
    if not isinstance(settings, dict):
        raise _unreadable(file)
    return settings


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _unreadable(file: Path) -> Problem:
    return Problem(
        409, f"{file.name} is not a readable file with a JSON object: repair it by hand; nothing was written"
    )
