"""The lock: exclusive, and alive for as long as a database session is.

``handle`` and ``monitor`` are what users see; ``rows`` and ``file_lock`` lock a row and a file of theirs.
``pool`` decides and does no I/O. ``executor`` carries it out for threads, ``executor_async`` for an event loop.
``postgres`` and ``file_locks`` are one session each, by the protocol ``LockWire`` of ``executor_async``.

    a timeout races the grant       the request leaves the queue, its key goes to the next one or is unlocked:
                                    ``Pool.give_up``; a caller that was sending leaves the answer to
                                    ``LoopExecutor.finish``
    who wakes a waiter              the event that decides its request puts it into ``Pool.wakes``, and its executor
                                    wakes it: ``_wake`` of a thread, ``AsyncExecutor._wake`` and ``_resume`` of a task
    when a session is closed        after two idle sweeps, at once if there are too many, or when it is lost: ``Pool``
    how many connections            at most ``kept + extra``: ``Pool``; to detect a pooler one or two more for a
                                    moment: ``pooler``; the number of a namespace comes through the client's calls
    what Ctrl-C does                ``executor``; in the middle of an event, ``LoopExecutor.repair``
"""

from holdfast.runtime.log import logger

log = logger("holdfast.lock")
