"""The lease contract in seven cases: the calls, the expected answers, and the verdicts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]
Rows = list[dict[str, Any]]

TOKENS = 5
_LONG, _SHORT = 60.0, 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """One case: its calls, and the expected answers, reduced by ``_summary``."""

    what: str
    calls: tuple[Call, ...]
    wanted: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a case: whether the database passed, and what it answered."""

    number: int
    what: str
    ok: bool
    found: str


def cases(name: str, tokens: Sequence[str]) -> list[Case]:
    """To be called in this order, in one transaction. ``tokens``: new UUIDs; no call needs the answer of another."""
    first, refused, second, third, fourth = tokens

    def acquire(holder: str, token: str, ttl: float = _LONG) -> Call:
        fixed = {
            "beat": None,
            "reenter": f"secret of {holder}",
            "at_least": 0.0,
            "solo": True,
            "session_key": None,
            "process": None,
        }
        return "lease_acquire", {"name": name, "holder": holder, "ttl": ttl, "token": token, **fixed}

    def release(token: str) -> Call:
        return "lease_release", {"name": name, "token": token}

    gone = (release(second), ("lease_list", {"name": name}))
    passed: Call = ("probe_expire", {"name": name})
    return [
        Case("A acquires: token", (acquire("A", first),), (("acquired", True),)),
        Case("B on the same lease: nothing", (acquire("B", refused),), (("held", False),)),
        Case("A again: token", (acquire("A", second),), (("reentered", True),)),
        Case("release with a wrong token: false", (release(refused), release(first)), (False, False)),
        Case("release with the right token: true, row gone", (release(second), *gone), (True, False, 0)),
        Case("B acquires: token", (acquire("B", third, _SHORT),), (("acquired", True),)),
        Case("an expired lease: taken by a new holder", (passed, acquire("C", fourth)), (None, ("taken_over", True))),
    ]  # fmt: skip


def judge(cases: Sequence[Case], answers: Sequence[Rows | Exception]) -> list[Verdict]:
    """A verdict for each case. The calls after an error were not made. Fences must rise."""
    rest = iter(answers)
    fence = 0
    verdicts = []
    for number, case in enumerate(cases, 1):
        results = [answer for _, answer in zip(case.calls, rest, strict=False)]
        pairs = list(zip(case.calls, results, strict=False))
        fences = list(_fences(results))
        ok = tuple(_summary(*pair) for pair in pairs) == case.wanted and all(drawn > fence for drawn in fences)
        fence = max([fence, *fences])
        answers_text = ", then ".join(text for pair in pairs if (text := _describe(*pair)))
        verdicts.append(Verdict(number, case.what, ok, answers_text or "not asked"))
    return verdicts


def _summary(call: Call, answer: Rows | Exception) -> object:
    if isinstance(answer, Exception):
        return answer
    match call[0], answer:
        case "lease_acquire", [row]:
            return row["status"], row["fence"] is not None
        case "lease_release", [row]:
            return bool(row["done"])
        case "lease_list", _:
            return len(answer)
    return None


def _fences(answers: Sequence[Rows | Exception]) -> Iterator[int]:
    for answer in answers:
        for row in [] if isinstance(answer, Exception) else answer:
            if row.get("status") in ("acquired", "reentered", "taken_over"):
                yield row["fence"] or 0


def _describe(call: Call, answer: Rows | Exception) -> str:
    if isinstance(answer, Exception):
        return str(answer)
    match call[0], answer:
        case "lease_acquire", [{"status": status, "fence": None, "held_by": holder}]:
            return f"{status} by {holder}" if holder else status
        case "lease_acquire", [{"status": status, "fence": fence}]:
            return f"{status} with fence {fence}"
        case "lease_release", [{"done": done}]:
            return "true" if done else "false"
        case "lease_list", _:
            return "row still there" if answer else "row gone"
        case "probe_expire", _:
            return ""
    return "no answer"
