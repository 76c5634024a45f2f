"""``python -m proof.chaos``: run scenarios, check their histories, and write a report."""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from proof.argument_types import count, positive, seconds
from proof.chaos import report
from proof.chaos.scenario import Outcome, Scenario
from proof.chaos.services import Services
from proof.chaos.targets import TARGETS, available_targets

SERVICES = "services"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    lanes = options.lanes or [*available_targets(), SERVICES]
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="holdfast-chaos-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--folder: {error}")
    if any((folder / lane).exists() for lane in lanes):
        sys.stderr.write(f"{folder} has the history of an earlier run: name another folder\n")
        return 2
    _report_progress(f"chaos for {options.minutes:g} minutes, seed {seed}, in {folder}: {', '.join(lanes)}")
    started, stop = time.monotonic(), Event()

    def over() -> bool:
        return stop.is_set() or time.monotonic() - started >= options.minutes * 60

    scenarios = [
        Services(folder / lane, seed, kinds=options.faults)
        if lane == SERVICES
        else Scenario(lane, folder / lane, seed, ttl=options.ttl, size=options.size, kinds=options.faults)
        for lane in lanes
    ]
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        outcomes = _run_all(scenarios, over, stop, options.minutes * 60)
    except ValueError as error:
        _report_progress(str(error))
        if options.folder is None:
            shutil.rmtree(folder)
        return 2
    except KeyboardInterrupt:
        return 130
    run = report.Run(seed, options.minutes, _commit(), outcomes)
    (folder / "report.html").write_text(report.as_html(run))
    (folder / "report.json").write_text(report.as_json(run))
    sys.stdout.write(report.as_json(run) if options.json else report.as_text(run))
    _report_progress(f"the timeline is in {folder / 'report.html'}")
    return report.status(outcomes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m proof.chaos",
        description="Contend for leases while everything fails. Exit status: 0 all is well, 1 a promise was broken, "
        "2 called wrongly, 3 a lane could not be played to its end or a check had nothing to count.",
    )
    parser.add_argument("--minutes", type=positive, default=2.0, help="how long the faults last; default: %(default)s")
    parser.add_argument(
        "--lane", dest="lanes", action="append", choices=[*TARGETS, SERVICES], help="only this one; may be repeated"
    )
    parser.add_argument("--seed", type=int, help="chooses the faults; default: at random")
    parser.add_argument(
        "--faults", action="append", default=[], metavar="KIND", help="only of this kind; may be repeated"
    )
    parser.add_argument(
        "--ttl",
        type=seconds(0.05, 86_400),
        default=1.0,
        help="of the leases of contenders, in seconds; default: %(default)s",
    )
    parser.add_argument(
        "--size", type=count(1), default=4, help="contenders per lane, two threads each; default: %(default)s"
    )
    parser.add_argument("--folder", type=Path, help="where histories and report go; default: a new temporary folder")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _run_all(
    scenarios: Sequence[Scenario | Services], over: Callable[[], bool], stop: Event, seconds: float
) -> list[Outcome]:
    """Run all scenarios at once, and print the progress. If one fails, or on Ctrl-C, all stop: faults are
    healed and processes ended before this returns."""
    with ThreadPoolExecutor(len(scenarios)) as pool:
        try:
            futures = [pool.submit(scenario.run, over) for scenario in scenarios]
            started = reported = time.monotonic()
            while not all(future.done() for future in futures):
                if any(future.done() and future.exception() for future in futures):
                    stop.set()
                time.sleep(0.2)
                if time.monotonic() - reported > 15:
                    reported = time.monotonic()
                    faults = sum(sum(scenario.faults.values()) for scenario in scenarios)
                    _report_progress(f"{min(reported - started, seconds):.0f} of {seconds:.0f} s, {faults} faults")
            return [future.result() for future in futures]
        finally:
            stop.set()


def _interrupt(number: int, _: object) -> None:
    """SIGTERM does what Ctrl-C does: faults are healed, processes ended."""
    raise KeyboardInterrupt


def _commit() -> str:
    """The commit of the code, if it is in a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    return completed.stdout.strip() or "unknown"


def _report_progress(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
