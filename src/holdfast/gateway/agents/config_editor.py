"""Settings of agents in files, one folder: a change is merged into what the file says now, under the file's lock.

The second writer waits, reads what the first one wrote, and merges into that. The file is replaced whole, so whoever
reads it without the lock, an agent say, sees the old one or the new one.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import holdfast
from holdfast.gateway.problem import Problem

MOST = 1 << 20
NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$"


def file_of(folder: str | None, name: str) -> Path:
    """``name`` has no dot and no slash; a link in the folder that leads out of it is refused."""
    if folder is None:
        raise Problem(404, "no folder of settings is edited here: set agent_config")
    home = Path(folder).resolve()
    file = home / f"{name}.json"
    try:
        inside = re.match(NAME, name) and _led_to(file).is_relative_to(home)
    except OSError:  # a link that leads to itself
        inside = False
    if not inside:
        raise Problem(404, f"{name!r} is not in the folder of settings")
    return file


def _led_to(file: Path) -> Path:
    """Where links lead; OSError when they lead in a circle, which resolve() does not tell in every Python."""
    with suppress(FileNotFoundError):
        file.stat()
    return file.resolve()


def read(file: Path) -> dict[str, Any]:
    try:
        return _parsed(file, file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Problem(404, f"there are no settings {file.stem!r}") from None
    except (UnicodeDecodeError, OSError):
        raise _broken(file) from None


async def edit(file: Path, patch: dict[str, Any]) -> dict[str, Any]:
    """JSON merge patch (RFC 7396): objects are merged, null takes away, everything else replaces."""
    if not file.parent.is_dir():
        raise Problem(404, "the folder of settings is not there: make it")
    try:
        async with holdfast.file_lock(file) as grant:
            try:
                before = _parsed(file, grant.read_text(default="{}"))
            except (UnicodeDecodeError, OSError):
                raise _broken(file) from None
            after = merged(before, patch)
            text = json.dumps(after, indent=2, allow_nan=False)  # ValueError before anything is written
            if len(text) > MOST:
                raise Problem(413, f"settings {file.stem!r} would have {len(text)} bytes; at most {MOST} are kept")
            grant.write_text(f"{text}\n")
            return after
    except IsADirectoryError:
        raise _broken(file) from None
    except holdfast.AcquireTimeout as error:
        raise Problem(503, f"settings {file.stem!r} are busy; ask again", headers={"Retry-After": "1"}) from error


def merged(before: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    after = dict(before)
    for name, value in patch.items():
        if value is None:
            after.pop(name, None)
        elif isinstance(value, dict):
            inner = after.get(name)
            after[name] = merged(inner if isinstance(inner, dict) else {}, value)
        else:
            after[name] = value
    return after


def _parsed(file: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise _broken(file) from None
    if not isinstance(found, dict):
        raise _broken(file)
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _broken(file: Path) -> Problem:
    return Problem(
        409, f"{file.name} is not a file that can be read, with a JSON object: mend it by hand, nothing was written"
    )
