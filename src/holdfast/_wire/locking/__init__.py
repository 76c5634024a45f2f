"""Locks below both flavours: what carries out the decisions of ``core.mux``, for threads and for an event loop.

``locks`` and ``aio_locks`` are what a client has, with the same names; ``pump`` does what they have in common,
``shared_pump`` and ``aio_pump`` what they do not. ``postgres`` and ``kernel`` are one session each, ``line`` keeps
turns where there is no server that does.
"""
