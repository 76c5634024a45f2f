"""Documents for catalogues, DCAT and STAC, from the events of the log. Written without a library.

They contain only runs that succeeded and were not undone since.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.lineage import Event
from holdfast.lineage.prov import iri

SHAPES = Path(__file__).parent / "schemas" / "dcat.ttl"
"""SHACL shapes of what ``dcat`` returns."""
STAC_VERSION = "1.1.0"
WORLD = [-180.0, -90.0, 180.0, 90.0]
CONTEXT = {
    "dcat": "http://www.w3.org/ns/dcat#",
    "dct": "http://purl.org/dc/terms/",
    "prov": "http://www.w3.org/ns/prov#",
    "xsd": "http://www.w3.org/2001/XMLSchema#",
    "holdfast": "urn:holdfast:term:",
}

Node = dict[str, Any]


def effective(events: Sequence[Event]) -> list[Event]:
    """The COMPLETE events of runs that were not undone."""
    undone = {event.run for event in events if event.type == "UNDONE"}
    return [event for event in events if event.type == "COMPLETE" and event.run not in undone]


def dcat(events: Sequence[Event], dataset: str | None = None) -> Node:
    """A catalogue of the datasets that the events wrote, or of one dataset."""
    writes: dict[str, list[Event]] = {}
    for event in effective(events):
        for name in event.outputs:
            if dataset in (None, name):
                writes.setdefault(name, []).append(event)
    return {
        "@context": CONTEXT,
        "@id": "urn:holdfast:catalog",
        "@type": "dcat:Catalog",
        "dct:title": "Datasets written by operations",
        "dct:description": "From the log of operations.",
        "dcat:dataset": [_dataset(name, writes[name]) for name in sorted(writes)],
    }


def _dataset(name: str, writes: Sequence[Event]) -> Node:
    last, (begin, end) = writes[-1], _span(writes)
    contract = last.contract
    node = {
        "@id": iri("dataset", name),
        "@type": "dcat:Dataset",
        "dct:identifier": name,
        "dct:title": name,
        "dct:issued": _moment(begin),
        "dct:modified": _moment(end),
        "dcat:version": last.run,
        "prov:wasGeneratedBy": {"@id": f"urn:uuid:{last.run}", "@type": "prov:Activity"},
        "dct:source": [{"@id": iri("dataset", source)} for source in dict.fromkeys(_inputs(writes))],
        "dct:conformsTo": contract and {
            "@id": iri("contract", contract["name"], contract["version"]), "@type": "dct:Standard",
            "dct:title": f"{contract['name']} {contract['version']}", "holdfast:verdict": contract["verdict"],
        },
    }  # fmt: skip
    return {key: value for key, value in node.items() if value not in (None, [])}


def stac_item(events: Sequence[Event]) -> Node:
    """A STAC item for an operation. LookupError unless it has succeeded and was not undone."""
    runs = effective(events)
    if not runs:
        raise LookupError("the operation has no result to export: it has not succeeded, or was undone")
    last, (begin, end) = runs[-1], _span(runs)
    properties = {
        "datetime": last.at, "created": begin, "updated": end, "title": last.label,
        "holdfast:key": last.key, "holdfast:run": last.run, "holdfast:attempt": last.attempt,
        "holdfast:dataset": last.dataset, "holdfast:inputs": list(last.inputs), "holdfast:outputs": list(last.outputs),
        "holdfast:contract": last.contract, "holdfast:result_hash": last.result_hash,
    }  # fmt: skip
    return {
        "type": "Feature", "stac_version": STAC_VERSION, "id": last.run, "geometry": None,
        "properties": {name: value for name, value in properties.items() if value is not None},
        "links": [], "assets": {},
    }  # fmt: skip


def stac_collection(events: Sequence[Event], dataset: str) -> Node:
    """A STAC collection for a dataset, with the time from its first to its last write. LookupError if there is none."""
    writes = [event for event in effective(events) if dataset in event.outputs]
    if not writes:
        raise LookupError(f"no operation that succeeded, and was not undone, wrote dataset {dataset!r}")
    return {
        "type": "Collection", "stac_version": STAC_VERSION, "id": dataset, "title": dataset,
        "description": f"Written by {len(writes)} operations, the last of which is {writes[-1].label}.",
        "license": "other",
        "extent": {"spatial": {"bbox": [WORLD]}, "temporal": {"interval": [_span(writes)]}},
        "links": [], "holdfast:runs": [event.run for event in writes],
        "holdfast:inputs": list(dict.fromkeys(_inputs(writes))),
    }  # fmt: skip


def _inputs(events: Sequence[Event]) -> list[str]:
    return [name for event in events for name in event.inputs]


def _span(events: Sequence[Event]) -> list[str]:
    """The earliest and the latest time. The order of the log is no order of times: of two runs that write the same
    dataset beside their own, the one that ended first may have been committed last."""
    times = [event.at for event in events]
    return [min(times), max(times)]


def _moment(at: str) -> Node:
    return {"@value": at, "@type": "xsd:dateTime"}
