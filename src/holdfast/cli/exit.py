"""How a command exits: its output is written, or one line on stderr says why not; never a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import IO, Any, NoReturn

from holdfast.cli import FAILED, print_error

_WRITE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def run_and_exit(command: Callable[[], object]) -> NoReturn:
    """Call it and exit with its exit code. An error of the operating system, also when the output is flushed, is exit
    code 1 and one line on stderr; a reader that closed the pipe, such as `head`, is exit code 1 without a line."""
    message, code = None, None
    try:
        command()
    except SystemExit as error:
        code = error.code
    except OSError as error:
        message, code = _describe(error), FAILED
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed before Python started
        try:
            stream.flush()
        except OSError as error:
            _discard_buffer(stream)
            message, code = _describe(error), FAILED
    if message is not None:
        print_error(message)
    sys.exit(code)


def _describe(error: OSError) -> str | None:
    """A message, or None for a closed pipe. Errors of streams and of the working folder carry no file name."""
    if error.errno == errno.EPIPE:
        return None
    if error.filename is None and error.errno in _WRITE_ERRORS:
        return f"cannot write the output: {error.strerror}"
    if error.filename is None and error.errno == errno.ENOENT:
        return "the working folder was removed: change to one that exists"
    return str(error)


def _discard_buffer(stream: IO[Any]) -> None:
    """Redirect the stream to /dev/null: the interpreter would flush it again at its exit, and print the error."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
