"""The same question is not asked twice of a model that is slow and paid for by the word.

Whoever asks first makes the call, in a transaction that has the row. Whoever asks meanwhile is told at once that an
answer is on its way, and whoever asks later gets the answer. If the first one dies, its row is free with its session.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import psycopg

import holdfast

TABLE = "create table if not exists answer (question bytea primary key, text text)"


def ask(url: str, question: str, model: Callable[[str], str]) -> str | None:
    """The answer, or None: somebody else is just asking, come back later."""
    key = sha256(question.encode()).digest()
    with psycopg.connect(url) as connection:
        with connection.transaction():  # there must be a row to lock, and others must see it
            connection.execute("insert into answer (question) values (%s) on conflict do nothing", [key])
        with connection.transaction():
            row: dict[str, Any] | None = holdfast.row_lock(connection, "answer", question=key)
            if row is None:
                return None
            if row["text"] is None:
                row["text"] = model(question)
                connection.execute("update answer set text = %s where question = %s", [row["text"], key])
            return str(row["text"])
