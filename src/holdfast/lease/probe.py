"""The lease contract in seven cases: what to ask a database, and what its answers mean. Asks nothing itself."""

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
    """One case: its calls, and what each must answer, reduced as ``_essence`` does it."""

    what: str
    calls: tuple[Call, ...]
    wanted: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One case judged: what it is, whether the database did it, and what it answered."""

    number: int
    what: str
    ok: bool
    found: str


def cases(name: str, tokens: Sequence[str]) -> list[Case]:
    """To be asked in this order, in one transaction. The tokens are new UUIDs; no call needs an answer of another."""
    first, refused, second, third, fourth = tokens

    def acquire(holder: str, token: str, ttl: float = _LONG) -> Call:
        fixed = {"beat": None, "reenter": True, "at_least": 0.0, "solo": True, "session_key": None, "process": None}
        return "lease_acquire", {"name": name, "holder": holder, "ttl": ttl, "token": token, **fixed}

    def release(token: str) -> Call:
        return "lease_release", {"name": name, "token": token}

    gone = (release(second), ("lease_list", {"name": name}))
    passed: Call = ("probe_expire", {"name": name})
    return [
        Case("A acquires: token", (acquire("A", first),), (("acquired", first),)),
        Case("B on the same lease: nothing", (acquire("B", refused),), (("held", None),)),
        Case("A again: token", (acquire("A", second),), (("reentered", second),)),
        Case("release with a wrong token: false", (release(refused), release(first)), (False, False)),
        Case("release with the right token: true, row gone", (release(second), *gone), (True, False, 0)),
        Case("B acquires: token", (acquire("B", third, _SHORT),), (("acquired", third),)),
        Case("an expired lease: taken by a new holder", (passed, acquire("C", fourth)), (None, ("taken_over", fourth))),
    ]  # fmt: skip


def judge(cases: Sequence[Case], answers: Sequence[Rows | Exception]) -> list[Verdict]:
    """A verdict for each case. An error is the last answer: what comes after it was never asked. Fences must rise."""
    rest = iter(answers)
    fence = 0
    verdicts = []
    for number, case in enumerate(cases, 1):
        got = [answer for _, answer in zip(case.calls, rest, strict=False)]
        found = [_essence(call, rows) for call, rows in zip(case.calls, got, strict=False)]
        drawn = list(_fences(got))
        ok = tuple(found) == case.wanted and all(each > fence for each in drawn)
        fence = max([fence, *drawn])
        told = ", then ".join(text for call, rows in zip(case.calls, got, strict=False) if (text := _told(call, rows)))
        verdicts.append(Verdict(number, case.what, ok, told or "not asked"))
    return verdicts


def _essence(call: Call, answer: Rows | Exception) -> object:
    if isinstance(answer, Exception):
        return answer
    match call[0], answer:
        case "lease_acquire", [row]:
            return row["status"], row["token"]
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


def _told(call: Call, answer: Rows | Exception) -> str:
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
