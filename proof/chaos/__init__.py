"""Leases under fire: processes that contend for a few of them while everything around them fails, and what came of it.

``python -m proof.chaos --minutes 5`` plays every lane, checks what was written down, and leaves a report.
A lane is one place (a pair of servers, a server whose clock steps behind a pooler, a file), its contenders, and the
faults that befall both. The history of a lane stays in its folder: ``python -m holdfast.testing.checker FOLDER``.
"""
