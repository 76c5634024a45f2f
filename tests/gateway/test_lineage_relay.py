"""The relay of lineage that a replica runs when one is configured."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import holdfast
from tests.children import eventually
from tests.gateway.replicas import Replica


def test_one_replica_publishes_until_it_stops_and_another_continues(either: str, tmp_path: Path) -> None:
    """On SQLite, which allows one replica at a time, the next one is started after the first."""
    file, single = tmp_path / "lineage.jsonl", either.startswith("sqlite")
    replicas = [
        Replica(either, tmp_path, "--relay", f"catalogue=jsonl:{file}", name=name, driver="unix:/nowhere/driver.sock")
        for name in (("one",) if single else ("one", "two"))
    ]

    def published() -> list[dict[str, Any]]:
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def relay() -> Any:
        [record] = client.relays.list()
        return record

    def has_saved() -> bool:
        """Whether everything is published, and would not be published again."""
        return bool(published()) and relay().entries == 0

    with holdfast.Client(either) as client, ExitStack() as stack:
        for replica in replicas:
            stack.enter_context(replica)
        client.operation("a").run(lambda: 1)
        eventually(has_saved, "START and COMPLETE are published")
        assert len(published()) == 2
        holder = relay().holder
        [first] = [replica for replica in replicas if holder.startswith(replica.name)]
        eventually(lambda: "holdfast_relay_lag_events 0" in first.http.get("/metrics").text, "it reports its lag")

        if single:
            assert first.end() == 0
            assert relay().holder is None, "it has stopped and released its lease"
            first.restart()
        else:
            first.process.send_signal(signal.SIGUSR1)
        eventually(lambda: relay().holder not in (None, holder), "another has taken the relay over")
        client.operation("b").run(lambda: 1)
        eventually(lambda: has_saved() and len(published()) == 4, "it publishes the next events")
        assert len({event["id"] for event in published()}) == 4, "none was published twice"

        for replica in replicas:
            assert replica.end() == 0
        assert relay().holder is None
