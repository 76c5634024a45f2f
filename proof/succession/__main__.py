"""Take the leader away many times, and check the histories: ``python -m proof.succession``.

Exit status: 0 every check is ok, 1 a promise was broken, 2 wrong arguments, 130 interrupted.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from proof.argument_types import count, seconds
from proof.succession.run import SuccessionRun


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.succession", description=__doc__)
    parser.add_argument("--times", type=count(1), default=100, help="default: %(default)s")
    parser.add_argument("--seed", type=int, help="chooses the faults; default: at random")
    parser.add_argument(
        "--ttl", type=seconds(0.3, 3600), default=1.0, help="of the elector, in seconds; default: %(default)s"
    )
    parser.add_argument(
        "--grace", type=seconds(1, 3600), default=5.0, help="of orphans, in seconds; default: %(default)s"
    )
    parser.add_argument("--records", type=count(6), default=40, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="where histories go; default: a new temporary folder")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="holdfast-succession-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FileExistsError(f"{folder} is not empty: name another folder")
    except OSError as error:
        parser.error(f"--folder: {error}")
    sys.stderr.write(f"the leader is taken away {options.times} times, seed {seed}, in {folder}\n")
    with SuccessionRun(folder, seed, ttl=options.ttl, grace=options.grace, records=options.records) as run:
        for number in range(1, options.times + 1):
            run.replace_leader()
            if number % 10 == 0:
                sys.stderr.write(f"{number} of {options.times}\n")
        verdicts = run.verdicts()
    summary = {
        "faults": dict(run.faults),
        "seconds until true again": {
            "median": round(statistics.median(run.gaps), 2), "longest": round(max(run.gaps), 2),
        },
        "seconds the machine stood still": run.standstill.figures(),
        "verdicts": {each.check: {"ok": each.ok, "counted": each.counted} for each in verdicts},
        "violations": [violation for each in verdicts for violation in each.violations],
    }  # fmt: skip
    sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    return 0 if all(each.ok for each in verdicts) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
