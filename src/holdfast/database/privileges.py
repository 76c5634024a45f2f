"""Which SQL functions are for operators or gateways only, and the advice for a role that lacks a privilege.

These are the only lists: the doctor checks by them, the docs page on roles grants by them, and a test compares them.
All other functions are for every role that may use the schema.
"""

from __future__ import annotations

import re

FOR_OPERATORS = frozenset(
    {
        "lease_force_release", "lease_force_release_if", "lease_recall", "lease_wipe", "lock_end_session",
        "audit_begin", "audit_note", "audit_end", "audit_stands", "audit_list", "wal_archive", "operation_expire",
        "operation_correct", "review_decide", "relay_remove", "fence_raise", "gate_acquire", "gate_open",
        "gate_close", "policy_apply", "schedule_pause", "schedule_order", "schedule_remove",
    }
)  # fmt: skip
"""What changes the leases, locks or operations of others without their token, the audit of that, and gates."""
FOR_GATEWAYS = frozenset({"peer_announce", "peer_find"})
"""What replicas of the gateway call. The first one also gives a role objects of types @… and leases gateway:…"""


SESSION_LOCKS = tuple(
    f"pg_catalog.{name}({arguments})"
    for name in (
        "pg_advisory_lock", "pg_advisory_lock_shared", "pg_try_advisory_lock", "pg_try_advisory_lock_shared",
        "pg_advisory_unlock", "pg_advisory_unlock_shared",
    )
    for arguments in ("bigint", "int, int")
)  # fmt: skip
"""The server's own functions that locks and ``failover="session"`` call, and waiters do in order to be notified."""


def migrate_command(schema: str) -> str:
    return f"holdfast {_option(schema)}migrate up"


def grants(schema: str) -> str:
    """For a role that has no privilege yet. Never on all functions: some are for operators."""
    return f"GRANT USAGE ON SCHEMA {schema} TO …; and GRANT EXECUTE as 'holdfast {_option(schema)}doctor' says for it"


def remedy(schema: str, refusal: str, context: str = "") -> str:
    """The advice that fits a refusal by the server: the GRANT that is missing, if the refusal names it.

    ``context``: where it happened, as the server reports it. holdfast's SQL functions run with the rights of their
    owner, so that what they are refused has to be granted to the owner.
    """
    for purpose, functions in (("operators", FOR_OPERATORS), ("gateways", FOR_GATEWAYS)):
        if named := sorted(functions.intersection(re.findall(r"\w+", refusal))):
            return f"That is for {purpose}: GRANT EXECUTE ON FUNCTION {schema}.{named[0]} TO …"
    kind, name = _object(refusal)
    if kind == "schema" and name != schema:
        return f"The role needs: GRANT USAGE ON SCHEMA {name} TO …"
    if kind != "function" or name == "hello":  # the first function that is called: the role has no privilege yet
        return f"The role needs: {grants(schema)}"
    if not name.startswith("pg_"):
        return f"The role needs: GRANT EXECUTE ON FUNCTION {schema}.{name} TO …"
    role = f"the owner of schema {schema!r}, whose rights its functions have" if f"{schema}." in context else "…"
    return f"The role needs: GRANT EXECUTE ON FUNCTION pg_catalog.{name} TO {role}"


def migrate_remedy(schema: str, refusal: str) -> str:
    """The advice for a role that was refused a migration."""
    kind, name = _object(refusal)
    if kind == "database":
        return (
            f"To migrate as this role: GRANT CREATE ON DATABASE {name} TO …, or CREATE SCHEMA {schema} AUTHORIZATION "
            f"…; else run '{migrate_command(schema)}' as the role that is to own schema {schema!r}"
        )
    if kind == "function" and name.startswith("pg_"):
        return f"The role that migrates needs: GRANT EXECUTE ON FUNCTION pg_catalog.{name} TO …"
    return (
        f"Only the owner of schema {schema!r} may migrate it: run '{migrate_command(schema)}' as that role. Roles that "
        f"use it need: {grants(schema)}"
    )


def grant_execute(refusal: str) -> str:
    """For a role that may not execute a function of the server itself: a sentence, or "" if the refusal names none."""
    kind, name = _object(refusal)
    return f"GRANT EXECUTE ON FUNCTION pg_catalog.{name} TO … (all of them: 'holdfast doctor'); " * (kind == "function")


def _object(refusal: str) -> tuple[str, str]:
    """The kind and the name of the object in the server's message; empty when it is in another language."""
    match = re.search(r'permission denied for (\w+) "?(\w+)', refusal)
    return (match[1], match[2]) if match else ("", "")


def _option(schema: str) -> str:
    return "" if schema == "holdfast" else f"--schema {schema} "
