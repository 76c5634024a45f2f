"""What the log says of an operation or a dataset, as documents for catalogues: DCAT and STAC. Made without any library;
only what succeeded, and was not undone since, is in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast import Event
from holdfast.lineage.prov import iri

SHAPES = Path(__file__).parent / "schemas" / "dcat.ttl"
"""What ``dcat`` gives, as SHACL."""
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


def standing(events: Sequence[Event]) -> list[Event]:
    """The runs that changed data, and were not undone."""
    undone = {event.run for event in events if event.type == "UNDONE"}
    return [event for event in events if event.type == "COMPLETE" and event.run not in undone]


def dcat(events: Sequence[Event], dataset: str | None = None) -> Node:
    """A catalogue of the datasets that they wrote, or of that one."""
    writes: dict[str, list[Event]] = {}
    for event in standing(events):
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
    found = {
        "@id": iri("dataset", name),
        "@type": "dcat:Dataset",
        "dct:identifier": name,
        "dct:title": name,
        "dct:issued": _moment(begin),
        "dct:modified": _moment(end),
        "dcat:version": last.run,
        "prov:wasGeneratedBy": {"@id": f"urn:uuid:{last.run}", "@type": "prov:Activity"},
        "dct:source": [{"@id": iri("dataset", each)} for each in dict.fromkeys(_inputs(writes))],
        "dct:conformsTo": contract and {
            "@id": iri("contract", contract["name"], contract["version"]), "@type": "dct:Standard",
            "dct:title": f"{contract['name']} {contract['version']}", "holdfast:verdict": contract["verdict"],
        },
    }  # fmt: skip
    return {key: value for key, value in found.items() if value not in (None, [])}


def stac_item(events: Sequence[Event]) -> Node:
    """An operation that succeeded, as an item. LookupError when it has not."""
    found = standing(events)
    if not found:
        raise LookupError("it has not succeeded, or was undone: there is nothing that a catalogue could have")
    last, (begin, end) = found[-1], _span(found)
    about = {
        "datetime": last.at, "created": begin, "updated": end, "title": last.label,
        "holdfast:key": last.key, "holdfast:run": last.run, "holdfast:attempt": last.attempt,
        "holdfast:dataset": last.dataset, "holdfast:inputs": list(last.inputs), "holdfast:outputs": list(last.outputs),
        "holdfast:contract": last.contract, "holdfast:result_hash": last.result_hash,
    }  # fmt: skip
    return {
        "type": "Feature", "stac_version": STAC_VERSION, "id": last.run, "geometry": None,
        "properties": {name: value for name, value in about.items() if value is not None}, "links": [], "assets": {},
    }  # fmt: skip


def stac_collection(events: Sequence[Event], dataset: str) -> Node:
    """A dataset, as a collection: from when to when it was written. LookupError when nothing was."""
    found = [event for event in standing(events) if dataset in event.outputs]
    if not found:
        raise LookupError(f"nothing that succeeded, and was not undone, wrote dataset {dataset!r}")
    return {
        "type": "Collection", "stac_version": STAC_VERSION, "id": dataset, "title": dataset,
        "description": f"Written by {len(found)} operations, the last of which is {found[-1].label}.",
        "license": "other",
        "extent": {"spatial": {"bbox": [WORLD]}, "temporal": {"interval": [_span(found)]}},
        "links": [], "holdfast:runs": [event.run for event in found],
        "holdfast:inputs": list(dict.fromkeys(_inputs(found))),
    }  # fmt: skip


def _inputs(events: Sequence[Event]) -> list[str]:
    return [name for event in events for name in event.inputs]


def _span(events: Sequence[Event]) -> list[str]:
    """From when to when. They stand in the order of the log, and clocks may say otherwise: of two that write the same
    beside datasets of their own, the one that ended first may have been committed last."""
    times = [event.at for event in events]
    return [min(times), max(times)]


def _moment(at: str) -> Node:
    return {"@value": at, "@type": "xsd:dateTime"}
