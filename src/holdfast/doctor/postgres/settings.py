"""How the session and the server are set, as several checks ask."""

from __future__ import annotations

from holdfast.doctor.findings import Facts, Hidden, row, rows


def read_only(facts: Facts) -> bool:
    about = row(facts, "session_open")
    return bool(about["in_recovery"] or about["read_only"])


def pooled(facts: Facts) -> bool:
    about = row(facts, "pooler")
    return bool(about["pooled"] or about["moved"])


def tuned(facts: Facts) -> bool:
    """Whether the session is one that holdfast would use, with its own limits set."""
    return row(facts, "connection")["refused"] is None


def setting(facts: Facts, name: str, instead: str | None = None) -> str:
    """In force in our session."""
    return _value(facts, name, "setting", instead)


def default(facts: Facts, name: str, instead: str | None = None) -> str:
    """What server, database and role ask for: in force before holdfast sets its own, and in the user's sessions."""
    return _value(facts, name, "reset_val", instead)


def _value(facts: Facts, name: str, column: str, instead: str | None) -> str:
    found = next((each for each in rows(facts, "examine_settings") if each["name"] == name), None)
    value = instead if found is None else found[column]
    if value is None:
        raise Hidden(f"the setting {name} is not visible to this role")
    return str(value)


def duration(milliseconds: float) -> str:
    for size, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s")):
        if milliseconds >= size:
            return f"{milliseconds / size:.3g} {unit}"
    return f"{milliseconds:g} ms"
