"""A sink that writes events to a graph database with Cypher: runs, the datasets they read and wrote, and which dataset
is derived from which.

Every statement merges or sets values of the event, so an event that arrives twice or late leads to the same graph.
Datasets and relationships are written for COMPLETE, and for a rollback, which marks what it has undone. A run that
failed or is partial has none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, LiteralString

from holdfast import SinkDown
from holdfast.extras import missing_extra
from holdfast.lineage import Event

try:
    from neo4j import Driver, GraphDatabase
    from neo4j.exceptions import AuthError, DriverError, Neo4jError
except ModuleNotFoundError as error:
    raise missing_extra(error, "graph") from None

INDEXES: tuple[LiteralString, ...] = (
    "CREATE CONSTRAINT IF NOT EXISTS FOR (r:Run) REQUIRE r.id IS UNIQUE",
    "CREATE CONSTRAINT IF NOT EXISTS FOR (d:Dataset) REQUIRE d.name IS UNIQUE",
)
"""For a large graph: the owner of the database runs them once."""
RUN: LiteralString = (
    "MERGE (r:Run {id: $run})"
    " SET r.key = $key, r.label = $label, r.attempt = $attempt, r.sovereignty_event = $sovereignty_event"
)
START: LiteralString = "MATCH (r:Run {id: $run}) SET r.started = $at"
END: LiteralString = "MATCH (r:Run {id: $run}) SET r.ended = $at, r.outcome = $outcome, r.error = $error"
READ: LiteralString = "MATCH (r:Run {id: $run}) MERGE (d:Dataset {name: $name}) MERGE (r)-[:READ]->(d)"
WROTE: LiteralString = (
    "MATCH (r:Run {id: $run}) MERGE (d:Dataset {name: $name}) MERGE (r)-[w:WROTE]->(d)"
    " SET w.at = $at, w.result_hash = $result_hash, w.contract = $contract, w.verdict = $verdict"
)
DERIVED: LiteralString = "MATCH (o:Dataset {name: $output}), (i:Dataset {name: $input}) MERGE (o)-[:DERIVED_FROM]->(i)"
UNDONE: LiteralString = (
    "MATCH (r:Run {id: $run}) MERGE (d:Dataset {name: $name}) MERGE (r)-[w:WROTE]->(d) SET w.undone = $at"
)

Query = tuple[LiteralString, dict[str, Any]]


class Graph:
    """``driver``: a neo4j driver, or a URL; then user and password are in NEO4J_USERNAME and NEO4J_PASSWORD."""

    def __init__(self, driver: Driver | str, *, database: str | None = None) -> None:
        if isinstance(driver, str):
            user = os.environ.get("NEO4J_USERNAME")
            auth = None if user is None else (user, os.environ.get("NEO4J_PASSWORD", ""))
            driver = GraphDatabase.driver(driver, auth=auth)
        self._driver, self._database = driver, database

    def publish(self, events: Sequence[Event]) -> None:
        """Write all events in one transaction. SinkDown when the database cannot be reached, rejects the password, or
        asks to retry; another Neo4jError when it refuses the events."""
        try:
            with self._driver.session(database=self._database) as session:
                session.execute_write(_write, [query for event in events for query in queries(event)])
        except (AuthError, DriverError) as error:
            raise SinkDown(str(error)) from error
        except Neo4jError as error:
            if error.is_retryable():
                raise SinkDown(str(error)) from error
            raise


def _write(transaction: Any, queries: Sequence[Query]) -> None:
    for text, parameters in queries:
        transaction.run(text, parameters).consume()


def queries(event: Event) -> Iterator[Query]:
    """The statements for an event, always in the same order."""
    run = {"run": event.run}
    yield RUN, {**run, **{name: getattr(event, name) for name in ("key", "label", "attempt", "sovereignty_event")}}
    if event.type == "START":
        yield START, {**run, "at": event.at}
    elif event.type in ("COMPLETE", "FAIL"):
        yield END, {**run, "at": event.at, "outcome": event.type, "error": event.error}
    if event.type == "UNDONE":
        for name in sorted(event.outputs):
            yield UNDONE, {**run, "name": name, "at": event.at}
    if event.type == "COMPLETE":
        yield from _dataset_queries(event)


def _dataset_queries(event: Event) -> Iterator[Query]:
    contract = event.contract or {}
    contract_name = f"{contract['name']} {contract['version']}" if contract else None
    for name in sorted(event.inputs):
        yield READ, {"run": event.run, "name": name}
    for name in sorted(event.outputs):
        yield WROTE, {
            "run": event.run, "name": name, "at": event.at, "result_hash": event.result_hash,
            "contract": contract_name, "verdict": contract.get("verdict"),
        }  # fmt: skip
        for source in sorted({*event.inputs} - {name}):
            yield DERIVED, {"output": name, "input": source}
