"""A sink that writes PROV-O: a run is an activity, a dataset it wrote is an entity (a version), its actor is an agent.

JSON-LD is written without a library, Turtle with rdflib. IRIs are stable: documents about the same run can be merged,
and an event that is sent twice adds nothing. Only runs that succeeded generate versions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from holdfast.lineage import Event
from holdfast.lineage.jsonlines import append

if TYPE_CHECKING:
    from rdflib import Graph

CONTEXT = {
    "prov": "http://www.w3.org/ns/prov#",
    "xsd": "http://www.w3.org/2001/XMLSchema#",
    "rdfs": "http://www.w3.org/2000/01/rdf-schema#",
    "holdfast": "urn:holdfast:term:",
}

ENERGY = {"energy_joules": "estimatedEnergyJoules", "carbon_grams": "estimatedCarbonGrams"}

Node = dict[str, Any]


class Prov:
    """Appends to a file: a JSON-LD document per line, or Turtle if its name ends with ``.ttl``, a statement per line.
    ``-`` is the console. After a crash some lines of an event may be there, which is sent again; lines are complete."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        if self._path.suffix == ".ttl" and find_spec("rdflib") is None:  # else every event would be parked
            raise ModuleNotFoundError(
                "a .ttl file (RDF Turtle) needs rdflib: pip install 'holdfast[prov]'", name="rdflib"
            )

    def publish(self, events: Sequence[Event]) -> None:
        documents = [document([event]) for event in events]
        if self._path.suffix == ".ttl":
            lines = [line for node in documents for line in sorted(_n_triples(node))]
        else:
            lines = [json.dumps(node, separators=(",", ":"), sort_keys=True) for node in documents]
        append(self._path, "".join(f"{line}\n" for line in lines))


def document(events: Iterable[Event]) -> Node:
    """The events as one JSON-LD document."""
    nodes: dict[str, Node] = {}
    for event in events:
        for node in _nodes(event):
            _add(nodes.setdefault(node["@id"], {}), node)
    return {"@context": CONTEXT, "@graph": [nodes[name] for name in sorted(nodes)]}


def turtle(document: Node) -> str:
    """The document as Turtle. Needs rdflib."""
    return _graph(document).serialize(format="turtle")


def _n_triples(document: Node) -> list[str]:
    """The document as N-Triples, which are valid Turtle, too."""
    return [line for line in _graph(document).serialize(format="nt").split("\n") if line]


def _graph(document: Node) -> Graph:
    from rdflib import Graph

    return Graph().parse(data=json.dumps(document), format="json-ld")


def iri(kind: str, *names: str) -> str:
    return f"urn:holdfast:{kind}:" + ":".join(quote(name, safe="") for name in names)


def _nodes(event: Event) -> Iterable[Node]:
    run: Node = {
        "@id": f"urn:uuid:{event.run}", "@type": "prov:Activity", "rdfs:label": event.label,
        "holdfast:key": event.key, "holdfast:attempt": event.attempt,
    }  # fmt: skip
    for name in event.inputs:
        yield _dataset(name)
        _add(run, {"prov:used": {"@id": iri("dataset", name)}})
    if event.actor is not None:
        yield {"@id": iri("agent", event.actor), "@type": "prov:Agent", "rdfs:label": event.actor}
        _add(run, {"prov:wasAssociatedWith": {"@id": iri("agent", event.actor)}})
    if event.sovereignty_event:
        _add(run, {"holdfast:sovereigntyEvent": True})
    if event.contract is not None:
        contract = iri("contract", event.contract["name"], event.contract["version"])
        yield {"@id": contract, "@type": ["prov:Entity", "prov:Plan"], "rdfs:label": event.contract["name"]}
        _add(run, {"prov:used": {"@id": contract}, "holdfast:verdict": event.contract.get("verdict")})
    at = {"@value": event.at, "@type": "xsd:dateTime"}
    if event.type == "START":
        _add(run, {"prov:startedAtTime": at})
    elif event.type in ("COMPLETE", "FAIL"):
        _add(run, {"prov:endedAtTime": at, "holdfast:outcome": event.type, "holdfast:error": event.error})
        if event.energy is not None:
            _add(run, {f"holdfast:{term}": event.energy[name] for name, term in ENERGY.items()})
    elif event.type == "MESSAGE":
        payload = json.dumps(event.payload, separators=(",", ":"), sort_keys=True)
        yield {
            "@id": f"urn:uuid:{event.id}", "@type": "prov:Entity", "holdfast:topic": event.topic, "prov:value": payload,
            "prov:wasGeneratedBy": {"@id": run["@id"]},
        }  # fmt: skip
    for name in event.outputs:
        yield _dataset(name)
        yield _version(event, name, at)
    yield run


def _dataset(name: str) -> Node:
    return {"@id": iri("dataset", name), "@type": "prov:Entity", "rdfs:label": name}


def _version(event: Event, name: str, at: Node) -> Node:
    """The version of a dataset that a run wrote, or that it was undone."""
    version: Node = {"@id": iri("version", name, event.run), "@type": "prov:Entity"}
    if event.type == "UNDONE":
        return {**version, "prov:invalidatedAtTime": at, "holdfast:undone": event.error}
    return {
        **version,
        "prov:specializationOf": {"@id": iri("dataset", name)},
        "prov:wasGeneratedBy": {"@id": f"urn:uuid:{event.run}"},
        "prov:generatedAtTime": at,
        "prov:wasDerivedFrom": [{"@id": iri("dataset", each)} for each in event.inputs] or None,
        "holdfast:resultHash": event.result_hash,
    }


def _add(node: Node, more: Node) -> None:
    """Merge ``more`` into ``node``: a new value is added beside the present ones, an equal one only once."""
    for name, value in more.items():
        if value is None:
            continue
        present = node.get(name)
        if present is None or name == "@id":
            node[name] = value
            continue
        values = present if isinstance(present, list) else [present]
        added = [each for each in (value if isinstance(value, list) else [value]) if each not in values]
        if added:
            node[name] = [*values, *added]
