"""PROV-O: read back by prov and by rdflib as what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prov.constants import XSD
from prov.model import Literal, ProvDocument
from rdflib import Graph
from rdflib.compare import isomorphic

from holdfast.lineage.prov import Prov, document, iri, turtle
from holdfast.lineage.sinks import open_sink
from tests.lineage.sample_log import fill

# rdflib's own readers use what rdflib has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:rdflib")


def graph(text: str, form: str) -> Graph:
    return Graph().parse(data=text, format=form)


def test_it_is_read_back_as_what_it_was(sqlite_url: str) -> None:
    events = fill(sqlite_url)["parcels"]
    start, message, complete = events
    node = document(events)
    text = json.dumps(node)
    parsed = ProvDocument.deserialize(content=text, format="rdf", rdf_format="json-ld")

    wanted = ProvDocument()
    wanted.add_namespace("hf", "urn:holdfast:term:")
    wanted.add_namespace("rdfs", "http://www.w3.org/2000/01/rdf-schema#")
    wanted.add_namespace("uuid", "urn:uuid:")
    wanted.add_namespace("d", "urn:holdfast:dataset:")
    wanted.add_namespace("v", "urn:holdfast:version:parcels:")
    wanted.add_namespace("c", "urn:holdfast:contract:parcels:")
    wanted.add_namespace("a", "urn:holdfast:agent:")
    run, version = f"uuid:{complete.run}", f"v:{complete.run}"
    wanted.activity(run, start.at, complete.at, {
        "prov:label": complete.label, "hf:key": complete.key, "hf:attempt": Literal("1", XSD["integer"]),
        "hf:verdict": "passed", "hf:outcome": "COMPLETE",
    })  # fmt: skip
    wanted.agent("a:jane", {"prov:label": "jane"})
    wanted.entity("d:raw%3A%20%C3%A4", {"prov:label": "raw: ä"})
    wanted.entity("d:parcels", {"prov:label": "parcels"})
    wanted.entity("c:2.1", {"prov:type": wanted.valid_qualified_name("prov:Plan"), "prov:label": "parcels"})
    wanted.entity(f"uuid:{message.id}", {"hf:topic": "loaded", "prov:value": '{"rows":7}'})
    wanted.entity(version, {
        "hf:resultHash": complete.result_hash,
        "prov:generatedAtTime": Literal(complete.at.replace("Z", "+00:00"), XSD["dateTime"]),
    })  # fmt: skip
    wanted.wasAssociatedWith(run, "a:jane")
    wanted.used(run, "d:raw%3A%20%C3%A4")
    wanted.used(run, "c:2.1")
    wanted.wasGeneratedBy(f"uuid:{message.id}", run)
    wanted.wasGeneratedBy(version, run)
    wanted.wasDerivedFrom(version, "d:raw%3A%20%C3%A4")
    wanted.specializationOf(version, "d:parcels")
    assert parsed.unified() == wanted.unified()

    assert isomorphic(graph(text, "json-ld"), graph(turtle(node), "turtle"))
    again = ProvDocument.deserialize(content=turtle(node), format="rdf", rdf_format="turtle")
    assert again.unified() == parsed.unified()


def test_only_what_succeeded_generates_anything_and_what_was_undone_is_invalid(sqlite_url: str) -> None:
    events = fill(sqlite_url)
    failed = {node["@id"]: node for node in document(events["roads"])["@graph"]}
    assert not any("prov:wasGeneratedBy" in node for node in failed.values())
    run = failed[f"urn:uuid:{events['roads'][0].run}"]
    assert (run["holdfast:outcome"], run["holdfast:error"]) == ("FAIL", "ValueError: broken")
    undone = {node["@id"]: node for node in document(events["rivers"])["@graph"]}
    for name in ("rivers", "lakes"):
        version = undone[iri("version", name, events["rivers"][0].run)]
        assert version["prov:invalidatedAtTime"]["@value"] == events["rivers"][-1].at
        assert version["holdfast:undone"] == "rolled back by jane: wrong"


def test_a_sink_that_is_told_twice_says_the_same(sqlite_url: str, tmp_path: Path) -> None:
    events = [event for each in fill(sqlite_url).values() for event in each]
    whole = graph(json.dumps(document(events)), "json-ld")
    lines, text = tmp_path / "prov.jsonl", tmp_path / "prov.ttl"
    for path in (lines, text):
        Prov(path).publish(events)
        Prov(path).publish(events[2:5])
    together = Graph()
    for line in lines.read_text(encoding="utf-8").splitlines():
        together.parse(data=line, format="json-ld")
    assert isomorphic(together, whole)
    assert isomorphic(graph(text.read_text(encoding="utf-8"), "turtle"), whole)
    content = text.read_bytes()
    for cut in range(0, len(content) // 2, 2003):  # as a crash, or a full disk, leaves it
        text.write_bytes(content[:cut])
        Prov(text).publish(events)
        assert isomorphic(graph(text.read_text(encoding="utf-8"), "turtle"), whole), cut


def test_turtle_without_its_library_is_told_before_anything_is_parked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.lineage.prov.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"^a \.ttl file .* needs rdflib: pip install 'holdfast\[prov\]'$"):
        Prov(tmp_path / "prov.ttl")
    with pytest.raises(ValueError, match=r"^rdflib is not installed: pip install 'holdfast\[prov\]'$"):
        open_sink(f"prov:{tmp_path / 'prov.ttl'}")
    Prov(tmp_path / "prov.jsonl")
