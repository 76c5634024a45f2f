"""Take the leader of a Patroni cluster away many times, and check the histories: ``python -m proof.cluster``.

Exit status: 0 every check is ok or etcd is not installed, 1 a promise was broken, 2 wrong arguments, 3 the run could
not be finished or a check had nothing to count, 130 interrupted.
"""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psycopg

from holdfast import HoldfastError
from holdfast.testing.history import now
from proof.argument_types import count, seconds
from proof.cluster import etcd, report
from proof.cluster.run import KINDS, NO_CLOCK, ClusterRun, available_kinds
from proof.workload.verdicts import judge


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.cluster", description=__doc__)
    parser.add_argument("--times", type=count(1), default=20, help="how many faults; default: %(default)s")
    parser.add_argument("--seed", type=int, help="chooses the faults; default: at random")
    parser.add_argument(
        "--fault", dest="kinds", action="append", choices=KINDS, help="only of this kind; may be repeated"
    )
    parser.add_argument(
        "--ttl", type=seconds(1, 60), default=3.0, help="of the leases, in seconds; default: %(default)s"
    )
    parser.add_argument("--folder", type=Path, help="keep histories, logs, report.json and pauses.svg here")
    parser.add_argument("--svg", type=Path, help="write the picture to this file, too")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    if etcd.find() is None:
        _report_progress(f"skipped: {etcd.MISSING}")
        return 0
    kinds = [kind for kind in options.kinds or KINDS if kind in available_kinds()]
    if not kinds:
        parser.error(NO_CLOCK)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    signal.signal(signal.SIGTERM, _interrupt)
    with ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="holdfast-cluster-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise FileExistsError(f"{folder} is not empty: name another folder")
        except OSError as error:
            parser.error(f"--folder: {error}")
        _report_progress(f"the leader fails {options.times} times, seed {seed}: {', '.join(kinds)}")
        try:
            outcome = run(folder, seed, options.times, kinds, options.ttl)
        except (TimeoutError, RuntimeError, HoldfastError, psycopg.Error) as error:
            _report_progress(f"could not be finished: {error}")
            return 3
        (folder / "report.json").write_text(report.as_json(outcome))
        for file in (folder / "pauses.svg", *([options.svg] if options.svg else [])):
            file.write_text(report.as_svg(outcome))
        sys.stdout.write(report.as_json(outcome) if options.json else report.as_text(outcome))
    return outcome.status


def run(folder: Path, seed: int, times: int, kinds: Sequence[str], ttl: float) -> report.ClusterReport:
    """Each kind as often as the others, in random order. Raises TimeoutError if the cluster does not recover."""
    choice = random.Random(seed)
    started = now()
    skipped = [] if set(kinds) & {"clock"} or "clock" in available_kinds() else [f"no clock was stepped: {NO_CLOCK}"]
    with ClusterRun(folder, seed, kinds=list(kinds), ttl=ttl) as cluster_run:
        _report_progress(f"the cluster is whole after {now() - started:.0f} s")
        order: list[str] = []
        for number in range(1, times + 1):
            order = order or choice.sample(list(kinds), len(kinds))
            fault = cluster_run.fail(order.pop())
            leader = "the leader stays" if fault.new_leader is None else f"another leads after {fault.new_leader:.1f} s"
            _report_progress(
                f"{number} of {times}: {fault.kind} ({fault.detail}): {leader}, no write for {fault.pause:.1f} s"
            )
        state = cluster_run.finish()
    verdicts = judge(folder / "history", state, ttl)
    return report.ClusterReport(
        seed,
        _commit(),
        now() - started,
        cluster_run.faults,
        verdicts,
        cluster_run.standstill.figures(),
        cluster_run.expired,
        skipped,
    )


def _interrupt(number: int, _: object) -> None:
    """SIGTERM does what Ctrl-C does: processes are ended, and folders removed."""
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
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
