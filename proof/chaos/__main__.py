"""``python -m proof.chaos``: play lanes, check their histories, report."""

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

from proof.arguments import count, positive, seconds
from proof.chaos import report
from proof.chaos.lane import Lane, Outcome
from proof.chaos.places import LANES, playable


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    asked = parser.parse_args(arguments)
    lanes = asked.lanes or playable()
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(10**6)
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="holdfast-chaos-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--folder: {error}")
    if any((folder / lane).exists() for lane in lanes):
        sys.stderr.write(f"{folder} has the history of an earlier run: name another folder\n")
        return 2
    _say(f"chaos for {asked.minutes:g} minutes, seed {seed}, in {folder}: {', '.join(lanes)}")
    began, stop = time.monotonic(), Event()

    def over() -> bool:
        return stop.is_set() or time.monotonic() - began >= asked.minutes * 60

    playing = [Lane(lane, folder / lane, seed, ttl=asked.ttl, size=asked.size, kinds=asked.faults) for lane in lanes]
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        outcomes = _play(playing, over, stop, asked.minutes * 60)
    except ValueError as error:
        _say(str(error))
        if asked.folder is None:
            shutil.rmtree(folder)
        return 2
    except KeyboardInterrupt:
        return 130
    run = report.Run(seed, asked.minutes, _commit(), outcomes)
    (folder / "report.html").write_text(report.as_html(run))
    (folder / "report.json").write_text(report.as_json(run))
    sys.stdout.write(report.as_json(run) if asked.json else report.as_text(run))
    _say(f"the timeline is in {folder / 'report.html'}")
    return report.status(outcomes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m proof.chaos",
        description="Contend for leases while everything fails. Exit status: 0 all is well, 1 a promise was broken, "
        "2 called wrongly, 3 a lane could not be played to its end or a check had nothing to count.",
    )
    parser.add_argument("--minutes", type=positive, default=2.0, help="how long the faults last; default: %(default)s")
    parser.add_argument("--lane", dest="lanes", action="append", choices=LANES, help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, help="chooses the faults; default: at random")
    parser.add_argument(
        "--faults", action="append", default=[], metavar="KIND", help="only of this kind; may be repeated"
    )
    parser.add_argument(
        "--ttl", type=seconds(0.05, 86_400), default=1.0, help="of the leases, in seconds; default: %(default)s"
    )
    parser.add_argument(
        "--size", type=count(1), default=4, help="contenders a lane, two threads each; default: %(default)s"
    )
    parser.add_argument("--folder", type=Path, help="where histories and report go; default: a new temporary folder")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _play(lanes: Sequence[Lane], over: Callable[[], bool], stop: Event, seconds: float) -> list[Outcome]:
    """All at once, with a word on how it goes now and then. When one cannot go on, or somebody is impatient, all stop:
    faults are healed and processes ended before this returns."""
    with ThreadPoolExecutor(len(lanes)) as pool:
        try:
            playing = [pool.submit(lane.play, over) for lane in lanes]
            began = told = time.monotonic()
            while not all(each.done() for each in playing):
                if any(each.done() and each.exception() for each in playing):
                    stop.set()
                time.sleep(0.2)
                if time.monotonic() - told > 15:
                    told = time.monotonic()
                    faults = sum(sum(lane.faults.values()) for lane in lanes)
                    _say(f"{min(told - began, seconds):.0f} of {seconds:.0f} s, {faults} faults")
            return [each.result() for each in playing]
        finally:
            stop.set()


def _interrupt(number: int, _: object) -> None:
    """Whoever asks us to end wants what Ctrl-C does: faults healed, processes ended."""
    raise KeyboardInterrupt


def _commit() -> str:
    """Of the code that was tested, where that is a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
