"""DBOS for comparison with operations, if it is installed: a transaction in a workflow, and a replayed workflow."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench.measure import Run

INSTALLED = importlib.util.find_spec("dbos") is not None


@contextmanager
def variants(url: str, make: Callable[[Any, str], tuple[str, Run]]) -> Iterator[list[tuple[str, Run]]]:
    """The variant that ``make`` builds with DBOS on that database, in a list; an empty list without DBOS."""
    if not INSTALLED:
        print("  DBOS is skipped: pip install --group bench", file=sys.stderr)
        yield []
        return
    from dbos import DBOS

    DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR"})
    variant = make(DBOS, url)
    DBOS.launch()
    try:
        yield [variant]
    finally:
        DBOS.destroy(destroy_registry=True)


def transaction(library: Any, url: str) -> tuple[str, Run]:
    """One insert in a transaction that is a step of a workflow: exactly once, like an operation with ``tx``."""
    from dbos import SetWorkflowID, SQLAlchemyDatasource
    from sqlalchemy import text

    source = SQLAlchemyDatasource.create(url.replace("postgresql://", "postgresql+psycopg://", 1))
    numbers, statement = itertools.count(), text("insert into work (text) values ('x')")

    def insert() -> None:
        source.sql_session().execute(statement)

    step = source.transaction(isolation_level="READ COMMITTED")(insert)

    def workflow() -> None:
        step()

    begun = library.workflow()(workflow)

    def run(times: int) -> None:
        for _ in range(times):
            with SetWorkflowID(f"w{next(numbers)}"):
                begun()

    return "DBOS workflow with a transaction", run


def replayed(library: Any, url: str) -> tuple[str, Run]:
    """A workflow of one step, run again with the same id: DBOS returns the stored result."""
    from dbos import SetWorkflowID

    def step() -> int:
        return 1

    def workflow() -> int:
        return int(done())

    done, begun = library.step()(step), library.workflow()(workflow)

    def run(times: int) -> None:
        for _ in range(times):
            with SetWorkflowID("k"):
                begun()

    return "DBOS workflow, run before", run
