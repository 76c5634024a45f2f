"""Take the leader away so many times, and judge what became of it: ``python -m proof.succession``.

Exit status: 0 all is well, 1 a promise was broken, 2 called wrongly, 130 interrupted.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from proof.arguments import count, seconds
from proof.succession.play import Play


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
    asked = parser.parse_args(arguments)
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(10**6)
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="holdfast-succession-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FileExistsError(f"{folder} is not empty: name another folder")
    except OSError as error:
        parser.error(f"--folder: {error}")
    sys.stderr.write(f"the leader is taken away {asked.times} times, seed {seed}, in {folder}\n")
    with Play(folder, seed, ttl=asked.ttl, grace=asked.grace, records=asked.records) as play:
        for number in range(1, asked.times + 1):
            play.act()
            if number % 10 == 0:
                sys.stderr.write(f"{number} of {asked.times}\n")
        verdicts = play.verdicts()
    told = {
        "faults": dict(play.faults),
        "seconds until true again": {
            "median": round(statistics.median(play.gaps), 2), "longest": round(max(play.gaps), 2),
        },
        "seconds the machine stood still": play.standstill.figures(),
        "verdicts": {each.check: {"ok": each.ok, "counted": each.counted} for each in verdicts},
        "violations": [violation for each in verdicts for violation in each.violations],
    }  # fmt: skip
    sys.stdout.write(json.dumps(told, indent=2) + "\n")
    return 0 if all(each.ok for each in verdicts) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
