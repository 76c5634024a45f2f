"""Kill owners of operations on both engines, and reset the connections of one that lives: ``python -m proof.owners``.

Exit status: 0 all promises were kept, 1 one was broken, 2 wrong arguments, 130 interrupted.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence

from holdfast.testing.postgres import Postgres
from holdfast.testing.standstill import Standstill
from proof.argument_types import count
from proof.owners.run import LIMIT, kill_owners, reset_owner


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.owners", description=__doc__)
    parser.add_argument("--times", type=count(1), default=200, help="kills an engine, and resets; default: %(default)s")
    parser.add_argument("--seed", type=int, help="chooses the moments; default: at random")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    sys.stderr.write(f"{options.times} kills on each engine, then {options.times} resets, seed {seed}\n")
    with (
        Postgres.create() as server,
        tempfile.TemporaryDirectory(prefix="holdfast-owners-") as folder,
        Standstill() as standstill,
    ):
        url = server.database()
        kills = {
            "postgresql": kill_owners(url, options.times, seed),
            "sqlite": kill_owners(f"sqlite:///{folder}/app.db", options.times, seed),
        }
        resets = reset_owner(url, options.times, seed)
        paused = standstill.figures()
    both = kills.values()
    promises = {
        "each retry rolls back once, and none begins while its owner lives": all(each.is_safe for each in both),
        f"99 of 100 retries begin within {LIMIT:g} s of the kill": all(each.is_fast for each in both),
        "resets let no other owner in": resets.is_safe,
    }
    figures = {name: each.figures() for name, each in kills.items()}
    summary = {**figures, "resets": resets.figures(), "seconds the machine stood still": paused, "promises": promises}
    sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    return 0 if all(promises.values()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
