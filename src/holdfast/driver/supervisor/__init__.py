"""The process beside every sandbox: starts it once, keeps its log within bounds, ends it, and writes down how it ended.

It outlives the driver. Run by itself (`python -I -S supervisor/start.py FOLDER RUN`) on the standard library alone,
because there is one for each sandbox and it has to be small; what is here therefore imports what is here by relative
names, and nothing else of holdfast. The folder is all it shares with the driver:

    spec.json     what to run; written by the driver before the folder gets its name
    lock          locked by the supervisor for as long as it lives: the kernel's word, no pid can be mistaken for it
    orders        a FIFO from the driver: `end SECONDS`
    life          a FIFO to the driver: a byte when a file has changed, and its end when the supervisor is gone
    deleting      there from the moment that somebody asked for the sandbox to be deleted
    started.json  there before the program runs: whoever finds it never runs the program again
    running       there when it runs: the folder could be entered, the program found
    exit.json     there when nothing of the sandbox runs any more
    log.OFFSET    what it wrote, in pieces; the oldest go when there is too much

Everything the program starts is a descendant, and no descendant can leave: its supervisor is where the kernel puts
orphans (PR_SET_CHILD_SUBREAPER). A child that is not yet waited for keeps its pid, so that no signal of ours can hit
anybody else.
"""

from .process import main

__all__ = ["main"]
