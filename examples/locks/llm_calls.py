"""Never send the same question twice to a slow and expensive model.

The first caller calls the model, in a transaction that locks the row. A caller meanwhile returns at once without an
answer, and a later caller gets the answer. If the first caller dies, its session ends and the row is free.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import psycopg

import holdfast

TABLE = "create table if not exists answer (question bytea primary key, text text)"


def ask(url: str, question: str, model: Callable[[str], str]) -> str | None:
    """The answer, or None if another caller is waiting for it: try again later."""
    key = sha256(question.encode()).digest()
    with psycopg.connect(url) as connection:
        with connection.transaction():  # the row to lock must exist and be visible to others
            connection.execute("insert into answer (question) values (%s) on conflict do nothing", [key])
        with connection.transaction():
            row: dict[str, Any] | None = holdfast.row_lock(connection, "answer", question=key)
            if row is None:
                return None
            if row["text"] is None:
                row["text"] = model(question)
                connection.execute("update answer set text = %s where question = %s", [row["text"], key])
            return str(row["text"])
