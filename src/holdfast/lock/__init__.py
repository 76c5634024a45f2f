"""Locks below both flavours: what carries out the decisions of ``lock.mux``, for threads and for an event loop.

``locks`` and ``locks_async`` are what a client has, with the same names; ``pump`` does what they have in common,
``shared_pump`` and ``asyncio_pump`` what they do not. ``postgres`` and ``file_locks`` are one session each, ``line``
keeps turns where there is no server that does.
"""
