"""The parent process of a sandbox's program: starts it once, bounds its log, ends it, and records its exit.

It outlives the driver. It runs as `python -I -S supervisor/start.py FOLDER RUN` on the standard library alone: there is
one for each sandbox, so it has to be small. This package therefore imports itself by relative names, and nothing else
of holdfast. The folder is all it shares with the driver; the program starts in `work/ID` beside `sandboxes`:

    spec.json     what to run; written by the driver before the folder gets its name
    lock          locked by the supervisor while it lives: the kernel releases it, so no reused pid can deceive
    orders        a FIFO from the driver: `end SECONDS`
    life          a FIFO to the driver: a byte when a file has changed, and end-of-file when the supervisor has died
    deleting      exists once the deletion of the sandbox was requested
    started.json  exists before the program runs: no supervisor runs the program again
    running       exists once the program runs: its directory was entered, and the program found
    exit.json     exists when no process of the sandbox runs any more
    log.OFFSET    the output, in pieces; the oldest are deleted when there is too much

All processes of the program are descendants of the supervisor, and none can leave: the kernel gives it their orphans
(PR_SET_CHILD_SUBREAPER). A child keeps its pid until it is waited for, so no signal can hit another process.
"""

from .process import main

__all__ = ["main"]
