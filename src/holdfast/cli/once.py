"""holdfast once: run a command once a slot, on whichever machine comes first."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import click

from holdfast.cli import FAILED, MISUSED, print_error
from holdfast.cli.app import open_client
from holdfast.cli.child import NOT_EXECUTABLE, NOT_FOUND, die_with
from holdfast.cli.process_group import clock, end, send_signal
from holdfast.cli.run_command import RunCommand

if TYPE_CHECKING:
    from holdfast import ScheduleSlot

OUTPUT = 10_000
"""Characters of output that are kept: the last ones."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_CHECK_EVERY = 0.2
"""Seconds between two checks of the lease while the command runs."""
_GRACE = 0.5
"""Seconds between TERM and KILL when the lease is lost."""
_FOR_EVER = 366 * 86400.0


class CommandFailed(Exception):
    """The command has ended with another exit code than 0."""


class Duration(click.FloatRange):
    """Seconds, with a unit or without."""

    def __init__(self) -> None:
        super().__init__(0.0)

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw]?)", value)
        if match is None:
            self.fail(f"{value!r} is not a duration: use 90, 90s, 15m, 12h, 1d or 1w.", param, ctx)
        return float(match[1]) * _UNITS[match[2] or "s"]


class Every(Duration):
    """The same, or a cron expression."""

    name = "every"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, str) and " " in value.strip() else super().convert(value, param, ctx)


@click.command(cls=RunCommand, options_metavar="[OPTIONS]")
@click.option("--every", type=Every(), metavar="1d|CRON", help="A slot each 15m, 12h, 1d …, or by a cron expression.")
@click.option("--at", metavar="HH:MM", help="With --every 1d: the time of day.")
@click.option(
    "--zone", default="UTC", show_default=True, metavar="ZONE", help="Time zone of --at and of the expression."
)
@click.option(
    "--retry-within", type=Duration(), metavar="15m",
    help="How long after its slot a command that failed is run again by the next caller. Default: never; without "
    "--every, always.",
)  # fmt: skip
@click.argument("name")
@click.argument("argv", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def once(
    context: click.Context, /, name: str, argv: tuple[str, ...], every: float | str | None, at: str | None, zone: str,
    retry_within: float | None,
) -> None:  # fmt: skip
    """Run a command once a slot, on one of many machines.

    The first machine runs COMMAND, and the others exit with 0.

    For cron on many machines: give all of them the same line. Slots are computed by the clock of the database. Without
    --every, COMMAND runs once ever, for example a step of a deployment. `holdfast schedules show NAME` shows the runs,
    with the end of their output.

    \b
    Examples:
      3 3 * * *  holdfast once backup --every 1d --at 03:00 --zone Europe/Berlin -- ./backup.sh
      */5 * * * *  holdfast once sweep --every 5m -- python sweep.py
      holdfast once report --every '0 6 * * MON' --retry-within 2h -- ./report
      holdfast once release-42-backfill -- ./backfill

    \b
    Exit codes:
      the exit code of the command, where it ran; 128 + n when signal n ended it
      0    it has run, or runs on another machine at this moment
      1    the database is unreachable or refused the request, or the lease was lost
      2    wrong usage
      126  the command cannot be executed
      127  the command was not found

    \b
    Environment of the command:
      HOLDFAST_SLOT     the time of the slot, ISO 8601 in UTC
      HOLDFAST_ATTEMPT  1; higher after a failure or a crash
    """
    logging.getLogger("holdfast").addHandler(logging.NullHandler())  # what matters is said by the exit code
    if at is not None:
        every = _daily(every, at)
    patience = retry_within if retry_within is not None else _FOR_EVER if every is None else 0.0
    codes: list[int] = []

    def work(slot: ScheduleSlot) -> None:
        codes.append(_execute(list(argv), slot))
        if codes[-1]:
            raise CommandFailed(f"exit code {codes[-1]}")

    with open_client(context, creates=True) as client:
        try:
            run = client.schedule(name, every, zone=zone).run_due(work, retry_within=patience)
        except ModuleNotFoundError as error:
            print_error(str(error))
            sys.exit(MISUSED)
    if codes:
        sys.exit(next(filter(None, codes), 0) or (FAILED if run is None or run.status != "success" else 0))


def _daily(every: float | str | None, at: str) -> str:
    """The cron expression of a time of day."""
    match = re.fullmatch(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", at)
    if match is None:
        raise click.UsageError(f"--at must be a time of day such as 03:00, not {at!r}")
    if every != _UNITS["d"]:
        raise click.UsageError("--at needs --every 1d; for anything else give --every a cron expression")
    return f"{int(match[2])} {int(match[1])} * * *"


def _execute(argv: list[str], slot: ScheduleSlot) -> int:
    """Run the command, pass on what it prints, keep the end of that with the slot, and return its exit code. It is
    ended, with the processes that it has started, when the lease is lost."""
    environment = {**os.environ, "HOLDFAST_SLOT": slot.time.isoformat(), "HOLDFAST_ATTEMPT": str(slot.attempt)}
    try:
        process = subprocess.Popen(  # it must not go on without us: another machine would run it a second time
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - it only calls prctl
        )  # fmt: skip
    except OSError as error:
        print_error(f"cannot run {argv[0]}: {error.strerror}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    kept: deque[str] = deque()
    assert process.stdout is not None
    assert process.stderr is not None
    readers = [
        threading.Thread(target=_pass_on, args=(process.stdout, sys.stdout.fileno(), kept), daemon=True),
        threading.Thread(target=_pass_on, args=(process.stderr, sys.stderr.fileno(), kept), daemon=True),
    ]
    before = {
        number: signal.signal(number, lambda number, _: send_signal(process.pid, number)) for number in _FORWARDED
    }
    try:
        for reader in readers:
            reader.start()
        while True:
            try:
                code = process.wait(_CHECK_EVERY)
                break
            except subprocess.TimeoutExpired:
                if slot.lost:
                    end(process.pid, clock() + _GRACE)
        for reader in readers:
            reader.join()
        process.stdout.close()
        process.stderr.close()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        slot.note("".join(kept))
    return code if code >= 0 else 128 - code


_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTSTP)
"""To all processes of the command, which have a session of their own. Ctrl-Z must not stop us: while we are stopped the
lease is not renewed."""


def _pass_on(stream: IO[bytes], descriptor: int, kept: deque[str]) -> None:
    """Copy what the command prints, and keep the last of it."""
    while data := os.read(stream.fileno(), 65536):
        kept.append(data.decode("utf-8", "replace"))
        while len(kept) > 1 and sum(map(len, kept)) - len(kept[0]) > OUTPUT:
            kept.popleft()
        try:
            os.write(descriptor, data)
        except OSError:
            pass  # the reader of our output is gone; that of the command is kept all the same
