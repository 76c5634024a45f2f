"""C6: a connection that two processes use after a fork."""

import subprocess
import sys

from proof.bugs.implementation import Holdfast
from proof.bugs.testbed import Testbed

_LIMIT = 60.0
_PROGRAM = "proof.bugs.forked_process"


class ForkedClient(Holdfast):
    """The real implementation: a client that detects the fork."""

    shares = "client"


class ForkedConnection(Holdfast):
    """A plain connection: the two processes read each other's results."""

    shares = "connection"


def divided(testbed: Testbed) -> None:
    """A holds a lease and renews it. A process forks: its child acquires that lease, while its parent waits for the
    result of another acquire."""
    a = testbed.worker("a")
    grant = a.acquire("held", ttl=600.0)
    assert grant is not None, "it is free"
    shares = getattr(testbed.implementation, "shares", "client")
    testbed.admin.execute("select pg_advisory_lock(1)")
    command = [sys.executable, "-m", _PROGRAM, testbed.url, str(testbed.folder), shares]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        testbed.admin.execute("select pg_advisory_unlock(1)")
        assert process.wait(_LIMIT) == 0, "parent and child have ended"
    a.renew(grant)
    a.take_over(grant)
    a.release(grant)
