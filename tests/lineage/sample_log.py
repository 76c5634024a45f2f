"""A log with three operations: one succeeded, one failed, and one was undone."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.lineage import Contract, Lineage


def key(dataset: str) -> holdfast.OperationKey:
    return holdfast.OperationKey(pipeline="etl", task="load", dataset=dataset, operation="upsert", checksum="abc")


def fill(url: str) -> dict[str, list[holdfast.lineage.Event]]:
    """Run the operations. Returns their events by dataset."""

    def load(op: Any) -> int:
        op.emit("loaded", {"rows": 7})
        return 7

    def fail() -> None:
        raise ValueError("broken")

    with holdfast.Client(url) as client:
        client.operations.register("undo", rollback=lambda: None)
        contract = Contract("parcels", "2.1", lambda: True)
        options: dict[str, Any] = {
            "lineage": Lineage(inputs=["raw: ä"], contract=contract),
            "actor": "jane",
            "justification": "asked",
        }
        client.operation(key("parcels"), **options).run(load)
        with pytest.raises(ValueError, match="broken"):
            client.operation(key("roads"), lineage=Lineage(inputs=["raw: ä"])).run(fail)
        client.operation(key("rivers"), rollback="undo", lineage=Lineage(outputs=["rivers", "lakes"])).run(load)
        client.operations.rollback(key("rivers"), actor="jane", reason="wrong")
        return {name: list(client.relays.events(key(name))) for name in ("parcels", "roads", "rivers")}
