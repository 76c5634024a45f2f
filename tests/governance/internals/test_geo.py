"""Geometry masked with H3 cells: it is covered, reveals no more than its cells, and other values are detected."""

from __future__ import annotations

import base64
import json
import random
import struct
import sys
from decimal import Decimal
from typing import Any

import h3
import pytest

import holdfast
from holdfast.geo import find_exposure

SQUARE = [[16.30, 48.10], [16.50, 48.10], [16.50, 48.30], [16.30, 48.30], [16.30, 48.10]]
SHAPES: list[dict[str, Any]] = [
    {"type": "Point", "coordinates": [16.37, 48.21]},
    {"type": "Point", "coordinates": [16.37, 48.21, 171.5]},
    {"type": "MultiPoint", "coordinates": [[16.37, 48.21], [-70.6, -33.4]]},
    {"type": "LineString", "coordinates": [[16.37, 48.21], [17.1, 48.15]]},
    {"type": "MultiLineString", "coordinates": [[[16.37, 48.21], [16.4, 48.2]], [[0, 0], [0.1, 0]]]},
    {"type": "Polygon", "coordinates": [SQUARE]},
    {"type": "Polygon", "coordinates": [[[16.3, 48.1], [16.30001, 48.1], [16.3, 48.10001], [16.3, 48.1]]]},
    {"type": "MultiPolygon", "coordinates": [[SQUARE], [[[0, 0], [0.1, 0], [0, 0.1], [0, 0]]]]},
    {"type": "GeometryCollection", "geometries": [{"type": "Point", "coordinates": [16.37, 48.21]}]},
]
FINE = h3.latlng_to_cell(48.2, 16.3, 15)


def cells(masked: dict[str, Any]) -> set[str]:
    return {each["properties"]["h3"] for each in masked["features"]}


def feature(geometry: Any = SHAPES[0], **properties: Any) -> dict[str, Any]:
    return {"type": "Feature", "geometry": geometry, "properties": properties}


@pytest.mark.parametrize("resolution", [0, 4, 7])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda each: each["type"])
def test_every_geometry_becomes_cells(shape: dict[str, Any], resolution: int) -> None:
    masked = holdfast.geo.mask_h3(shape, resolution)
    assert cells(masked)
    assert {h3.get_resolution(cell) for cell in cells(masked)} == {resolution}
    for finest, passes in ((resolution - 1, False), (resolution, True), (15, True)):
        assert finest < 0 or holdfast.geo.is_masked(masked, finest) is passes
    assert holdfast.geo.mask_h3(json.loads(json.dumps(masked)), resolution) == masked, "what is masked already stays"
    assert not holdfast.geo.is_masked(shape, resolution)
    assert not holdfast.geo.is_masked(feature(shape), resolution)


def test_all_that_a_shape_touches_is_covered() -> None:
    inside = random.Random(7)
    area = cells(holdfast.geo.mask_h3({"type": "Polygon", "coordinates": [SQUARE]}, 7))
    line = cells(holdfast.geo.mask_h3({"type": "LineString", "coordinates": [[16.3, 48.1], [16.5, 48.3]]}, 7))
    for _ in range(2000):
        assert h3.latlng_to_cell(inside.uniform(48.1, 48.3), inside.uniform(16.3, 16.5), 7) in area
        part = inside.random()
        near = h3.grid_disk(h3.latlng_to_cell(48.1 + 0.2 * part, 16.3 + 0.2 * part, 7), 1)
        assert line.intersection(near)


def test_a_line_across_the_date_line_goes_the_short_way() -> None:
    for line in ([[179, 0], [-179, 0]], [[-179, 0], [179, 0]]):
        line_cells = cells(holdfast.geo.mask_h3({"type": "LineString", "coordinates": line}, 3))
        assert h3.latlng_to_cell(0, 180, 3) in line_cells
        assert not line_cells & {h3.latlng_to_cell(0, degrees, 3) for degrees in range(-170, 171)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lat", 48.2), ("home_lng", "16.37"), ("homeLatitude", 48.2), ("x", 601000), ("bbox", [1, 2, 3, 4]),
        ("WKT", "POINT (16.37 48.21)"), ("note", "found at 48.20849, 16.37208"), ("at", [16.37, 48.21]),
        ("centre", {"type": "Point", "coordinates": [16, 48]}), ("deep", {"a": [{"longitude": 16.3}]}),
        ("cell", FINE), ("geohash", "u2edk8"), ("number", int(FINE, 16)), (FINE, None), ("counts", {FINE: 3}),
        ("cells", f"{FINE}, {FINE.upper()}"), ("at", {"48.20849,16.37208": "barrow"}), ("raw", b"POINT (16 48)"),
        ("raw", json.dumps(SHAPES[0])), ("raw", ' [{"lat": 48}]'), ("raw", b' [{"lat": 48}]'),
        ("at", [Decimal("16.37"), Decimal("48.21")]),
        ("shape", (WKB := struct.pack("<BIIdd", 1, 0x20000001, 4326, 16.37, 48.21)).hex()), ("shape", WKB),
        ("shape", struct.pack(">BIdd", 0, 1, 16.37, 48.21).hex().upper()),
        ("row", ["barrow", 16.37, 48.21]), ("rows", {("barrow", 16.37, 48.21)}), ("raw", {"POINT (16 48)"}),
        ("raw", bytearray(b"POINT (16 48)")), ("raw", memoryview(b"POINT (16 48)")),
    ],
)  # fmt: skip
def test_a_property_that_tells_a_position_is_dropped_and_found(name: str, value: Any) -> None:
    named = {name, "kind"}
    masked = holdfast.geo.mask_h3(feature(**{name: value, "kind": "grave"}), 5, properties=named)
    assert {each for masked_feature in masked["features"] for each in masked_feature["properties"]} == {"h3", "kind"}
    masked["features"][0]["properties"][name] = value
    assert not holdfast.geo.is_masked(masked, 5, properties=named)
    assert find_exposure([masked], 5, named) == f"payload[0].features[0].properties.{name} reveals a position"
    masked["features"][0]["properties"].pop(name)
    assert find_exposure({"rows": [masked], name: value}, 5, named), "also beside it"


@pytest.mark.parametrize(
    "value",
    [
        "48.20817° N, 16.37382° E", "lat: 48.20817, lon: 16.37382", "48°12'29\" N 16°22'26\" E", "48,20817 16,37382",
        ["48.20817", "16.37382"], {"a": 48.208, "b": 16.373}, "8FWR6957+7G", "33UXP0221541020", str(int(FINE, 16)),
        base64.b64encode(WKB).decode(), "48.20817%2C16.37382", {"breite": 48.2}, {"laenge": 16.3},
    ],
)  # fmt: skip
def test_a_property_that_is_named_is_dropped_if_it_is_spelled_like_a_position(value: Any) -> None:
    [masked] = holdfast.geo.mask_h3(feature(note=value), 5, properties=["note"])["features"]
    assert set(masked["properties"]) == {"h3"}
    masked["properties"]["note"] = value
    assert find_exposure(masked, 5, ["note"]) == "payload.properties.note reveals a position"


@pytest.mark.parametrize(
    "value", ["u2edk8", "UTM 33N 602200 5340900", [1822768.5, 6141587.2], "behind the church", "grave", 3, None]
)
def test_a_property_that_is_not_named_is_dropped_and_found(value: Any) -> None:
    [masked] = holdfast.geo.mask_h3(feature(note=value, kind="grave"), 5, properties=["kind"])["features"]
    assert masked["properties"] == {"h3": masked["properties"]["h3"], "kind": "grave"}
    assert holdfast.geo.is_masked(masked, 5, properties=["kind"])
    assert find_exposure(masked, 5) == "payload.properties.kind is not among the properties that may be written"
    masked["properties"]["note"] = value
    assert not holdfast.geo.is_masked(masked, 5, properties=["kind"])
    with pytest.raises(ValueError, match="properties must be a list of names"):
        holdfast.geo.mask_h3(feature(), 5, properties="kind")


def test_what_is_no_position_stays() -> None:
    properties = {
        "name": "Flat Holm", "long_name": "north gate", "price": 12.5, "sizes": [3, 4], "latest": None,
        "x": "ray", "country": {"code": "AT", "share": 0.25}, "year": 1683, "sha256": "8f" * 32, "large": 10**40,
        "said": "[sic] {who knows}", "list": '["a", 12.5]', "zone": h3.latlng_to_cell(48.2, 16.3, 3),
    }  # fmt: skip
    [masked_feature] = holdfast.geo.mask_h3(feature(**properties), 5, properties=properties)["features"]
    assert {name: value for name, value in masked_feature["properties"].items() if name != "h3"} == properties
    assert holdfast.geo.is_masked(masked_feature, 5, properties=properties)


def test_a_feature_that_only_pretends_is_found() -> None:
    masked = holdfast.geo.mask_h3(feature(), 5)
    [masked_feature] = masked["features"]
    outline = masked_feature["geometry"]["coordinates"][0]
    elsewhere = holdfast.geo.mask_h3({"type": "Point", "coordinates": [0, 0]}, 5)["features"][0]
    for wrong in (
        {**masked_feature, "geometry": SHAPES[0]},
        {**masked_feature, "geometry": elsewhere["geometry"]},
        {
            **masked_feature,
            "geometry": {"type": "Polygon", "coordinates": [[*outline[:3], [16.37, 48.21], *outline[3:]]]},
        },
        {**masked_feature, "geometry": {**masked_feature["geometry"], "bbox": [16.3, 48.1, 16.4, 48.3]}},
        {**masked_feature, "properties": {}},
        {**masked_feature, "properties": {"h3": "8f1e"}},
        {**masked_feature, "properties": {"h3": "8f" * 32}},
        {**masked_feature, "bbox": [16.3, 48.1, 16.4, 48.3]},
        {**masked, "bbox": [16.3, 48.1, 16.4, 48.3]},
        {"type": "FeatureCollection", "features": [masked_feature, feature()]},
        {"a": 1},
    ):
        assert not holdfast.geo.is_masked(wrong, 5)
        assert find_exposure(wrong, 5)
    assert holdfast.geo.is_masked(feature(None), 5), "where it is, is not said at all"


def test_a_payload_is_looked_through() -> None:
    masked = holdfast.geo.mask_h3(feature(), 5)
    assert find_exposure({"rows": [masked], "by": "jane"}, 5) is None
    assert find_exposure({"rows": 3}, 5) == find_exposure(None, 5) == "there is no GeoJSON in its payload"
    assert find_exposure({"rows": [masked], "lat": 48.2}, 5) == "payload.lat reveals a position"
    assert find_exposure([masked, [16.37, 48.21]], 5) == "payload[1] reveals a position"
    assert find_exposure(dict[Any, Any](masked) | {7: "x"}, 5) is None, "whatever a name is"
    assert str(find_exposure([feature()] * 5, 5)).endswith("; and 2 more")


@pytest.mark.parametrize(
    ("geojson", "resolution", "why"),
    [
        ({"type": "Circle"}, 5, "geojson must be GeoJSON"),
        ([], 5, "geojson must be an object"),
        ({"type": "Point", "coordinates": [200, 0]}, 5, r"geojson.coordinates must be \[longitude, latitude\]"),
        ({"type": "Point", "coordinates": [float("nan"), 0]}, 5, "must be"),
        ({"type": "Point", "coordinates": "x"}, 5, "must be a list"),
        ({"type": "LineString", "coordinates": [[0, 0]]}, 5, "2 positions or more"),
        ({"type": "Polygon", "coordinates": []}, 5, "must have a ring"),
        ({"type": "Polygon", "coordinates": [[[0, 0], [9, 0], [9, 9], [0, 0]]]}, 15, "coarser resolution"),
        ({"type": "FeatureCollection", "features": [{"type": "Feature", "geometry": {"type": "Blob"}}]}, 5,
         r"geojson.features\[0\].geometry must be a geometry"),
        (SHAPES[0], 16, "resolution must be"),
        (SHAPES[0], True, "resolution must be"),
    ],
)  # fmt: skip
def test_what_is_none_is_refused_with_the_way_to_it(geojson: Any, resolution: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        holdfast.geo.mask_h3(geojson, resolution)


def test_whoever_has_not_installed_it_is_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h3", None)
    with pytest.raises(ImportError, match=r"pip install 'holdfast\[geo\]'"):
        holdfast.geo.is_masked(SHAPES[0], 5)
