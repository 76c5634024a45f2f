"""Play all scenes, and say which check found which mistake: status 1 when one was missed, or a sound one blamed."""

import sys
import tempfile
from pathlib import Path

from proof.bugs import BUGS, Bug, Servers, play

_ROW = "{:<46} {:<8} {:<12} {:<12} {}\n"


def main() -> int:
    sys.stdout.write(_ROW.format("mistake", "check", "violated", "real one", "verdict"))
    sound = True
    with Servers() as servers, tempfile.TemporaryDirectory() as folder:
        for number, (name, bug) in enumerate(BUGS.items()):
            sound &= _judged(name, bug, Path(folder) / str(number), servers)
    return 0 if sound else 1


def _judged(name: str, bug: Bug, folder: Path, servers: Servers) -> bool:
    if missing := bug.missing():
        sys.stdout.write(_ROW.format(name, bug.check, "-", "-", f"left out: {missing}"))
        return True
    wrong = play(bug, folder / "wrong", servers).violated
    real = play(bug, folder / "real", servers, healthy=True).violated
    verdict = "MISSED" if bug.check not in wrong else "FALSE ALARM" if real else "caught"
    sys.stdout.write(_ROW.format(name, bug.check, " ".join(wrong) or "-", " ".join(real) or "-", verdict))
    sys.stdout.flush()
    return verdict == "caught"


if __name__ == "__main__":
    sys.exit(main())
