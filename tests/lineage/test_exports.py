"""Exports for catalogues: STAC by pystac and its own schemas, DCAT by the shapes that we ship. Nothing is looked up."""

from __future__ import annotations

import copy
import json
import socket
from dataclasses import replace
from typing import Any
from uuid import UUID

import pyshacl
import pystac
import pytest
from pystac.validation import validate_dict
from rdflib import Graph

from holdfast.lineage import exports
from tests.cli.command import ask, at, call
from tests.lineage.sample_log import fill, key

# rdflib's own readers use what rdflib has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:rdflib")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("it looked something up")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def conforms(document: Any) -> bool:
    graph = Graph().parse(data=json.dumps(document), format="json-ld")
    shapes = Graph().parse(exports.SHAPES, format="turtle")
    return bool(pyshacl.validate(graph, shacl_graph=shapes)[0])


def test_dcat_has_what_stands_and_is_as_our_shapes_say(sqlite_url: str) -> None:
    events = [event for each in fill(sqlite_url).values() for event in each]
    document = exports.dcat(events)
    assert [each["dct:identifier"] for each in document["dcat:dataset"]] == ["parcels"]
    assert conforms(document)
    [dataset] = document["dcat:dataset"]
    assert dataset["dct:conformsTo"]["holdfast:verdict"] == "passed"
    assert dataset["prov:wasGeneratedBy"]["@id"] == f"urn:uuid:{events[0].run}"
    for name in ("dct:identifier", "dct:title", "dct:modified", "dct:issued", "prov:wasGeneratedBy", "dcat:version"):
        wrong = copy.deepcopy(document)
        del wrong["dcat:dataset"][0][name]
        assert not conforms(wrong), name
    assert exports.dcat(events, "roads")["dcat:dataset"] == []


def test_stac_is_what_pystac_says(sqlite_url: str) -> None:
    events = fill(sqlite_url)
    item = exports.stac_item(events["parcels"])
    collection = exports.stac_collection(events["parcels"], "parcels")
    for document, kind in ((item, pystac.Item), (collection, pystac.Collection)):
        validate_dict(document)
        read = kind.from_dict(document)
        assert read.validate()
        assert read.id == document["id"]
        with pytest.raises(pystac.STACValidationError):
            validate_dict({name: value for name, value in document.items() if name not in ("properties", "extent")})
    assert item["properties"]["holdfast:contract"] == {"name": "parcels", "version": "2.1", "verdict": "passed"}
    assert collection["extent"]["temporal"]["interval"] == [[events["parcels"][-1].at] * 2]
    for name in ("roads", "rivers"):
        with pytest.raises(LookupError):
            exports.stac_item(events[name])
        with pytest.raises(LookupError, match=name):
            exports.stac_collection(events[name], name)


def test_from_when_to_when_is_so_in_whatever_order_they_were_committed(sqlite_url: str) -> None:
    [*_, last] = fill(sqlite_url)["parcels"]
    earlier = replace(last, at="2020-01-01T00:00:00.000000Z", run=str(UUID(int=7)))
    document = exports.dcat([last, earlier])
    assert conforms(document)
    [dataset] = document["dcat:dataset"]
    assert [dataset[name]["@value"] for name in ("dct:issued", "dct:modified")] == [earlier.at, last.at]
    collection = exports.stac_collection([last, earlier], "parcels")
    assert collection["extent"]["temporal"]["interval"] == [[earlier.at, last.at]]


def test_the_command_writes_them(sqlite_url: str) -> None:
    events = fill(sqlite_url)
    digest = key("parcels").digest
    about = json.loads(ask(*at(sqlite_url, "ops", "export", digest)))
    assert f"urn:uuid:{events['parcels'][0].run}" in {node["@id"] for node in about["@graph"]}
    assert "prov:Activity" in ask(*at(sqlite_url, "ops", "export", digest, "--format", "turtle"))
    of_dataset = json.loads(ask(*at(sqlite_url, "ops", "export", "--dataset", "lakes")))
    [run] = [node for node in of_dataset["@graph"] if node["@type"] == "prov:Activity"]
    assert "prov:startedAtTime" in run, "all of the run, not only what names the dataset"
    assert len(json.loads(ask(*at(sqlite_url, "ops", "export", "--dataset", "raw: ä", "--format", "dcat")))) == 6
    assert (
        json.loads(ask(*at(sqlite_url, "ops", "export", "--dataset", "parcels", "--format", "stac")))["id"] == "parcels"
    )
    item = json.loads(ask(*at(sqlite_url, "ops", "export", digest, "--format", "stac")))
    assert item["id"] == events["parcels"][0].run
    for wrong, code in (
        ((), 2),
        (("a", "--dataset", "b"), 2),
        (("nothing",), 1),
        (("--dataset", "roads", "--format", "stac"), 1),
    ):
        assert call(*at(sqlite_url, "ops", "export", *wrong)).returncode == code, wrong
