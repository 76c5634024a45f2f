"""Exports for catalogues: STAC by pystac and its own schemas, DCAT by the shapes that we ship. Nothing is looked up."""

from __future__ import annotations

import copy
import json
import socket
from dataclasses import replace
from pathlib import Path
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


DESCRIPTIONS: dict[str, Any] = {
    "parcels": {
        "title": "Parcels", "description": "All parcels.", "license": "CC-BY-4.0", "bbox": [9.5, 46.4, 17.2, 49.0],
        "assets": {
            "data": {"href": "s3://a/parcels.gpkg", "type": "application/geopackage+sqlite3; v=1", "roles": ["data"]},
            "map": {"href": "https://example.org/map.png", "title": "A map"},
        },
        "links": [
            {"rel": "collection", "href": "https://example.org/parcels.json", "type": "application/json"},
            {"rel": "about", "href": "https://example.org/parcels"},
        ],
    },
    "islands": {
        "license": "other", "bbox": [177, -20, -178, -12], "links": [{"rel": "license", "href": "https://example.org/l"}],
    },
}  # fmt: skip
POINT = {"type": "Point", "coordinates": [16.37, 48.2]}


def test_what_the_caller_describes_is_in_the_exports(sqlite_url: str) -> None:
    events = fill(sqlite_url)["parcels"]
    given = DESCRIPTIONS["parcels"]
    item = exports.stac_item(events, DESCRIPTIONS)
    collection = exports.stac_collection(events, "parcels", DESCRIPTIONS)
    for document, kind in ((item, pystac.Item), (collection, pystac.Collection)):
        validate_dict(document)
        read = kind.from_dict(document)
        assert read.assets["data"].href == "s3://a/parcels.gpkg"
        assert {link.rel for link in read.links} >= {"collection", "about"}
    assert (item["bbox"], item["properties"]["license"], item["collection"]) == (given["bbox"], "CC-BY-4.0", "parcels")
    assert item["geometry"]["coordinates"] == [[[9.5, 46.4], [17.2, 46.4], [17.2, 49.0], [9.5, 49.0], [9.5, 46.4]]]
    assert (collection["license"], collection["extent"]["spatial"]["bbox"]) == ("CC-BY-4.0", [given["bbox"]])
    own = exports.stac_item(events, {**DESCRIPTIONS, events[0].key: {"geometry": POINT}})
    validate_dict(own)
    assert (own["geometry"], own["bbox"], own["assets"]) == (POINT, [16.37, 48.2, 16.37, 48.2], {}), "of the operation"

    document = exports.dcat(events, "parcels", DESCRIPTIONS)
    assert conforms(document)
    [dataset] = document["dcat:dataset"]
    assert (dataset["dct:title"], dataset["dct:license"]["@id"], dataset["foaf:page"]) == (
        "Parcels", "https://spdx.org/licenses/CC-BY-4.0", [{"@id": "https://example.org/parcels"}],
    )  # fmt: skip
    data, map_ = dataset["dcat:distribution"]
    assert data["dcat:mediaType"]["@id"].endswith("/media-types/application/geopackage+sqlite3")
    assert (data["dcat:downloadURL"]["@id"], map_["dct:title"]) == ("s3://a/parcels.gpkg", "A map")
    for node, name in ((data, "dcat:accessURL"), (map_, "dct:title"), (dataset["dct:spatial"], "dcat:bbox")):
        value = node.pop(name)
        assert not conforms(document), name
        node[name] = value
    assert conforms(document)


def test_a_description_may_cross_the_antimeridian(sqlite_url: str) -> None:
    event = replace(fill(sqlite_url)["parcels"][-1], outputs=("islands",))
    item = exports.stac_item([event], DESCRIPTIONS)
    validate_dict(item)
    assert [ring[0][0] for [ring] in item["geometry"]["coordinates"]] == [177, -180]
    document = exports.dcat([event], "islands", DESCRIPTIONS)
    assert conforms(document)
    [dataset] = document["dcat:dataset"]
    assert dataset["dct:spatial"]["dcat:bbox"]["@value"].startswith("MULTIPOLYGON (((177 -20, 180 -20, ")
    assert dataset["dct:license"] == {"@id": "https://example.org/l"}


@pytest.mark.parametrize(
    ("description", "told"),
    [
        ([], "it must be an object"),
        ({"licence": "MIT"}, "unknown field 'licence'; the fields are title, "),
        ({"license": "my own"}, "license must be an SPDX identifier or 'other', not 'my own'"),
        ({"title": ""}, "title must be text"),
        ({"bbox": [1, 2, 3]}, "bbox must have 4 or 6 numbers"),
        ({"bbox": [9, 49, 17, 46]}, "bbox must have its lower limits first"),
        ({"bbox": [9, 46, 17, 10**400]}, "bbox must be longitude and latitude in degrees"),
        ({"bbox": [9, 46, 17, float("nan")]}, "bbox must be longitude and latitude in degrees"),
        ({"geometry": {"type": "Feature"}}, "geometry must be a GeoJSON geometry, such as a Polygon"),
        ({"geometry": {"type": "Point", "coordinates": [625000, 483000]}}, "longitude and latitude in degrees"),
        ({"geometry": {"type": "Polygon", "coordinates": [[[0, 0], [1, 0], [1, 1], [0, 1]]]}},
         r"geometry\.coordinates\[0\] must have at least 4 elements, the last of which is the first"),
        ({"geometry": {"type": "GeometryCollection", "geometries": [{"type": "LineString", "coordinates": [[0, 0]]}]}},
         r"geometry\.geometries\[0\]\.coordinates must have at least 2 elements"),
        ({"geometry": {"type": "GeometryCollection", "geometries": []}}, "geometry must contain a position"),
        ({"assets": {"data": {"href": "parcels.gpkg"}}}, r"assets\.data\.href must be an absolute URL"),
        ({"assets": {"data": {"href": "s3://a", "type": "gpkg"}}}, r"assets\.data\.type must be a media type"),
        ({"assets": {"data": {"href": "s3://a", "roles": "data"}}}, r"assets\.data\.roles must be a list"),
        ({"links": [{"href": "https://example.org"}]}, r"links\[0\]\.rel must be text"),
    ],
)  # fmt: skip
def test_a_wrong_description_is_refused_with_its_place(description: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"^the description of 'x': .*{told}"):
        exports.dcat([], None, {"x": description})


def test_from_when_to_when_is_so_in_whatever_order_they_were_committed(sqlite_url: str) -> None:
    [*_, last] = fill(sqlite_url)["parcels"]
    earlier = replace(last, at="2020-01-01T00:00:00.000000Z", run=str(UUID(int=7)))
    document = exports.dcat([last, earlier])
    assert conforms(document)
    [dataset] = document["dcat:dataset"]
    assert [dataset[name]["@value"] for name in ("dct:issued", "dct:modified")] == [earlier.at, last.at]
    collection = exports.stac_collection([last, earlier], "parcels")
    assert collection["extent"]["temporal"]["interval"] == [[earlier.at, last.at]]


def test_the_command_writes_them(sqlite_url: str, tmp_path: Path) -> None:
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
    file, mistaken = tmp_path / "describe.json", tmp_path / "mistaken.json"
    file.write_text(json.dumps(DESCRIPTIONS), encoding="utf-8")
    mistaken.write_text('{"parcels": {"licence": 1}}', encoding="utf-8")
    exported = ("ops", "export", "--dataset", "parcels", "--format")
    for name in ("stac", "dcat"):
        document = ask(*at(sqlite_url, *exported, name, "--describe", str(file)))
        assert "CC-BY-4.0" in document
        assert "s3://a/parcels.gpkg" in document
        refused = call(*at(sqlite_url, *exported, name, "--describe", str(mistaken)))
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "mistaken.json: the description of 'parcels': unknown field 'licence'" in refused.stderr
    for wrong, code in (
        ((digest, "--describe", str(file)), 2),
        ((digest, "--format", "stac", "--describe", str(tmp_path / "app.db")), 2),
        ((), 2),
        (("a", "--dataset", "b"), 2),
        (("nothing",), 1),
        (("--dataset", "roads", "--format", "stac"), 1),
    ):
        assert call(*at(sqlite_url, "ops", "export", *wrong)).returncode == code, wrong
