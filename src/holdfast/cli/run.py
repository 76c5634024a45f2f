"""holdfast run: any command, under a lease. Imports little, for it starts often."""

from __future__ import annotations

import gc
import math
import os
import threading
from typing import Any

from holdfast.cli import group, settings
from holdfast.cli.group import clock
from holdfast.cli.signals import Bell, Interrupted, interrupt_waiting
from holdfast.cli.supervise import Command
from holdfast.cli.watcher import Watcher

FAILED, MISUSED, NOT_ACQUIRED = 1, 2, 75
_VALUED = {"--url": str, "--schema": str, "--ttl": float, "--timeout": float, "--holder": str, "--heartbeat": float}
GRACE = 0.5
"""Seconds between TERM and KILL, or a twentieth of a shorter TTL: half of what is left of it when trust in the lease
ends."""
REPORTS = 8
"""The watcher is told anew after this fraction of the time for which the lease can be trusted."""
_GOODBYE = 3.0
"""Seconds in which the database must have taken the lease back."""
_UNSETTLED = 2.0
"""Seconds to ask again while the database says neither that the lease is ours nor whose it is."""
_UNWATCHED = "its watcher is gone: what the command has started runs on if holdfast is killed"
_UNWATCHED_GUARDED = "its watcher is gone, so the command is ended"
_FLAGS = ("--wait", "--skip", "--guard", "--strict", "--wipe-on-start")
_GUARDED = ("heartbeat", "strict", "wipe_on_start")


def plain(arguments: list[str]) -> dict[str, Any] | None:
    """`[--url U] run [options] NAME -- COMMAND…`, understood; None for anything else, which is click's to explain."""
    found: dict[str, Any] = {}
    words: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            break
        if argument in _FLAGS:
            found[argument[2:].replace("-", "_")] = True
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
    if len(words) != 2 or words[0] != "run" or not argv or exclusive(**found):
        return None
    return {"name": words[1], "argv": argv, **found}


def exclusive(**given: Any) -> str | None:
    """What was given together and contradicts each other, or alone and makes no sense."""
    if (given.get("timeout") is not None) + bool(given.get("wait")) + bool(given.get("skip")) > 1:
        return "--timeout, --wait and --skip exclude each other"
    if not given.get("guard") and any(given.get(each) not in (None, False) for each in _GUARDED):
        return "--heartbeat, --strict and --wipe-on-start are for --guard"
    if given.get("guard") and given.get("holder") is not None:
        return "--guard and --holder exclude each other: a second instance would take over while the first still runs"
    return None


def run_here(
    *, name: str, argv: list[str], url: str | None = None, schema: str | None = None, ttl: float = 30.0,
    timeout: float | None = None, wait: bool = False, skip: bool = False, guard: bool = False,
    holder: str | None = None, heartbeat: float | None = None, strict: bool = False, wipe_on_start: bool = False,
) -> int:  # fmt: skip
    """Run it and give its exit code. A user's mistake is one line on stderr."""
    from holdfast import HoldfastError
    from holdfast.runtime import log

    _fill_standard_descriptors()
    log.silent = True
    patience = None if wait else timeout or 0.0
    try:
        interrupt_waiting()
        terms = {"ttl": ttl, "timeout": patience, "holder": holder, "renew_every": heartbeat, "strict": strict}
        _check_heartbeat(ttl, heartbeat)
        return _run(*settings.database(url, schema), name, argv, terms, skip, guard, wipe_on_start)
    except (HoldfastError, OSError) as error:
        _say(str(error))
        return FAILED
    except ValueError as error:
        _say(str(error))
        return MISUSED
    except Interrupted as signal:
        return 128 + signal.number


def _check_heartbeat(ttl: float, heartbeat: float | None) -> None:
    """As the guard in Python asks for."""
    if heartbeat is not None and not heartbeat >= 0.001:
        raise ValueError(f"heartbeat must be 0.001 seconds or more, not {heartbeat:g}")
    if heartbeat is not None and ttl < 2 * heartbeat:
        raise ValueError(
            f"ttl must be clearly above heartbeat, twice at least: ttl={ttl:g} and heartbeat={heartbeat:g} leave no "
            "room to try again"
        )


def _run(
    url: str, schema: str, name: str, argv: list[str], terms: dict[str, Any], skip: bool, guard: bool, wipe: bool
) -> int:
    """The two forks come first, before a client brings threads."""
    ttl = terms["ttl"]
    grace = min(ttl * 0.05, GRACE)
    watcher = Watcher(grace)
    command: Command | None = None
    try:
        command = Command(argv)
        from holdfast import Client, HoldfastError, NotAcquired

        news = threading.Event()
        with Client(url, schema=schema) as client:
            gc.enable()
            lease = client.lease(name, on_lost=lambda _: news.set(), **terms)
            try:
                grant = _acquired(lease)
            except NotAcquired as refusal:
                if skip:  # cron mails whatever is said
                    return 0
                _say(str(refusal))
                return NOT_ACQUIRED
            if wipe:
                client.leases.wipe(grant)
            bell = Bell(guard=guard)
            running, command = command, None
            code = _supervise(running, watcher, grant, news, grace, bell, guard, _environment(url, schema, grant))
            try:
                grant.check()
            except HoldfastError as loss:
                why = f" ({loss.__cause__})" if loss.__cause__ is not None else ""
                _say(f"{loss}{why}; so the command was ended")
                return code or FAILED
            try:
                grant.release(timeout=_GOODBYE)
            except HoldfastError as error:
                _say(f"lease {name!r} is not released, and expires within {ttl:g} s: {error}")
                watcher.close()
                os._exit(code)  # whatever else is to be said at the end, the database would not hear it either
            return code
    finally:
        if command is not None:
            command.forget()
        watcher.close()


def _acquired(lease: Any) -> Any:
    """A row that is just being cleared away, as a dead holder's, is nobody's lease: it is asked for again."""
    from holdfast import NotAcquired

    until = clock() + _UNSETTLED
    while True:
        try:
            return lease.acquire()
        except NotAcquired as refusal:
            if refusal.holder is not None or isinstance(refusal, TimeoutError) or clock() > until:
                raise


def _supervise(
    command: Command, watcher: Watcher, grant: Any, news: threading.Event, grace: float, bell: Bell, guard: bool,
    environment: dict[bytes, bytes],
) -> int:  # fmt: skip
    """Run the command, and come back when nothing of it runs any more."""
    over = unwatched = False

    def report() -> None:
        """Tell the watcher how long the lease can be trusted, for as long as it can; more often as that comes to its
        end, so that a heartbeat which succeeds late is not missed."""
        while not over and not grant.lost:
            trust()
            if unwatched and guard:
                break
            news.wait(max(0.005, grant.remaining() / REPORTS))
        if over:
            return
        if not watcher.say("lost"):
            group.end(command.pid, clock() + grace)
        elif not ended.wait(grace):  # it is alive, but is it awake?
            group.end(command.pid, 0.0)

    def trust() -> None:
        nonlocal unwatched
        until = clock() + grant.remaining()
        if not watcher.say(f"until {until}") and not unwatched:
            unwatched = True
            _say(_UNWATCHED_GUARDED if guard else _UNWATCHED)
        if guard:
            kill_at(until + 1.8 * grace)  # after TERM and KILL, and before the TTL ends
            if over:  # and the timer stopped, in the main thread
                kill_at(math.inf)

    if guard:
        from holdfast.runtime.kill_timer import KillTimer

        kill_at = KillTimer().ends_at
    ended = threading.Event()
    watcher.say(f"group {command.pid}")
    trust()
    threading.Thread(target=report, name="holdfast-report", daemon=True).start()
    try:
        command.start(environment)
        code = command.wait(bell)
        return code or FAILED if unwatched and guard else code
    finally:
        command.end_group(grace, lambda: bool(grant.lost))
        over = True
        ended.set()
        news.set()
        if guard:
            kill_at(math.inf)


def _environment(url: str, schema: str, grant: Any) -> dict[bytes, bytes]:
    added = {
        "HOLDFAST_URL": settings.from_anywhere(url),
        "HOLDFAST_SCHEMA": schema,
        "HOLDFAST_LEASE": grant.name,
        "HOLDFAST_TOKEN": grant.token,
        "HOLDFAST_FENCE": str(grant.fence),
    }
    return {**_own_environment(), **{os.fsencode(name): os.fsencode(value) for name, value in added.items()}}


def _own_environment() -> dict[bytes, bytes]:
    """Ours as we were given it: in the C locale Python sets LC_CTYPE for itself, and the command is not to have it."""
    ours, name = dict(os.environb), b"LC_CTYPE"
    if name in ours:
        try:
            with open("/proc/self/environ", "rb") as file:
                given = dict(each.partition(b"=")[::2] for each in file.read().split(b"\0"))
        except OSError:
            return ours
        if name not in given:
            del ours[name]
        else:
            ours[name] = given[name]
    return ours


def _fill_standard_descriptors() -> None:
    """No file of ours may get the number of a standard one that is closed. The command finds it closed, as we did."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _say(message: str) -> None:
    try:
        os.write(2, f"holdfast: {message}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        pass
