"""What is wrong with a database, judged from facts that somebody else has gathered.

Facts are rows by the name of the statement that asked for them; None where the role may not ask. Every check turns
them into one finding: what was found and, unless it is well, what to do about it. Nothing here asks or does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.database.privileges import migrate_command

Status = Literal["ok", "warn", "fail", "unseen"]
Fact = list[dict[str, Any]]
Facts = Mapping[str, Fact | None]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: ``status`` is "ok", "warn" (it works, and may hurt), "fail" (it does not work) or "unseen" (this role
    may not look); ``remedy`` says what to do, and is None when there is nothing to do."""

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
        """Nothing fails and, if ``strict``, nothing warns. What could not be seen is no reason to fail."""
        return not self.count("fail") and not (strict and self.count("warn"))


class Unseen(Exception):
    """A check needs a fact that is not to be had; ``remedy`` is for whoever wants to see it, if there is a way."""

    def __init__(self, what: str, remedy: str | None = None) -> None:
        super().__init__(what)
        self.remedy = remedy


class Hidden(Unseen):
    """… because this role may not ask for it."""


Verdict = tuple[Status, str, str | None]
Check = Callable[[Facts], Verdict]


def judge(checks: Iterable[tuple[str, Check]], facts: Facts, *, remedy: str | None = None) -> tuple[Finding, ...]:
    """``remedy``: how to be allowed to see what is hidden."""
    return tuple(_judge(name, check, facts, remedy) for name, check in checks)


def _judge(name: str, check: Check, facts: Facts, remedy: str | None) -> Finding:
    try:
        return Finding(name, *check(facts))
    except Unseen as what:
        return Finding(name, "unseen", str(what), remedy if isinstance(what, Hidden) else what.remedy)


def rows(facts: Facts, name: str, what: str = "not visible to this role") -> Fact:
    found = facts.get(name)
    if found is None:
        raise Hidden(what)
    return found


def row(facts: Facts, name: str, what: str = "not visible to this role") -> dict[str, Any]:
    return rows(facts, name, what)[0]


def ok(found: str) -> Verdict:
    return "ok", found, None


def warn(found: str, remedy: str) -> Verdict:
    return "warn", found, remedy


def fail(found: str, remedy: str) -> Verdict:
    return "fail", found, remedy


def schema_version(facts: Facts) -> Verdict:
    """For both engines: ``expected`` has the schema's name, the version wanted, and whether it comes by itself."""
    expected = row(facts, "expected")
    schema, wanted = expected["schema"], expected["version"]
    versions = facts.get("schema_applied")
    if versions is None:
        raise Unseen(f"schema {schema!r} cannot be read by this role: see privileges", "Ask as the schema's owner.")
    found = max((each["version"] for each in versions), default=0)
    if found == wanted:
        return ok(f"schema {schema!r} is at version {found}")
    if found > wanted:
        return fail(f"schema {schema!r} is at version {found}, this holdfast knows {wanted}", "Upgrade holdfast.")
    state = f"at version {found}, and {wanted} is needed" if found else "not there"
    if expected["self_migrating"]:
        return ok(f"schema {schema!r} is {state}: the next client that opens the file sees to it")
    return fail(f"schema {schema!r} is {state}", f"Run: {migrate_command(schema)}")
