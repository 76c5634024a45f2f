"""Which SQL functions are for operators alone, and what a role that lacks something is told.

The one list: the doctor judges by it, the page on roles grants by it, and a test holds the page to it. A function that
is not on it is for everybody who may use the schema.
"""

from __future__ import annotations

import re

FOR_OPERATORS = frozenset(
    {
        "lease_force_release", "lease_force_release_if", "lease_recall", "lease_wipe", "lock_break",
        "audit_begin", "audit_note", "audit_end", "audit_list", "wal_archive", "operation_expire", "review_decide",
        "relay_remove",
    }
)  # fmt: skip
"""What acts on others' work without a token of theirs, and the record of that."""


def migrate_command(schema: str) -> str:
    return f"holdfast {_option(schema)}migrate up"


def grants(schema: str) -> str:
    """For a role that has nothing yet. Never all functions: some are for operators."""
    return f"GRANT USAGE ON SCHEMA {schema} TO …; and GRANT EXECUTE as 'holdfast {_option(schema)}doctor' says for it"


def remedy(schema: str, refusal: str) -> str:
    """For whoever met the refusal of the server."""
    named = sorted(FOR_OPERATORS.intersection(re.findall(r"\w+", refusal)))
    if not named:
        return f"The role needs: {grants(schema)}"
    return f"That is for operators: GRANT EXECUTE ON FUNCTION {schema}.{named[0]} TO …"


def _option(schema: str) -> str:
    return "" if schema == "holdfast" else f"--schema {schema} "
