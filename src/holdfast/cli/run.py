"""holdfast run: any command, under a lease. Imports little, for it starts often."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from holdfast.cli import settings
from holdfast.cli.supervise import Command, Watcher, clock

NOT_ACQUIRED = 75
_VALUED = {"--url": str, "--schema": str, "--ttl": float, "--timeout": float, "--holder": str}


def plain(arguments: list[str]) -> dict[str, Any] | None:
    """`[--url U] run [options] NAME -- COMMAND…`, understood; None for anything else, which is click's to explain."""
    found: dict[str, Any] = {"url": None, "schema": None, "ttl": 30.0, "timeout": 0.0, "skip": False, "holder": None}
    words: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            break
        if argument == "--skip":
            found["skip"] = True
        elif argument in _VALUED:
            try:
                found[argument[2:]] = _VALUED[argument](next(rest))
            except (StopIteration, ValueError):
                return None
        elif argument.startswith("-"):
            return None
        else:
            words.append(argument)
    argv = list(rest)
    if len(words) != 2 or words[0] != "run" or not argv or (found["skip"] and found["timeout"]):
        return None
    return {**found, "name": words[1], "argv": argv}


def run_here(
    *, url: str | None, schema: str | None, name: str, argv: list[str], ttl: float, timeout: float | None,
    skip: bool, holder: str | None,
) -> int:  # fmt: skip
    """Run it and give its exit code. A user's mistake is one line on stderr."""
    from holdfast import HoldfastError

    try:
        return _run(*settings.database(url, schema), name, argv, ttl, timeout, skip, holder)
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    except (ValueError, TypeError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 2


def _run(
    url: str, schema: str, name: str, argv: list[str], ttl: float, timeout: float | None, skip: bool, holder: str | None
) -> int:
    """The two forks come first, before a client brings threads."""
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


def _environment(url: str, schema: str, grant: Any) -> dict[str, str]:
    return {
        **os.environ,
        "HOLDFAST_URL": url,
        "HOLDFAST_SCHEMA": schema,
        "HOLDFAST_LEASE": grant.name,
        "HOLDFAST_TOKEN": grant.token,
        "HOLDFAST_FENCE": str(grant.fence),
    }


def _supervise(command: Command, watcher: Watcher, grant: Any, grace: float, environment: dict[str, str]) -> int:
    over = threading.Event()

    def report() -> None:
        """Tell the watcher how long the lease can be trusted, for as long as it can."""
        every = max(0.01, grant.remaining() / 10)
        while not over.is_set() and not grant.lost:
            watcher.say(f"until {clock() + grant.remaining()}")
            over.wait(every)

    watcher.say(f"group {command.pid}")
    threading.Thread(target=report, name="holdfast-report", daemon=True).start()
    command.start(environment)
    try:
        return command.wait()
    finally:
        command.end_group(grace)
        over.set()
        if grant.lost:
            print(f"holdfast: lease {grant.name!r} was lost, so the command was ended", file=sys.stderr)
