"""Run all seeded bugs and print which check found which. Status 1 if one was missed, or a check fails without it."""

import sys
import tempfile
from pathlib import Path

from proof.bugs import BUGS, Bug, Servers, run

_ROW = "{:<46} {:<8} {:<12} {:<12} {}\n"


def main() -> int:
    sys.stdout.write(_ROW.format("mistake", "check", "violated", "real one", "verdict"))
    all_caught = True
    with Servers() as servers, tempfile.TemporaryDirectory() as folder:
        for number, (name, bug) in enumerate(BUGS.items()):
            all_caught &= _run_twice(name, bug, Path(folder) / str(number), servers)
    return 0 if all_caught else 1


def _run_twice(name: str, bug: Bug, folder: Path, servers: Servers) -> bool:
    if missing := bug.missing():
        sys.stdout.write(_ROW.format(name, bug.check, "-", "-", f"skipped: {missing}"))
        return True
    wrong = run(bug, folder / "wrong", servers).violated
    real = run(bug, folder / "real", servers, healthy=True).violated
    verdict = "MISSED" if bug.check not in wrong else "FALSE ALARM" if real else "caught"
    sys.stdout.write(_ROW.format(name, bug.check, " ".join(wrong) or "-", " ".join(real) or "-", verdict))
    sys.stdout.flush()
    return verdict == "caught"


if __name__ == "__main__":
    sys.exit(main())
