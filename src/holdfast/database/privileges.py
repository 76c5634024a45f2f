"""Which SQL functions are for operators only, and the advice for a role that lacks a privilege.

This is the one list: the doctor checks by it, the docs page on roles grants by it, and a test compares the two. All
other functions are for every role that may use the schema.
"""

from __future__ import annotations

import re

FOR_OPERATORS = frozenset(
    {
        "lease_force_release", "lease_force_release_if", "lease_recall", "lease_wipe", "lock_end_session",
        "audit_begin", "audit_note", "audit_end", "audit_list", "wal_archive", "operation_expire", "review_decide",
        "relay_remove", "fence_raise",
    }
)  # fmt: skip
"""What changes the leases, locks or operations of others without their token, and the audit of that."""


def migrate_command(schema: str) -> str:
    return f"holdfast {_option(schema)}migrate up"


def grants(schema: str) -> str:
    """For a role that has no privilege yet. Never on all functions: some are for operators."""
    return f"GRANT USAGE ON SCHEMA {schema} TO …; and GRANT EXECUTE as 'holdfast {_option(schema)}doctor' says for it"


def remedy(schema: str, refusal: str) -> str:
    """The advice that fits a refusal by the server."""
    named = sorted(FOR_OPERATORS.intersection(re.findall(r"\w+", refusal)))
    if not named:
        return f"The role needs: {grants(schema)}"
    return f"That is for operators: GRANT EXECUTE ON FUNCTION {schema}.{named[0]} TO …"


def _option(schema: str) -> str:
    return "" if schema == "holdfast" else f"--schema {schema} "
