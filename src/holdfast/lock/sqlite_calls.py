"""The calls of locks on SQLite: names and ages of what the kernel locks. They are volatile, as the locks are."""

from __future__ import annotations

import json
import os

from holdfast.database.sqlite_calls import Rows, Run, call


def _known(run: Run, name: str) -> Rows:
    return run("lock_namespace.id", name=name)


@call(volatile=True, answer=_known)
def lock_namespace(run: Run, name: str) -> Rows:
    run("lock_namespace.insert", name=name)
    return run("lock_namespace.id", name=name)


@call(volatile=True)
def lock_note(
    run: Run, session: str, live: str, pid: int, application: str, is_first: bool, names: str, held: str, gone: str
) -> Rows:
    """``live``: the other sessions of this process."""
    if is_first:
        ended = [row["pid"] for row in run("lock_note.pids") if not os.path.isdir(f"/proc/{row['pid']}")]
        run("lock_note.ended", pids=json.dumps(ended))
        run("lock_note.stale", pid=pid, live=live)
    if names != "[]":
        run("lock_note.names", names=names)
        run("lock_note.forget")
    run("lock_note.gone", session=session, gone=gone)
    run("lock_note.held", session=session, pid=pid, application=application, held=held)
    return [{"done": True}]
