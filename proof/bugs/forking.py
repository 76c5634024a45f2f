"""What becomes of a connection when its process divides."""

import subprocess
import sys

from proof.bugs.implementation import Holdfast
from proof.bugs.stage import Stage

_PATIENCE = 60.0
_PROGRAM = "proof.bugs.forked"


class ForkedClient(Holdfast):
    """The real implementation: a client that knows that it was forked."""

    shares = "client"


class ForkedConnection(Holdfast):
    """A connection that does not: its two owners read each other's answers."""

    shares = "connection"


def divided(stage: Stage) -> None:
    """A holds a lease, and goes on renewing it. A process divides: its child asks for that very lease, while its parent
    waits for the answer to another question."""
    a = stage.worker("a")
    grant = a.acquire("held")
    assert grant is not None, "nobody has it"
    shares = getattr(stage.implementation, "shares", "client")
    stage.director.execute("select pg_advisory_lock(1)")
    command = [sys.executable, "-m", _PROGRAM, stage.url, str(stage.folder), shares]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stage.director.execute("select pg_advisory_unlock(1)")
        assert process.wait(_PATIENCE) == 0, "both halves have come to their end"
    a.renew(grant)
    a.take_over(grant)
    a.release(grant)
