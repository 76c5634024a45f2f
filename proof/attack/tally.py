"""What was sent, what was answered, and what must not have happened. Safe for several threads."""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable

MAX_VIOLATIONS = 50


class Tally:
    """``secrets``: byte strings that no attacker may be sent."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = {secret.encode() for secret in secrets}
        self._lock = threading.Lock()
        self.answers: dict[str, Counter[str]] = defaultdict(Counter)
        self.violations: list[str] = []

    def note(self, attacker: str, answer: str) -> None:
        with self._lock:
            self.answers[attacker][answer] += 1

    def add_secrets(self, *secrets: str) -> None:
        with self._lock:
            self._secrets |= {secret.encode() for secret in secrets}

    def check_secrets(self, attacker: str, what: object, data: bytes) -> None:
        for secret in self._secrets:
            if secret in data:
                self.report(f"{attacker}: {what!r:.200} was answered with a secret")

    def report(self, violation: str) -> None:
        with self._lock:
            if violation not in self.violations and len(self.violations) < MAX_VIOLATIONS:
                self.violations.append(violation)

    @property
    def count(self) -> int:
        return sum(sum(answers.values()) for answers in self.answers.values())

    def table(self) -> str:
        rows = []
        for attacker, answers in sorted(self.answers.items()):
            words = ", ".join(f"{answer} x {count}" for answer, count in answers.most_common(9))
            rows.append(f"{attacker:<28} {sum(answers.values()):>8}  {words}")
        return "\n".join([f"{'attacker':<28} {'attempts':>8}  answers", *rows])
