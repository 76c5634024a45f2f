"""How a command ends: what it printed has arrived, or one line on stderr says why not; never a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import IO, Any, NoReturn

FAILED = 1
_UNWRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def carry_out(command: Callable[[], object]) -> NoReturn:
    """Call it and exit as it says. What the system refuses, be it to take its output, is exit code 1; a reader that has
    gone away, as `head` does, needs no word."""
    problem, code = None, None
    try:
        command()
    except SystemExit as end:
        code = end.code
    except OSError as error:
        problem, code = _told(error), FAILED
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed before we began
        try:
            stream.flush()
        except OSError as error:
            _forget(stream)
            problem, code = _told(error), FAILED
    if problem is not None:
        _say(problem)
    sys.exit(code)


def _told(error: OSError) -> str | None:
    """Of a stream, and of the working folder, the system does not say that it is meant."""
    if error.errno == errno.EPIPE:
        return None
    if error.filename is None and error.errno in _UNWRITTEN:
        return f"cannot write its output: {error.strerror}"
    if error.filename is None and error.errno == errno.ENOENT:
        return "the working folder is gone: go to one that exists"
    return str(error)


def _forget(stream: IO[Any]) -> None:
    """What is left in its buffer goes nowhere, or the interpreter would try again at its end, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _say(message: str) -> None:
    try:
        os.write(2, f"holdfast: {message}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        pass
