"""The graph: what the statements draw, in an embedded engine that speaks Cypher; and a server that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kuzu
import pytest
from neo4j import GraphDatabase

import holdfast
from holdfast.lineage.graph import Graph, queries
from tests.lineage.sample_log import fill, key

TABLES = (
    "CREATE NODE TABLE Dataset(name STRING PRIMARY KEY)",
    """CREATE NODE TABLE Run(id STRING PRIMARY KEY, key STRING, label STRING, attempt INT64, sovereignty_event BOOLEAN,
       started STRING, ended STRING, outcome STRING, error STRING)""",
    "CREATE REL TABLE READ(FROM Run TO Dataset)",
    """CREATE REL TABLE WROTE(FROM Run TO Dataset, at STRING, result_hash STRING, contract STRING, verdict STRING,
       undone STRING)""",
    "CREATE REL TABLE DERIVED_FROM(FROM Dataset TO Dataset)",
)


class Embedded:
    """The embedded engine, as far as the sink knows a driver: a session, a transaction, what it runs."""

    def __init__(self, path: Path) -> None:
        self._database = kuzu.Database(str(path))
        self._connection = kuzu.Connection(self._database)
        for table in TABLES:
            self._connection.execute(table)

    def session(self, **_: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    def execute_write(self, function: Any, *args: Any) -> None:
        self._connection.execute("BEGIN TRANSACTION")
        try:
            function(self, *args)
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def run(self, text: str, parameters: dict[str, Any]) -> Any:
        self._connection.execute(text, parameters)
        return self

    def consume(self) -> None: ...

    def rows(self, text: str) -> list[list[Any]]:
        result = self._connection.execute(text)
        assert isinstance(result, kuzu.QueryResult)
        return list(self._all(result))

    def _all(self, result: Any) -> Iterator[list[Any]]:
        while result.has_next():
            yield result.get_next()

    def everything(self) -> list[list[list[Any]]]:
        return [
            self.rows("MATCH (r:Run) RETURN r.* ORDER BY r.id"),
            self.rows("MATCH (r:Run)-[w:WROTE]->(d:Dataset) RETURN r.id, d.name, w.* ORDER BY r.id, d.name"),
            self.rows("MATCH (r:Run)-[:READ]->(d:Dataset) RETURN r.id, d.name ORDER BY r.id, d.name"),
            self.rows("MATCH (o:Dataset)-[:DERIVED_FROM]->(i:Dataset) RETURN o.name, i.name ORDER BY o.name, i.name"),
        ]


def test_the_graph_has_what_was_done_and_telling_it_again_changes_nothing(sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url)
    graph: Any = Embedded(tmp_path / "graph")
    with holdfast.Client(sqlite_url) as client:
        events = list(client.relays.events())
        client.relay("graph", Graph(graph)).step()
        assert [each.problem for each in client.relays.list()] == [None]
        assert client.relays.parked("graph") == []
    runs, wrote, read, derived = drawn = graph.everything()
    by_key = {row[1]: row for row in runs}
    parcels, roads, rivers = (by_key[key(name).digest] for name in ("parcels", "roads", "rivers"))
    assert (parcels[7], roads[7], roads[8], rivers[7]) == ("COMPLETE", "FAIL", "ValueError: broken", "COMPLETE")
    assert [(row[0] == parcels[0], row[1]) for row in read] == [(True, "raw: ä")], "what failed has read nothing"
    written = {row[1]: row for row in wrote}
    assert written.keys() == {"parcels", "rivers", "lakes"}
    assert written["parcels"][4:] == ["parcels 2.1", "passed", None]
    assert written["lakes"][6] == written["rivers"][6] != None  # noqa: E711
    assert derived == [["parcels", "raw: ä"]]
    Graph(graph).publish(events)
    assert graph.everything() == drawn
    other: Any = Embedded(tmp_path / "other")
    for event in reversed(events):
        Graph(other).publish([event])
    assert other.everything() == drawn, "out of its turn it comes to the same"
    assert [list(queries(event)) for event in events] == [list(queries(event)) for event in events]


def test_a_transaction_that_fails_leaves_nothing(sqlite_url: str, tmp_path: Path) -> None:
    events = [event for each in fill(sqlite_url).values() for event in each]
    graph: Any = Embedded(tmp_path / "graph")
    run, asked = graph.run, 0

    def fail(text: str, parameters: dict[str, Any]) -> Any:
        nonlocal asked
        asked += 1
        if asked == 7:
            raise ValueError("broken")
        return run(text, parameters)

    graph.run = fail
    with pytest.raises(ValueError, match="broken"):
        Graph(graph).publish(events)
    assert graph.everything() == [[], [], [], []]
    Graph(graph).publish(events)
    assert len(graph.everything()[0]) == 3


def test_a_server_that_is_not_there_is_down(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events = fill(sqlite_url)["parcels"]
    nowhere = "bolt://127.0.0.1:1"
    options: dict[str, Any] = {"connection_timeout": 1, "max_transaction_retry_time": 0.1}
    with GraphDatabase.driver(nowhere, **options) as driver, pytest.raises(holdfast.SinkDown):
        Graph(driver).publish(events)
    monkeypatch.setenv("NEO4J_USERNAME", "neo4j")
    Graph(nowhere)._driver.close()
