"""A fork that comes while a session or a lock file is being opened: it is nobody's then but the parent's."""

from __future__ import annotations

import os

import pytest

import holdfast
from tests.children import PATIENCE, Child

_FORK = """
client = holdfast.Client(sys.argv[1])
acquiring = threading.Thread(target=lambda: client.lock("a").acquire())
acquiring.start()
begun.wait(60)
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
forked.set()
acquiring.join()
print("held beside", child)
sys.stdin.read()
"""

_FORK_WHILE_CONNECTING = """
import os, select, sys, threading, time, holdfast
from types import SimpleNamespace
from psycopg import pq
from holdfast.database import postgres
begun, forked = threading.Event(), threading.Event()
def poll():
    begun.set()
    forked.wait(60)
    return select.poll()
def connect_start(conninfo):
    made = pq.PGconn.connect_start(conninfo)
    begun.set()
    time.sleep(0.3)  # a fork comes in between, or waits for the end
    return made
if sys.argv[2] == "begun":
    postgres.pq = SimpleNamespace(**{**vars(pq), "PGconn": SimpleNamespace(connect_start=connect_start)})
else:
    postgres.select = SimpleNamespace(POLLIN=select.POLLIN, POLLOUT=select.POLLOUT, poll=poll)
"""


@pytest.mark.parametrize("stage", ["begun", "under way"])
def test_a_session_that_was_being_opened_during_a_fork_ends_with_the_parent(postgres_url: str, stage: str) -> None:
    """The child has its socket, too, and the server would see no end."""
    with Child(_FORK_WHILE_CONNECTING + _FORK, postgres_url, stage) as parent, holdfast.Client(postgres_url) as other:
        child = int(parent.line().removeprefix("held beside "))
        parent.kill()
        other.lock("a").acquire(timeout=PATIENCE).release()
        os.kill(child, 0)  # it lives


_FORK_WHILE_OPENING = """
import os, sys, threading, time, holdfast
from holdfast.lock import file_locks as kernel
begun, forked, original = threading.Event(), threading.Event(), kernel.open_side_file
def slow(*arguments):
    descriptor = original(*arguments)
    begun.set()
    time.sleep(0.3)  # a fork comes in between, or waits for the end
    return descriptor
kernel.open_side_file = slow
"""


def test_a_lock_file_that_was_being_opened_during_a_fork_is_freed_with_the_parent(sqlite_url: str) -> None:
    with Child(_FORK_WHILE_OPENING + _FORK, sqlite_url) as parent, holdfast.Client(sqlite_url) as other:
        child = int(parent.line().removeprefix("held beside "))
        parent.kill()
        other.lock("a").acquire(timeout=PATIENCE).release()
        os.kill(child, 0)  # it lives
