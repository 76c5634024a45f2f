"""Publishes the events of the log to sinks, in order, and exports them to catalogues.

``Lineage`` says what an operation reads and writes, ``Contract`` what its data has to meet, ``Energy`` what it costs. A
sink gets ``Event`` objects; the sinks of this package are modules of it (``jsonlines``, ``openlineage``, …).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lazy_names import lazy_names

if TYPE_CHECKING:
    from holdfast.lineage.relay import Relay, Sink
    from holdfast.lineage.relay_async import AsyncRelay, AsyncSink
    from holdfast.operations.energy import Energy, Estimate
    from holdfast.operations.events import Event
    from holdfast.operations.lineage_terms import Contract, Lineage

__all__ = ["AsyncRelay", "AsyncSink", "Contract", "Energy", "Estimate", "Event", "Lineage", "Relay", "Sink"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "AsyncRelay": "holdfast.lineage.relay_async",
            "AsyncSink": "holdfast.lineage.relay_async",
            "Contract": "holdfast.operations.lineage_terms",
            "Energy": "holdfast.operations.energy",
            "Estimate": "holdfast.operations.energy",
            "Event": "holdfast.operations.events",
            "Lineage": "holdfast.operations.lineage_terms",
            "Relay": "holdfast.lineage.relay",
            "Sink": "holdfast.lineage.relay",
        },
    )
