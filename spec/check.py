"""Checks the model of the lease with spin: instances that must hold, searched completely, and variants that must break.

Builds and runs in a temporary folder and leaves no files behind. The exit code is 0 if every verdict is the expected
one, 1 if one is not, 2 if spin or a C compiler is missing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
DEPTH = "200000"
LIMIT_MB = 2000
PATIENCE = 600.0
"""Timeout of one search in seconds, long enough for a busy machine."""

FENCE_ORDER = "number>=lease"
FENCES_RISE = "number>highest"
NOT_REVIVED = "!(beat"
ONE_BELIEVER = "believers==1"
FORCE_NOTICED = "number!=0"
OWNER_LIVES = "!(dead)"
NO_DEADLOCK = "invalid end state"
PROGRESS = "acceptance cycle"
"""What spin prints when the property is violated."""


class Check(NamedTuple):
    """One search of one instance. ``breaks`` is the violation that spin must report; None: the search must be clean."""

    name: str
    model: str
    options: str
    breaks: str | None = None

    @property
    def live(self) -> bool:
        return self.model == "progress"


class Result(NamedTuple):
    check: Check
    states: int
    seconds: float
    megabytes: float
    violation: str | None
    complete: bool

    @property
    def expected(self) -> bool:
        if self.check.breaks is None:
            return self.complete and self.violation is None
        return self.violation is not None and self.check.breaks in self.violation

    @property
    def verdict(self) -> str:
        if self.violation is not None:
            return f"violated: {self.violation}"
        return "holds" if self.complete else "search not completed"


HELD = "-DGRANTED -DWRITES=1 -DKEEPERS=1"
PAIR = f"-DCLIENTS=2 {HELD}"
PROTECTED = f"{PAIR} -DSAVEPOINTS"
FAILOVER = "-DCLIENTS=2 -DGRANTED -DWRITES=1 -DKEEPERS=0 -DATTEMPTS=1 -DFAILOVERS"
FREE = "-DCLIENTS=2 -DTURNS=2 -DWRITES=0 -DKEEPERS=0 -DATTEMPTS=1"
BELIEF = "-DCLIENTS=2 -DTTL=1"
BY_FORCE = "-DCLIENTS=1 -DTTL=1 -DATTEMPTS=1 -DBY_FORCE"
LOCKS = "-DATTEMPTS=1 -DONCE"
PROGRESSING = "-DCLIENTS=2 -DTTL=1 -DATTEMPTS=1"
OWNER = "-DW=2"

SMALL = (
    Check("protected at start", "effects", PROTECTED),
    Check("protected at commit", "effects", f"{PROTECTED} -DPROTECT=AT_COMMIT"),
    Check("taken away by force", "effects", f"{PAIR} -DFORCED=1"),
    Check("sessions ended", "effects", f"{PAIR} -DKILLS=1"),
    Check("failover", "effects", FAILOVER),
    Check("a free name", "effects", FREE),
    Check("belief", "belief", BELIEF),
    Check("force is noticed", "belief", BY_FORCE),
    Check("lock orders", "locks", LOCKS),
    Check("progress", "progress", PROGRESSING),
    Check("owner keys", "owner", OWNER),
)
"""Instances that must hold, each searched in less than a second. They are the smallest in which spin finds the broken
variants below: a clean search of a smaller one would prove nothing."""

LARGE = (
    Check("protected at start", "effects", f"{HELD} -DSAVEPOINTS -DFORCED=1"),
    Check("protected at commit", "effects", f"{HELD} -DSAVEPOINTS -DFORCED=1 -DPROTECT=AT_COMMIT"),
    Check("acquired again", "effects", f"{PAIR} -DTURNS=2 -DFORCED=1"),
    Check("sessions ended", "effects", "-DGRANTED -DWRITES=1 -DKEEPERS=0 -DKILLS=1"),
    Check("failover", "effects", "-DGRANTED -DWRITES=1 -DKEEPERS=0 -DFAILOVERS -DNO_RELEASE"),
    Check("failover with heartbeats", "effects", f"{PAIR} -DATTEMPTS=1 -DFAILOVERS"),
    Check("a free name", "effects", "-DWRITES=1 -DKEEPERS=0"),
    Check("belief", "belief", "-DCLIENTS=2 -DTTL=3"),
    Check("force is noticed", "belief", "-DCLIENTS=2 -DBY_FORCE"),
    Check("lock orders", "locks", "-DLARGE"),
    Check("lock orders with heartbeats", "locks", "-DATTEMPTS=1"),
    Check("progress", "progress", "-DCLIENTS=2 -DTTL=2"),
    Check("owner keys", "owner", "-DW=4"),
)
"""The same with more clients, grants or ticks: minutes, and up to 1.2 GB."""

BROKEN = (
    Check("without protect", "effects", f"{PROTECTED} -DPROTECT=NOTHING", FENCE_ORDER),
    Check("FOR KEY SHARE", "effects", f"{PROTECTED} -DPROTECT=KEY_SHARE", FENCE_ORDER),
    Check("asked again, not locked", "effects", f"{PROTECTED} -DPROTECT=RECHECK", FENCE_ORDER),
    Check("savepoint not refused", "effects", f"{PROTECTED} -DIGNORE_SAVEPOINT", FENCE_ORDER),
    Check("fence restarts", "effects", f"{FAILOVER} -DFENCE_RESTARTS", FENCES_RISE),
    Check("fence not drawn again", "effects", f"{FREE} -DNO_REDRAW", FENCES_RISE),
    Check("renewal of the dead", "effects", f"{PROTECTED} -DRENEW_THE_DEAD", NOT_REVIVED),
    Check("trust from the reply", "belief", f"{BELIEF} -DTRUST_FROM_REPLY", ONE_BELIEVER),
    Check("silent force", "belief", f"{BY_FORCE} -DSILENT", FORCE_NOTICED),
    Check("thief that waits", "locks", f"{LOCKS} -DTHIEF_WAITS", NO_DEADLOCK),
    Check("protect ignores the beat", "progress", f"{PROGRESSING} -DIGNORE_BEAT", PROGRESS),
    Check("free once is dead", "owner", f"{OWNER} -DONE_LOOK", OWNER_LIVES),
    Check("old note stays", "owner", f"{OWNER} -DNOTE_STAYS -DONLY_OTHERS_REMOVE", OWNER_LIVES),
    Check("note not checked", "owner", f"{OWNER} -DNOTED_UNCHECKED", OWNER_LIVES),
    Check("key taken, note left", "owner", f"{OWNER} -DONLY_OTHERS_REMOVE", OWNER_LIVES),
)
"""A small instance with one line of the protocol changed, and the property that this line protects."""


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def missing() -> str | None:
    """Why no check can run here; None if they can."""
    if shutil.which("spin") is None:
        return "spin is not installed: apt-get install spin"
    if compiler() is None:
        return "A C compiler is not installed: apt-get install gcc"
    return None


def run(check: Check) -> Result:
    """Generate the verifier, compile and run it."""
    with tempfile.TemporaryDirectory(prefix="holdfast-spec-") as folder:
        for model in FOLDER.glob("*.pml"):
            shutil.copy(model, folder)
        _call(folder, "spin", "-a", *check.options.split(), f"{check.model}.pml")
        kind = "-DNFAIR=3" if check.live else "-DSAFETY"
        large = check in LARGE
        speed = "-O1" if large else "-O0"  # for a search of one second, optimizing takes longer than it saves
        space = ["-DCOLLAPSE"] if large else []  # saves memory, and takes a quarter more time
        _call(folder, compiler() or "cc", "-w", speed, kind, *space, f"-DMEMLIM={LIMIT_MB}", "-o", "pan", "pan.c")
        table = [] if large else ["-w18"]  # the hash table: zeroing the default of 128 MB takes 0.2 s
        output = _call(folder, "./pan", f"-m{DEPTH}", *table, *(["-a", "-f"] if check.live else []))
    return read(check, output)


def _call(folder: str, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def read(check: Check, output: str) -> Result:
    """Parse the verifier's output. An incomplete search proves nothing."""
    violation = re.search(r"^pan:1: (.+?) \(at depth", output, re.MULTILINE)
    errors = re.search(r"errors: (\d+)", output)
    complete = errors is not None and not re.search(r"not completed|depth too small|out of memory", output)
    if violation is None and errors is not None and errors[1] != "0":
        complete = False
    return Result(
        check,
        states=int(_figure(r"(\S+) states, stored", output)),
        seconds=_figure(r"elapsed time (\S+) seconds", output),
        megabytes=_figure(r"(\S+)\s+total actual memory usage", output),
        violation=violation[1] if violation else None,
        complete=complete,
    )


def _figure(pattern: str, output: str) -> float:
    match = re.search(pattern, output)
    return float(match[1]) if match else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="spec/check.py", description="Check the model of the lease with spin.")
    parser.add_argument("--large", action="store_true", help="the larger instances: minutes, and up to 1.2 GB")
    parser.add_argument("--only", metavar="TEXT", default="", help="only checks with this text in their name")
    options = parser.parse_args(arguments)
    if (reason := missing()) is not None:
        print(f"spec: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the temporary folder is deleted
    chosen = [each for each in (*(LARGE if options.large else SMALL), *BROKEN) if options.only in each.name]
    unexpected = 0
    for number, check in enumerate(chosen, 1):
        print(f"{number:3}/{len(chosen)}  {check.name:26}", end="", flush=True)
        result = run(check)
        unexpected += not result.expected
        print(
            f"{result.states:>11,} states {result.seconds:7.1f} s {result.megabytes:6.0f} MB  "
            f"{'as expected' if result.expected else 'UNEXPECTED'}  {result.verdict}",
            flush=True,
        )
    print(f"{len(chosen) - unexpected} of {len(chosen)} as expected")
    return 1 if unexpected or not chosen else 0


if __name__ == "__main__":
    raise SystemExit(main())
