"""Makes the user's own driver raise FencedOut out of the user's own COMMIT, where holdfast is not on the stack."""

from __future__ import annotations

from typing import Any

from holdfast.core.errors import FencedOut

SQLSTATE = "HF001"


def sqlstate(error: BaseException | None) -> str | None:
    """The SQLSTATE as the drivers call it, wherever SQLAlchemy has put it."""
    while error is not None:
        for attribute in ("sqlstate", "pgcode"):
            if isinstance(state := getattr(error, attribute, None), str):
                return state
        error = getattr(error, "orig", None) or error.__cause__
    return None


def teach_psycopg() -> None:
    """psycopg looks the class of an error up by its SQLSTATE; ours becomes both a psycopg error and FencedOut."""
    from psycopg import errors

    known: dict[str, type[Exception]] = getattr(errors, "_sqlcodes", {})
    if SQLSTATE not in known:
        known[SQLSTATE] = type(
            "FencedOut", (FencedOut, errors.OperationalError), {"__module__": __name__, "sqlstate": SQLSTATE}
        )


def teach_sqlalchemy(connection: Any) -> None:
    """Every engine whose transaction was protected once turns the database's refusal into FencedOut."""
    from sqlalchemy import event

    inner = getattr(connection, "sync_connection", None) or getattr(connection, "sync_session", None) or connection
    engine = inner.engine if hasattr(inner, "engine") else inner.get_bind()
    engine = getattr(engine, "engine", engine)
    if not event.contains(engine, "handle_error", _refused):
        event.listen(engine, "handle_error", _refused)


def _refused(context: Any) -> None:
    if sqlstate(context.original_exception) == SQLSTATE and not isinstance(context.original_exception, FencedOut):
        raise FencedOut(str(context.original_exception)) from context.original_exception
