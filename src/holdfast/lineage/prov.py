"""Events as PROV-O: a run is an activity, what it wrote is a version of a dataset, who did it is an agent.

JSON-LD, made without any library; Turtle with rdflib. Names of things do not change, so documents about the same run
add up: what is told twice says nothing new. Only what succeeded generates anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from holdfast import Event
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
    """Into a file: a document a line, or Turtle if its name ends with ``.ttl``, a statement a line; ``-`` is the
    console. A crash may leave a part of what was told, which is told again, and never a part of a line."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        if self._path.suffix == ".ttl" and find_spec("rdflib") is None:  # later, every event would be parked for it
            raise ModuleNotFoundError("Turtle needs rdflib: pip install 'holdfast[prov]'", name="rdflib")

    def publish(self, events: Sequence[Event]) -> None:
        made = [document([event]) for event in events]
        if self._path.suffix == ".ttl":
            append(self._path, "".join(f"{line}\n" for each in made for line in sorted(_statements(each))))
        else:
            append(self._path, "".join(f"{json.dumps(each, separators=(',', ':'), sort_keys=True)}\n" for each in made))


def document(events: Iterable[Event]) -> Node:
    """All that they say, as one JSON-LD document."""
    nodes: dict[str, Node] = {}
    for event in events:
        for node in _nodes(event):
            _add(nodes.setdefault(node["@id"], {}), node)
    return {"@context": CONTEXT, "@graph": [nodes[name] for name in sorted(nodes)]}


def turtle(made: Node) -> str:
    """The same as Turtle, which needs rdflib."""
    return _graph(made).serialize(format="turtle")


def _statements(made: Node) -> list[str]:
    """The same as N-Triples, which are Turtle as well."""
    return [line for line in _graph(made).serialize(format="nt").split("\n") if line]


def _graph(made: Node) -> Graph:
    from rdflib import Graph

    return Graph().parse(data=json.dumps(made), format="json-ld")


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
        agreed = iri("contract", event.contract["name"], event.contract["version"])
        yield {"@id": agreed, "@type": ["prov:Entity", "prov:Plan"], "rdfs:label": event.contract["name"]}
        _add(run, {"prov:used": {"@id": agreed}, "holdfast:verdict": event.contract.get("verdict")})
    when = {"@value": event.at, "@type": "xsd:dateTime"}
    if event.type == "START":
        _add(run, {"prov:startedAtTime": when})
    elif event.type in ("COMPLETE", "FAIL"):
        _add(run, {"prov:endedAtTime": when, "holdfast:outcome": event.type, "holdfast:error": event.error})
        if event.energy is not None:
            _add(run, {f"holdfast:{to}": event.energy[name] for name, to in ENERGY.items()})
    elif event.type == "MESSAGE":
        payload = json.dumps(event.payload, separators=(",", ":"), sort_keys=True)
        yield {
            "@id": f"urn:uuid:{event.id}", "@type": "prov:Entity", "holdfast:topic": event.topic, "prov:value": payload,
            "prov:wasGeneratedBy": {"@id": run["@id"]},
        }  # fmt: skip
    for name in event.outputs:
        yield _dataset(name)
        yield _version(event, name, when)
    yield run


def _dataset(name: str) -> Node:
    return {"@id": iri("dataset", name), "@type": "prov:Entity", "rdfs:label": name}


def _version(event: Event, name: str, when: Node) -> Node:
    """What a run made of a dataset; or that it was undone."""
    found: Node = {"@id": iri("version", name, event.run), "@type": "prov:Entity"}
    if event.type == "UNDONE":
        return {**found, "prov:invalidatedAtTime": when, "holdfast:undone": event.error}
    return {
        **found,
        "prov:specializationOf": {"@id": iri("dataset", name)},
        "prov:wasGeneratedBy": {"@id": f"urn:uuid:{event.run}"},
        "prov:generatedAtTime": when,
        "prov:wasDerivedFrom": [{"@id": iri("dataset", each)} for each in event.inputs] or None,
        "holdfast:resultHash": event.result_hash,
    }


def _add(node: Node, more: Node) -> None:
    """What is said twice stands there once; what is said anew stands beside it."""
    for name, value in more.items():
        if value is None:
            continue
        known = node.get(name)
        if known is None or name == "@id":
            node[name] = value
            continue
        values = known if isinstance(known, list) else [known]
        fresh = [each for each in (value if isinstance(value, list) else [value]) if each not in values]
        if fresh:
            node[name] = [*values, *fresh]
