"""`holdfast run`: run a command while holding a lease.

    holdfast ─┬─ watchdog    ends the child's group if holdfast dies or stops, and releases the lease if it dies
              └─ child       waits; becomes the command once the lease is held

Both are forked before the client starts threads. While the command runs, the main thread waits for it and passes
signals on; a second thread reports to the watchdog, and with --guard to the kernel's timer, how long the lease can be
trusted; the client's own thread renews the lease. The order when the lease is lost:

    trust ends ──▶ TERM ──▶ KILL, ``grace`` later ──▶ with --guard, the kernel kills holdfast ──▶ the TTL ends

It imports little, because it starts often: no click, no asyncio, no logging.
"""

from __future__ import annotations

import gc
import math
import os
import threading
from collections.abc import Mapping
from typing import Any

from holdfast.cli import FAILED, MISUSED, NOT_ACQUIRED, print_error, process_group, settings
from holdfast.cli.child import Child
from holdfast.cli.process_group import clock
from holdfast.cli.signals import RunInterrupted, SignalPipe, raise_on_signal
from holdfast.cli.watchdog import Watchdog

GRACE = 0.5
"""Seconds between TERM and KILL; a twentieth of the TTL if that is shorter. It is half of the time between the end of
trust in the lease and the end of the TTL."""
REPORTS = 8
"""Trust is reported again after this fraction of the time that is left of it."""
_TIMER_GRACES = 1.8
"""The kernel's timer is set to so many times ``grace`` after the end of trust: after KILL, and before the TTL ends."""
_RELEASE_TIMEOUT = 2.0
_END_TIMEOUT = 2.3
"""Seconds after the end of the command's group in which holdfast exits, whatever the database does."""
_UNSETTLED_TIMEOUT = 2.0
"""Seconds to retry an acquire that is refused without a holder."""
_NO_WATCHDOG = "the watchdog died: if holdfast is killed now, the command keeps running"
_NO_WATCHDOG_GUARDED = "the watchdog died: ending the command"


def run_under_lease(
    *, name: str, argv: list[str], url: str | None, schema: str | None, ttl: float, timeout: float | None, wait: bool,
    skip: bool, guard: bool, holder: str | None, at_least: float, failover: str, renew_every: float | None,
    strict: bool, wipe_on_start: bool,
) -> int:  # fmt: skip
    """Run ``argv`` under the lease ``name`` and return the exit code. A mistake of the user is one line on stderr.
    The other arguments are those of ``run_options.OPTIONS``."""
    from holdfast import HoldfastError
    from holdfast.runtime import log

    _open_standard_descriptors()
    log.silent = True
    terms = {
        "ttl": ttl,
        "timeout": None if wait else timeout or 0.0,
        "holder": holder,
        "reenter": None if holder is None else os.environ.get("HOLDFAST_REENTER"),
        "at_least": at_least,
        "failover": failover,
        "renew_every": renew_every,
        "strict": strict,
    }
    try:
        raise_on_signal()
        _check_renew_every(ttl, renew_every)
        return _run(*settings.database(url, schema, creates=True), name, argv, terms, skip, guard, wipe_on_start)
    except (HoldfastError, OSError) as error:
        print_error(str(error))
        return FAILED
    except ValueError as error:
        print_error(str(error))
        return MISUSED
    except RunInterrupted as interrupt:
        return 128 + interrupt.number


def _check_renew_every(ttl: float, renew_every: float | None) -> None:
    """Raises ValueError as ``client.guard`` does."""
    if renew_every is not None and not renew_every >= 0.001:
        raise ValueError(f"--renew-every must be 0.001 seconds or more, not {renew_every:g}")
    if renew_every is not None and renew_every > ttl / 2:
        raise ValueError(
            f"--renew-every must be at most half of --ttl {ttl:g}, not {renew_every:g}: there must be time for a retry"
        )


def _run(
    url: str, schema: str, name: str, argv: list[str], terms: dict[str, Any], skip: bool, guard: bool, wipe: bool
) -> int:
    ttl = terms["ttl"]
    grace = min(ttl * 0.05, GRACE)
    watchdog = Watchdog(grace, url, schema)
    waiting_child: Child | None = None
    exit_timer: threading.Timer | None = None
    try:
        child = waiting_child = Child(argv)
        from holdfast import Client, HoldfastError, NotAcquired  # after the forks, which come before any thread

        lease_lost = threading.Event()
        with Client(url, schema=schema) as client:
            gc.enable()
            handle = client._guard_lease if guard else client.lease
            lease = handle(name, on_lost=lambda _: lease_lost.set(), **terms)
            try:
                grant = _acquire(lease)
            except NotAcquired as refusal:
                if skip:  # no output either: cron would mail it
                    return 0
                print_error(str(refusal))
                return NOT_ACQUIRED
            if wipe:
                client.leases.wipe(grant)
            watchdog.send(f"lease {grant.token} {grant.name}")
            signals = SignalPipe(guard=guard)
            leased_run = _LeasedRun(child, watchdog, grant, lease_lost, grace, guard=guard)
            environment = _environment(url, schema, grant)
            waiting_child = None
            code = leased_run.run(signals, environment)
            exit_timer = _start_exit_timer(watchdog, code or FAILED if grant.lost else code)
            try:
                grant.check()
            except HoldfastError as loss:
                cause = f" ({loss.__cause__})" if loss.__cause__ is not None else ""
                print_error(f"{loss}{cause}; the command was ended")
                return code or FAILED
            try:
                grant.release(timeout=_RELEASE_TIMEOUT)
            except HoldfastError as error:
                print_error(f"lease {name!r} could not be released and expires within {ttl:g} s: {error}")
                watchdog.close()
                os._exit(code)  # closing the client would wait for the same database
            return code
    finally:
        if waiting_child is not None:
            waiting_child.discard()
        if exit_timer is not None:
            exit_timer.cancel()
        watchdog.close()


def _acquire(lease: Any) -> Any:
    """The grant. Raises NotAcquired.

    A refusal without a holder is retried: another process is removing the row of a dead holder at this moment. Each
    ``acquire`` waits a little before it refuses, so the loop needs no pause. AcquireTimeout, a TimeoutError, is final.
    """
    from holdfast import NotAcquired

    deadline = clock() + _UNSETTLED_TIMEOUT
    while True:
        try:
            return lease.acquire()
        except NotAcquired as refusal:
            if refusal.holder is not None or isinstance(refusal, TimeoutError) or clock() > deadline:
                raise


def _start_exit_timer(watchdog: Watchdog, code: int) -> threading.Timer:
    """The command has ended: exit with ``code`` when the database takes too long to close the client."""

    def exit_now() -> None:
        watchdog.close()
        os._exit(code)

    timer = threading.Timer(_END_TIMEOUT, exit_now)
    timer.daemon = True
    timer.start()
    return timer


class _LeasedRun:
    """Runs the child for as long as the lease can be trusted."""

    def __init__(
        self, child: Child, watchdog: Watchdog, grant: Any, lease_lost: threading.Event, grace: float, *, guard: bool
    ) -> None:
        self._child, self._watchdog, self._grant, self._grace = child, watchdog, grant, grace
        self._wake = lease_lost
        """Wakes the reporting thread: the lease was lost, or the child has ended."""
        self._has_ended = threading.Event()
        self._has_lost_watchdog = False
        self._set_timer: Any = None
        if guard:
            from holdfast.runtime.kill_timer import KillTimer

            self._set_timer = KillTimer().ends_at

    def run(self, signals: SignalPipe, environment: Mapping[bytes, bytes]) -> int:
        """Start the child. Returns its exit code when no process of its group runs any more."""
        self._watchdog.send(f"group {self._child.pid}")
        self._report_trust()
        reports = threading.Thread(target=self._report_until_lost, name="holdfast-report", daemon=True)
        reports.start()
        try:
            self._child.start(environment)
            code = self._child.wait(signals)
            return (code or FAILED) if self._must_end() else code
        finally:
            self._child.end_group(self._grace, lambda: bool(self._grant.lost))
            self._has_ended.set()
            self._wake.set()
            reports.join()  # the caller closes the watchdog's pipe, whose descriptor may then be another file's
            if self._set_timer is not None:
                self._set_timer(math.inf)

    def _must_end(self) -> bool:
        """With --guard the command does not run without a watchdog."""
        return self._has_lost_watchdog and self._set_timer is not None

    def _report_until_lost(self) -> None:
        """Report the trust in the lease until it ends, then end the group. Reports come more often as the end comes
        near, so that a heartbeat which succeeds late still counts."""
        while not self._has_ended.is_set() and not self._grant.lost:
            self._report_trust()
            if self._must_end():
                break
            self._wake.wait(max(0.005, self._grant.remaining() / REPORTS))
        if self._has_ended.is_set():
            return
        if not self._watchdog.send("lost"):
            process_group.end(self._child.pid, clock() + self._grace)
        elif not self._has_ended.wait(self._grace):  # the watchdog is alive, but may be stopped
            process_group.end(self._child.pid, 0.0)

    def _report_trust(self) -> None:
        until = clock() + self._grant.remaining()
        if not self._watchdog.send(f"until {until}") and not self._has_lost_watchdog:
            self._has_lost_watchdog = True
            print_error(_NO_WATCHDOG if self._set_timer is None else _NO_WATCHDOG_GUARDED)
        if self._set_timer is not None:
            self._set_timer(until + _TIMER_GRACES * self._grace)


def _environment(url: str, schema: str, grant: Any) -> dict[bytes, bytes]:
    added = {
        "HOLDFAST_URL": settings.absolute_url(url),
        "HOLDFAST_SCHEMA": schema,
        "HOLDFAST_LEASE": grant.name,
        "HOLDFAST_TOKEN": grant.token,
        "HOLDFAST_FENCE": str(grant.fence),
    }
    return {**_original_environment(), **{os.fsencode(name): os.fsencode(value) for name, value in added.items()}}


def _original_environment() -> dict[bytes, bytes]:
    """Our environment without the LC_CTYPE that Python sets for itself in the C locale."""
    environment, name = dict(os.environb), b"LC_CTYPE"
    if name in environment:
        try:
            with open("/proc/self/environ", "rb") as file:
                original = dict(variable.partition(b"=")[::2] for variable in file.read().split(b"\0"))
        except OSError:
            return environment
        if name not in original:
            del environment[name]
        else:
            environment[name] = original[name]
    return environment


def _open_standard_descriptors() -> None:
    """Open /dev/null in place of a standard descriptor that is closed, so that no file of ours gets its number. They
    are close-on-exec: the command finds it closed, as we did."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
