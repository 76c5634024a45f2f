"""The lock: exclusive, and alive for as long as a database session is.

``handle`` and ``monitor`` are what users see; ``rows`` and ``file_lock`` lock a row and a file of theirs.
``pool`` decides and does no I/O. ``executor`` carries it out for threads, ``executor_async`` for an event loop.
``postgres`` and ``file_locks`` are one session each, by the protocol in ``wire``; ``file_queue`` is the queue between
processes where there is no server.
"""
