"""The command line, over the public door alone.

`holdfast run` may start a thousand times an hour from cron, so its plain form is read here without click, and nothing
is imported that it does not need; every other command, and every mistake, goes through click.

Exit codes: 0 done · 1 refused, lost or unreachable, or its output cannot be written · 2 called wrongly · 75 `run` did
not get the lease · otherwise `run` passes on its command's own: 126 and 127 when it cannot be started, 128 + n when a
signal ended it.
"""

from __future__ import annotations

import gc
import sys


def main() -> None:
    if "run" in sys.argv:
        gc.disable()  # nothing of what is imported is garbage; `run` turns it on again
        from holdfast.cli.run import plain, run_here

        if (wanted := plain(sys.argv[1:])) is not None:
            sys.exit(run_here(**wanted))
        gc.enable()
    from holdfast.cli.app import app
    from holdfast.cli.ending import carry_out

    carry_out(app)
