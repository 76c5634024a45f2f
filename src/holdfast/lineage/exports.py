"""Documents for catalogues, DCAT and STAC, from the events of the log. Written without a library.

They contain only runs that succeeded and were not undone since. What the log does not know (licence, geometry, files)
is given as ``descriptions``: a mapping from a dataset to its fields, see ``holdfast.lineage.descriptions``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.lineage import Event
from holdfast.lineage.descriptions import Description, Descriptions, outline, parse_descriptions
from holdfast.lineage.prov import iri

SHAPES = Path(__file__).parent / "schemas" / "dcat.ttl"
"""SHACL shapes of what ``dcat`` returns."""
STAC_VERSION = "1.1.0"
UNDESCRIBED = Description()
WORLD = [-180.0, -90.0, 180.0, 90.0]
CONTEXT = {
    "dcat": "http://www.w3.org/ns/dcat#",
    "dct": "http://purl.org/dc/terms/",
    "prov": "http://www.w3.org/ns/prov#",
    "xsd": "http://www.w3.org/2001/XMLSchema#",
    "foaf": "http://xmlns.com/foaf/0.1/",
    "geo": "http://www.opengis.net/ont/geosparql#",
    "locn": "http://www.w3.org/ns/locn#",
    "holdfast": "urn:holdfast:term:",
}

NO_PAGES = {"license", "self", "root", "parent", "child", "collection", "item", "items"}
"""Links to the licence, and those that structure a STAC catalogue."""
MEDIA_TYPES = "https://www.iana.org/assignments/media-types/"

Node = dict[str, Any]


def effective(events: Sequence[Event]) -> list[Event]:
    """The COMPLETE events of runs that were not undone."""
    undone = {event.run for event in events if event.type == "UNDONE"}
    return [event for event in events if event.type == "COMPLETE" and event.run not in undone]


def dcat(events: Sequence[Event], dataset: str | None = None, descriptions: Descriptions | None = None) -> Node:
    """A catalogue of the datasets that the events wrote, or of one dataset. The assets of a description are its
    distributions."""
    described = parse_descriptions(descriptions)
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
        "dcat:dataset": [_dataset(name, writes[name], described.get(name, UNDESCRIBED)) for name in sorted(writes)],
    }


def _dataset(name: str, writes: Sequence[Event], about: Description) -> Node:
    last, (begin, end) = writes[-1], _span(writes)
    contract = last.contract
    node = {
        "@id": iri("dataset", name),
        "@type": "dcat:Dataset",
        "dct:identifier": name,
        "dct:title": about.title or name,
        "dct:description": about.description,
        "dct:license": about.license_url and {"@id": about.license_url},
        "dct:spatial": _location(about),
        "dcat:distribution": [
            _distribution(name, key, asset, about.license_url) for key, asset in about.assets.items()
        ],
        "foaf:page": [{"@id": link["href"]} for link in about.links if link["rel"] not in NO_PAGES],
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
    return _without_empty(node)


def _distribution(dataset: str, name: str, asset: Mapping[str, Any], license_url: str | None) -> Node:
    target, media_type = {"@id": asset["href"]}, asset.get("type", "").partition(";")[0].strip() or None
    return _without_empty({
        "@id": iri("distribution", dataset, name),
        "@type": "dcat:Distribution",
        "dct:title": asset.get("title", name),
        "dct:description": asset.get("description"),
        "dct:license": license_url and {"@id": license_url},
        "dcat:accessURL": target,
        "dcat:downloadURL": target,
        "dcat:mediaType": media_type and {"@id": MEDIA_TYPES + media_type},
    })  # fmt: skip


def _location(about: Description) -> Node | None:
    if about.bbox is None:
        return None
    shape = outline(about.boxes)
    polygons = shape["coordinates"] if len(about.boxes) > 1 else [shape["coordinates"]]
    rings = [", ".join(f"{x} {y}" for x, y in ring) for [ring] in polygons]
    wkt = f"MULTIPOLYGON ({', '.join(f'(({ring}))' for ring in rings)})"
    return {
        "@type": "dct:Location",
        "dcat:bbox": {"@value": wkt, "@type": "geo:wktLiteral"},
        "locn:geometry": {"@value": json.dumps(about.geometry), "@type": "geo:geoJSONLiteral"},
    }


def stac_item(events: Sequence[Event], descriptions: Descriptions | None = None) -> Node:
    """A STAC item for an operation. LookupError unless it has succeeded and was not undone. Its description is that of
    its key, else that of a dataset that it wrote."""
    described = parse_descriptions(descriptions)
    runs = effective(events)
    if not runs:
        raise LookupError("the operation has no result to export: it has not succeeded, or was undone")
    last, (begin, end) = runs[-1], _span(runs)
    about = next((described[name] for name in (last.key, last.label, *last.outputs) if name in described), UNDESCRIBED)
    properties = {
        "datetime": last.at, "created": begin, "updated": end, "title": about.title or last.label,
        "description": about.description, "license": about.license,
        "holdfast:key": last.key, "holdfast:run": last.run, "holdfast:attempt": last.attempt,
        "holdfast:dataset": last.dataset, "holdfast:inputs": list(last.inputs), "holdfast:outputs": list(last.outputs),
        "holdfast:contract": last.contract, "holdfast:result_hash": last.result_hash,
    }  # fmt: skip
    item: Node = {
        "type": "Feature", "stac_version": STAC_VERSION, "id": last.run, "geometry": about.geometry,
        "properties": {name: value for name, value in properties.items() if value is not None},
        "links": list(about.links), "assets": dict(about.assets),
    }  # fmt: skip
    if about.bbox is not None:
        item["bbox"] = about.bbox
    if any(link["rel"] == "collection" for link in about.links):
        if not last.outputs:
            raise ValueError("a link has the rel 'collection', but the operation wrote no dataset")
        item["collection"] = last.outputs[0]
    return item


def stac_collection(events: Sequence[Event], dataset: str, descriptions: Descriptions | None = None) -> Node:
    """A STAC collection for a dataset, with the time from its first to its last write. LookupError if there is none."""
    about = parse_descriptions(descriptions).get(dataset, UNDESCRIBED)
    writes = [event for event in effective(events) if dataset in event.outputs]
    if not writes:
        raise LookupError(f"no operation that succeeded, and was not undone, wrote dataset {dataset!r}")
    summary = f"Written by {len(writes)} operations, the last of which is {writes[-1].label}."
    return {
        "type": "Collection", "stac_version": STAC_VERSION, "id": dataset, "title": about.title or dataset,
        "description": about.description or summary, "license": about.license or "other",
        "extent": {"spatial": {"bbox": [about.bbox or WORLD]}, "temporal": {"interval": [_span(writes)]}},
        "links": list(about.links), "assets": dict(about.assets), "holdfast:runs": [event.run for event in writes],
        "holdfast:inputs": list(dict.fromkeys(_inputs(writes))),
    }  # fmt: skip


def _without_empty(node: Node) -> Node:
    return {name: value for name, value in node.items() if value not in (None, [])}


def _inputs(events: Sequence[Event]) -> list[str]:
    return [name for event in events for name in event.inputs]


def _span(events: Sequence[Event]) -> list[str]:
    """The earliest and the latest time. The order of the log is no order of times: of two runs that write the same
    dataset beside their own, the one that ended first may have been committed last."""
    times = [event.at for event in events]
    return [min(times), max(times)]


def _moment(at: str) -> Node:
    return {"@value": at, "@type": "xsd:dateTime"}
