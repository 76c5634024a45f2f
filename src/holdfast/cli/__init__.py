"""The command line. It uses public names of holdfast only.

`holdfast run` may start a thousand times an hour from cron. Its usual form is therefore parsed without click, and it
imports only what it needs; ``tests/cli/test_run.py`` lists modules that it must not import. Every other command, and
every mistake, goes through click.

Exit codes: 0 success · 1 refused, lost or unreachable, or the output cannot be written · 2 wrong usage · 75 `run` did
not get the lease · otherwise `run` exits as its command does: 126 and 127 when it cannot be started, 128 + n when a
signal ended it.
"""

from __future__ import annotations

import gc
import os
import sys

FAILED, MISUSED, NOT_ACQUIRED = 1, 2, 75


def main() -> None:
    if "run" in sys.argv:
        gc.disable()  # imports create no garbage, and a collection takes milliseconds; `run` enables it again
        from holdfast.cli.run import run_under_lease
        from holdfast.cli.run_options import parse

        if (values := parse(sys.argv[1:])) is not None:
            sys.exit(run_under_lease(**values))
        gc.enable()
    if "_HOLDFAST_COMPLETE" in os.environ:
        import holdfast.cli.shells  # noqa: F401 - registers the shells
    from holdfast.cli.app import app
    from holdfast.cli.exit import run_and_exit

    run_and_exit(app)


def print_error(message: str) -> None:
    """One line on stderr. It never raises, not even when stderr is closed or cannot encode the message."""
    try:
        os.write(2, f"holdfast: {message}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        pass
