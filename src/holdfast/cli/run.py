"""holdfast run: any command, under a lease."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from holdfast.cli.supervise import Command, Watcher, clock

if TYPE_CHECKING:
    from holdfast._sync.primitives.grant import LeaseGrant

NOT_ACQUIRED = 75


def run(
    url: str, schema: str, name: str, argv: list[str], *, ttl: float, timeout: float | None, skip: bool, holder: str | None
) -> int:
    """The exit code. The two forks come first, before a client brings threads."""
    grace = min(ttl * 0.1, 1.0) / 2
    watcher = Watcher(grace)
    command = Command(argv)
    started = False
    try:
        from holdfast import Client, NotAcquired

        with Client(url, schema=schema) as client:
            lease = client.lease(name, ttl=ttl, timeout=timeout, holder=holder, on_lost=lambda _: watcher.say("lost"))
            try:
                grant = lease.acquire()
            except NotAcquired as refusal:
                print(f"holdfast: {refusal}", file=sys.stderr)
                return 0 if skip else NOT_ACQUIRED
            with grant:
                started = True
                return _supervise(command, watcher, grant, grace, _environment(url, schema, grant))
    finally:
        if not started:
            command.forget()
        watcher.close()


def _environment(url: str, schema: str, grant: LeaseGrant) -> dict[str, str]:
    ours = {
        "HOLDFAST_URL": url,
        "HOLDFAST_SCHEMA": schema,
        "HOLDFAST_LEASE": grant.name,
        "HOLDFAST_TOKEN": grant.token,
        "HOLDFAST_FENCE": str(grant.fence),
    }
    return {**os.environ, **ours}


def _supervise(command: Command, watcher: Watcher, grant: LeaseGrant, grace: float, environment: dict[str, str]) -> int:
    watcher.say(f"group {command.pid}")
    over = threading.Event()

    def report() -> None:
        """Tell the watcher how long the lease can be trusted, for as long as it can."""
        every = max(0.01, grant.remaining() / 10)
        while not over.is_set() and not grant.lost:
            watcher.say(f"until {clock() + grant.remaining()}")
            over.wait(every)

    threading.Thread(target=report, name="holdfast-report", daemon=True).start()
    command.start(environment)
    try:
        return command.wait()
    finally:
        command.end_group(grace)
        over.set()
        if grant.lost:
            print(f"holdfast: lease {grant.name!r} was lost, so the command was ended", file=sys.stderr)
