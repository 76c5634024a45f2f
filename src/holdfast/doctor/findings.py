"""What a check of a database returns, and how checks are run. Pure: the facts are collected by ``examine``.

Facts are rows by the name of the statement that returned them; None where the role may not run it. A check turns facts
into a verdict: what was found and, unless it is ok, what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.database.privileges import migrate_command

Status = Literal["ok", "warn", "fail", "unseen"]
Fact = list[dict[str, Any]]
Facts = Mapping[str, Fact | None]
_NOT_VISIBLE = "not visible to this role"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    ``status``: "ok", "warn" (it works, with a risk), "fail" (it does not work) or "unseen" (this role may not see it).
    ``remedy``: what to do, or None when there is nothing to do.
    """

    check: str
    status: Status
    found: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Examination:
    """Every finding about one database; ``database`` is its URL without the password."""

    database: str
    schema: str
    engine: str
    findings: tuple[Finding, ...]

    def count(self, status: Status) -> int:
        return sum(finding.status == status for finding in self.findings)

    def passed(self, *, strict: bool = False) -> bool:
        """Whether no check fails and, if ``strict``, none warns. An unseen one does neither."""
        return not self.count("fail") and not (strict and self.count("warn"))


class Unseen(Exception):
    """Raised by a check that lacks a fact; ``remedy`` says how to make it available, if there is a way."""

    def __init__(self, what: str, remedy: str | None = None) -> None:
        super().__init__(what)
        self.remedy = remedy


class NotPermitted(Unseen):
    """The fact is missing because this role may not ask for it."""


Verdict = tuple[Status, str, str | None]
Check = Callable[[Facts], Verdict]


def judge(checks: Iterable[tuple[str, Check]], facts: Facts, *, remedy: str | None = None) -> tuple[Finding, ...]:
    """Run the checks. ``remedy``: how to get the privileges for facts that are not permitted."""
    return tuple(_judge(name, check, facts, remedy) for name, check in checks)


def _judge(name: str, check: Check, facts: Facts, remedy: str | None) -> Finding:
    try:
        return Finding(name, *check(facts))
    except Unseen as unseen:
        return Finding(name, "unseen", str(unseen), remedy if isinstance(unseen, NotPermitted) else unseen.remedy)


def rows(facts: Facts, name: str, otherwise: str = _NOT_VISIBLE) -> Fact:
    """The rows of a fact. NotPermitted, with the text ``otherwise``, when it is missing."""
    fact = facts.get(name)
    if fact is None:
        raise NotPermitted(otherwise)
    return fact


def row(facts: Facts, name: str, otherwise: str = _NOT_VISIBLE) -> dict[str, Any]:
    return rows(facts, name, otherwise)[0]


def ok(summary: str) -> Verdict:
    return "ok", summary, None


def warn(summary: str, remedy: str) -> Verdict:
    return "warn", summary, remedy


def fail(summary: str, remedy: str) -> Verdict:
    return "fail", summary, remedy


def duration(seconds: float) -> str:
    """Three digits in the largest unit that fits: "1.5 min", "50 ms"."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"


def schema_version(facts: Facts) -> Verdict:
    """The check of both engines. ``expected``: the schema's name, its version, and whether it is migrated on open."""
    expected = row(facts, "expected")
    schema, wanted = expected["schema"], expected["version"]
    applied = facts.get("schema_applied")
    if applied is None:
        raise Unseen(f"schema {schema!r} cannot be read by this role: see privileges", "Ask as the schema's owner.")
    version = max((migration["version"] for migration in applied), default=0)
    if version == wanted:
        return ok(f"schema {schema!r} is at version {version}")
    if version > wanted:
        return fail(f"schema {schema!r} is at version {version}, this holdfast knows {wanted}", "Upgrade holdfast.")
    state = f"at version {version}, and {wanted} is needed" if version else "not there"
    if expected["self_migrating"]:
        return ok(f"schema {schema!r} is {state}: the next client that opens the file migrates it")
    return fail(f"schema {schema!r} is {state}", f"Run: {migrate_command(schema)}")


FENCES_AHEAD = 120.0
"""Seconds. After a start numbers are up to 60 s ahead of the clock: more means that the clock was set back, or that an
operator raised them."""


def fences(facts: Facts) -> Verdict:
    """The check of both engines."""
    if facts.get("schema_applied") == []:
        return ok("none were given out")
    ahead = {fact["name"]: fact["seconds"] for fact in rows(facts, "examine_fences")}
    name = max(ahead, key=ahead.__getitem__)
    if ahead[name] < FENCES_AHEAD:
        return ok("fences, versions and places are near the clock")
    return warn(
        f"the next {name} is {duration(ahead[name])} ahead of the clock",
        "Set the clock right, if it is behind. Nothing is wrong until the database is restored: a restored one "
        "continues from its clock, and might give out numbers again. Then run: holdfast do fence.raise --above NUMBER.",
    )
