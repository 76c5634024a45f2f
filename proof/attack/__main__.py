"""Attack gateways, a driver and a database as clients with no or few rights do: ``python -m proof.attack``.

Exit status: 0 nothing was broken, 1 something was, 2 wrong arguments, 130 interrupted.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from proof.argument_types import positive
from proof.attack.run import attack


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.attack", description=__doc__)
    parser.add_argument("--minutes", type=positive, default=5.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, help="chooses the attacks; default: at random")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    sys.stderr.write(f"attacking for {options.minutes:g} minutes, seed {seed}\n")
    with tempfile.TemporaryDirectory(prefix="holdfast-attack-") as folder:
        tally, figures = attack(Path(folder), seed, seconds=options.minutes * 60)
    sys.stdout.write(f"{tally.table()}\n\n{tally.count} attempts\n")
    for name, figure in figures.items():
        sys.stdout.write(f"{name}: {figure}\n")
    for violation in tally.violations:
        sys.stdout.write(f"BROKEN {violation}\n")
    sys.stdout.write("nothing was broken\n" if not tally.violations else f"{len(tally.violations)} violations\n")
    return 1 if tally.violations else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
