"""The lock: exclusive, and alive for as long as a database session is.

``handle``, ``grant`` and ``monitor`` are what users see; ``rows`` and ``file_lock`` lock a row and a file of theirs.
``mux`` decides, with ``claims``, ``sessions`` and ``tickets``, and does no I/O; the rest carries it out, for
threads and for an event loop.

``locks`` and ``locks_async`` are what a client has, with the same names; ``pump`` does what they have in common,
``shared_pump`` and ``asyncio_pump`` what they do not. ``postgres`` and ``file_locks`` are one session each, ``line``
keeps turns where there is no server that does.
"""
