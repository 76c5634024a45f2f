"""The calls of locks on SQLite: the names of what the kernel locks. They are volatile, as the locks are."""

from __future__ import annotations

from holdfast.database.sqlite_calls import Rows, Run, call, changes


def _known(run: Run, name: str) -> Rows:
    return run("lock_namespace.id", name=name)


@call(volatile=True, answer=_known)
def lock_namespace(run: Run, name: str) -> Rows:
    run("lock_namespace.insert", name=name)
    return run("lock_namespace.id", name=name)


@call(volatile=True)
def lock_remember(run: Run, names: str) -> Rows:
    run("lock_remember.names", names=names)
    run("lock_remember.forget")
    return [{"written": changes(run)}]
