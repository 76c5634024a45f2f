"""Masks GeoJSON with H3 cells, and finds payloads that are not masked.

A masked Feature has the outline of an H3 cell as its geometry, names the cell in its property ``h3``, and has no other
property than those that the caller names. A named property is still dropped when its name (lat, easting, bbox, wkt, …)
or its value (coordinates, WKT, WKB, GeoJSON, also inside a text) reveals a position. Text such as an address is not
recognised: a property that may contain one must not be named.

h3 comes with the ``geo`` extra and is imported by the first call.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from decimal import Decimal
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

__all__ = ["is_masked", "mask_h3"]

MAX_CELLS = 100_000
"""Cells that one geometry may cover."""
CELL = "h3"
"""The property that names the cell."""
_KM_PER_DEGREE = 111.32
_GEOMETRIES = frozenset(
    {"Point", "MultiPoint", "LineString", "MultiLineString", "Polygon", "MultiPolygon", "GeometryCollection"}
)
_GEOJSON_TYPES = _GEOMETRIES | {"Feature", "FeatureCollection"}
_POSITION_NAMES = frozenset(
    """lat latitude lon lng longitude easting northing bbox wkt wkb geom geometry coord coords coordinate coordinates
    geohash geojson mgrs utm olc pluscode breite breitengrad laenge laengengrad latitud longitud""".split()  # noqa: SIM905
)
_POSITION_NAMES_OF_NUMBERS = frozenset({"x", "y", "long", "east", "north"})
"""Names that mean a position only if the value is a number."""
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_COORDINATES = re.compile(
    r"\d{1,3}\.\d{3,}\D{1,12}\d{1,3}\.\d{3,}|\d{1,3},\d{4,}\D{1,12}\d{1,3},\d{4,}"  # with points or commas
    r"|\d{1,3}\s*°\s*\d{1,2}\s*['\u2032]"  # degrees and minutes
    r"|\b[23456789CFGHJMPQRVWX]{4,8}\+[23456789CFGHJMPQRVWX]{2,}"  # a plus code
    r"|\b\d{1,2}[C-HJ-NP-X]\s?[A-HJ-NP-Z]{2}\s?\d{2,5}\s?\d{2,5}\b"  # MGRS
    r"|\b(?:point|linestring|polygon|multi[a-z]+)\s*(?:z|m|zm)?\s*\("
    r"|(?<![0-9a-f])(?:010[1-7]0000[02468ace]0|00[02468ace]000000[1-7])[0-9a-f]{32}",  # WKB of either byte order
    re.IGNORECASE,
)
_DECIMAL = re.compile(r"\s*[+-]?\d{1,3}\.\d+\s*")
_CELL_ID = re.compile(r"(?<![0-9a-f])0?8[0-9a-f]{14}(?![0-9a-f])", re.IGNORECASE)
"""Candidates for a cell. A longer hexadecimal number, such as a hash, is none."""

LngLat = tuple[float, float]


def mask_h3(geojson: Mapping[str, Any], resolution: int, *, properties: Collection[str] = ()) -> dict[str, Any]:
    """A FeatureCollection with one Feature for every H3 cell that a geometry of ``geojson`` touches.

    Of the properties only the named ones are kept, and of these only those that do not reveal a position.
    ``resolution``: 0 (the coarsest) to 15. A Feature that is already masked, with a cell of this resolution or a
    coarser one, is kept.
    """
    h3, features = _import_h3(), []
    _check_resolution(resolution)
    _check_names(properties)
    for geometry, all_properties, path in _geometries(geojson, "geojson"):
        cell = all_properties.get(CELL)
        kept = {
            name: value
            for name, value in all_properties.items()
            if name in properties and name != CELL and not _reveals_position(h3, name, value, resolution)
        }
        if geometry is None:
            features.append(_feature(None, kept))
        elif _is_cell(h3, cell, geometry, resolution):
            features.append(_feature(dict(geometry), {**kept, CELL: cell}))
        else:
            cells = sorted(_cells_of(h3, geometry, resolution, path))
            features += [_feature(_outline(h3, cell), {**kept, CELL: cell}) for cell in cells]
    return {"type": "FeatureCollection", "features": features}


def is_masked(geojson: Mapping[str, Any], resolution: int, *, properties: Collection[str] = ()) -> bool:
    """Whether positions are given by H3 cells alone, of this resolution or a coarser one, as ``mask_h3`` does it, and
    there is no property that is not named."""
    _check_resolution(resolution)
    _check_names(properties)
    return next(_exposures(_import_h3(), geojson, resolution, properties, "geojson"), None) is None


def find_exposure(payload: object, resolution: int, properties: Collection[str] = ()) -> str | None:
    """Why a payload reveals more than cells of ``resolution`` and the named properties, or contains no GeoJSON at all;
    None when it may be written."""
    h3, counter = _import_h3(), [0]
    exposures = list(_scan(h3, payload, resolution, properties, "payload", counter))
    if exposures:
        return "; ".join(exposures[:3]) + (f"; and {len(exposures) - 3} more" if len(exposures) > 3 else "")
    return None if counter[0] else "there is no GeoJSON in its payload"


# Where a value reveals a position


def _scan(
    h3: Any, value: object, resolution: int, properties: Collection[str], path: str, counter: list[int]
) -> Iterator[str]:
    """The exposures in any value. ``counter[0]`` counts the GeoJSON objects in it. ValueError when a GeoJSON object has
    members of the wrong type."""
    if isinstance(value, Mapping) and value.get("type") in _GEOJSON_TYPES:
        counter[0] += 1
        yield from _exposures(h3, value, resolution, properties, path)
    elif isinstance(value, Mapping | list | tuple):
        members = value.items() if isinstance(value, Mapping) else enumerate(value)
        # A member with a mapping inside may be masked GeoJSON: it is scanned in its turn, not tested as a whole. For a
        # list with such members, its own numbers are tested here.
        if not isinstance(value, Mapping) and _reveals_position(h3, "", value, resolution, deep=False):
            yield f"{path} reveals a position"
        for key, member in members:
            name, below = ("", f"{path}[{key}]") if isinstance(key, int) else (str(key), f"{path}.{key}")
            if _text_reveals_position(h3, name, resolution) or (
                not _contains_mapping(member) and _reveals_position(h3, name, member, resolution)
            ):
                yield f"{below} reveals a position"
            elif isinstance(member, Mapping | list | tuple):
                yield from _scan(h3, member, resolution, properties, below, counter)


def _exposures(h3: Any, value: object, resolution: int, named: Collection[str], path: str) -> Iterator[str]:
    """Why GeoJSON is not masked, each with the path to it."""
    if not isinstance(value, Mapping) or value.get("type") not in _GEOJSON_TYPES:
        yield f"{path} is not GeoJSON"
        return
    if value["type"] in _GEOMETRIES:
        yield f"{path} is a bare {value['type']}, without a property that names its cell"
        return
    standard = {"type", "features"} if value["type"] == "FeatureCollection" else {"type", "geometry", "properties"}
    for name, member in value.items():
        if name not in standard and _reveals_position(h3, name, member, resolution):
            yield f"{path}.{name} reveals a position"
    if value["type"] == "FeatureCollection":
        for index, feature in enumerate(_as_list(value.get("features"), f"{path}.features")):
            yield from _exposures(h3, feature, resolution, named, f"{path}.features[{index}]")
        return
    properties = _as_mapping(value.get("properties") or {}, f"{path}.properties")
    for name, member in properties.items():
        if name != CELL and name not in named:
            yield f"{path}.properties.{name} is not among the properties that may be written"
        elif name != CELL and _reveals_position(h3, name, member, resolution):
            yield f"{path}.properties.{name} reveals a position"
    geometry, cell = value.get("geometry"), properties.get(CELL)
    if (geometry is not None or cell is not None) and not _is_cell(h3, cell, geometry, resolution):
        yield f"{path} is not the outline of the H3 cell that it names, of resolution {resolution} or coarser"


def _reveals_position(h3: Any, name: object, value: object, resolution: int, *, deep: bool = True) -> bool:
    """Whether a property reveals a position by its name or its value. ``deep``: also by what the value contains."""
    label = str(name)
    if _text_reveals_position(h3, label, resolution):
        return True
    if value is None or isinstance(value, bool):
        return False
    words = {word.lower() for word in _WORDS.findall(label)}
    if words & _POSITION_NAMES or (words & _POSITION_NAMES_OF_NUMBERS and isinstance(value, int | float)):
        return True
    if isinstance(value, bytes | bytearray | memoryview):
        raw = bytes(value)
        return _text_reveals_position(h3, raw.hex(), resolution) or _reveals_position(
            h3, "", raw.decode("latin-1"), resolution
        )
    if isinstance(value, str):
        return any(_text_reveals_position(h3, text, resolution) for text in _readings(value)) or _reveals_position(
            h3, "", _parse_json(value), resolution
        )
    if isinstance(value, int):
        return _text_reveals_position(h3, f"{value:x}", resolution)
    if isinstance(value, Mapping):
        has_pair = any(_is_precise(one) and _is_precise(other) for one, other in pairwise(value.values()))
        return has_pair or (
            deep and any(_reveals_position(h3, key, member, resolution) for key, member in value.items())
        )
    if isinstance(value, list | tuple | AbstractSet):
        has_pair = any(_is_degrees(one) and _is_degrees(other) for one, other in pairwise(value))
        return has_pair or (deep and any(_reveals_position(h3, "", member, resolution) for member in value))
    return False


def _text_reveals_position(h3: Any, text: str, resolution: int) -> bool:
    """Whether a text contains coordinates, or a cell that is finer than ``resolution``."""
    cells = [cell for cell in _CELL_ID.findall(text) if h3.is_valid_cell(cell)]
    return any(h3.get_resolution(cell) > resolution for cell in cells) or _COORDINATES.search(text) is not None


def _readings(text: str) -> Iterator[str]:
    """The text, and what it contains in another encoding: URL-encoded text, the hexadecimal form of base64, and of a
    decimal number."""
    yield text
    if "%" in text:
        yield unquote(text)
    if text.isdecimal() and len(text) < 30:
        yield f"{int(text):x}"
    with suppress(binascii.Error, ValueError):
        yield base64.b64decode(text, validate=True).hex()


def _is_degrees(value: object) -> bool:
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        value = float(value)
    return isinstance(value, float | Decimal) and abs(float(value)) <= 180 and bool(value % 1)


def _is_precise(value: object) -> bool:
    """Whether it may be degrees, with three decimals or more. Other numbers stand beside each other by chance."""
    return _is_degrees(value) and len(str(value).partition(".")[2].strip()) >= 3


def _parse_json(text: str) -> object:
    """The object or list that a text contains as JSON; None for any other text."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        value: object = json.loads(text)
    except ValueError:
        return None
    return value


def _contains_mapping(value: object) -> bool:
    """Whether there is a mapping in it, which could be GeoJSON."""
    return isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(map(_contains_mapping, value)))


# GeoJSON


def _geometries(value: object, path: str) -> Iterator[tuple[Mapping[str, Any] | None, Mapping[str, Any], str]]:
    """The geometries in GeoJSON, each with the properties of its Feature and the path to it."""
    geojson = _as_mapping(value, path)
    kind = geojson.get("type")
    if kind == "FeatureCollection":
        for index, feature in enumerate(_as_list(geojson.get("features"), f"{path}.features")):
            yield from _geometries(feature, f"{path}.features[{index}]")
    elif kind == "Feature":
        geometry = geojson.get("geometry")
        properties = _as_mapping(geojson.get("properties") or {}, f"{path}.properties")
        yield None if geometry is None else _as_mapping(geometry, f"{path}.geometry"), properties, f"{path}.geometry"
    elif kind in _GEOMETRIES:
        yield geojson, {}, path
    else:
        types = ", ".join(sorted(_GEOJSON_TYPES))
        raise ValueError(f"{path} must be GeoJSON, with a type that is one of {types}: {kind!r}")


def _is_cell(h3: Any, cell: object, geometry: object, resolution: int) -> bool:
    """Whether ``cell`` is a cell of this resolution or a coarser one, and ``geometry`` is its outline."""
    if not isinstance(cell, str) or not _CELL_ID.fullmatch(cell) or not h3.is_valid_cell(cell):
        return False
    return h3.get_resolution(cell) <= resolution and bool(geometry == _outline(h3, cell))


def _outline(h3: Any, cell: str) -> dict[str, Any]:
    ring = [[lng, lat] for lat, lng in h3.cell_to_boundary(cell)]
    return {"type": "Polygon", "coordinates": [[*ring, ring[0]]]}


def _feature(geometry: dict[str, Any] | None, properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Feature", "geometry": geometry, "properties": dict(properties)}


def _position(value: object, path: str) -> LngLat:
    coordinates = _as_list(value, path)
    numbers = [each for each in coordinates[:2] if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(numbers) != 2 or not (abs(numbers[0]) <= 180 and abs(numbers[1]) <= 90):
        raise ValueError(f"{path} must be [longitude, latitude] in degrees, from -180 and -90 to 180 and 90: {value!r}")
    return numbers[0], numbers[1]


def _positions(value: object, path: str, least: int) -> list[LngLat]:
    positions = [_position(each, path) for each in _as_list(value, path)]
    if len(positions) < least:
        raise ValueError(f"{path} must have {least} positions or more, not {len(positions)}")
    return positions


def _as_list(value: object, path: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{path} must be a list, not {type(value).__name__}")
    return value


def _as_mapping(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} must be an object of GeoJSON, not {type(value).__name__}")
    return value


# The cells that a geometry touches


def _cells_of(h3: Any, geometry: Mapping[str, Any], resolution: int, path: str) -> set[str]:
    kind = geometry.get("type")
    if kind == "GeometryCollection":
        parts = _as_list(geometry.get("geometries"), f"{path}.geometries")
        return {cell for part in parts for cell in _cells_of(h3, _as_mapping(part, path), resolution, path)}
    coordinates, place = geometry.get("coordinates"), f"{path}.coordinates"
    match kind:
        case "Point":
            return _point_cells(h3, [_position(coordinates, place)], resolution)
        case "MultiPoint":
            return _point_cells(h3, _positions(coordinates, place, 0), resolution)
        case "LineString":
            return _line_cells(h3, _positions(coordinates, place, 2), resolution, place)
        case "MultiLineString":
            lines = [_positions(line, place, 2) for line in _as_list(coordinates, place)]
            return {cell for line in lines for cell in _line_cells(h3, line, resolution, place)}
        case "Polygon":
            return _polygon_cells(h3, coordinates, resolution, place)
        case "MultiPolygon":
            polygons = _as_list(coordinates, place)
            return {cell for polygon in polygons for cell in _polygon_cells(h3, polygon, resolution, place)}
        case _:
            raise ValueError(f"{path} must be a geometry of GeoJSON, not of type {kind!r}")


def _point_cells(h3: Any, positions: Iterable[LngLat], resolution: int) -> set[str]:
    return {h3.latlng_to_cell(lat, lng, resolution) for lng, lat in positions}


def _line_cells(h3: Any, positions: Sequence[LngLat], resolution: int, path: str) -> set[str]:
    """The cells at points of the line that are at most half an edge of a cell apart."""
    step = h3.average_hexagon_edge_length(resolution, unit="km") / 2
    cells = _point_cells(h3, positions, resolution)
    for (lng, lat), (lng2, lat2) in pairwise(positions):
        count = math.ceil(h3.great_circle_distance((lat, lng), (lat2, lng2), unit="km") / step)
        _check_count(count, resolution, path)
        eastward = (lng2 - lng + 180) % 360 - 180  # the shorter way, which may cross the date line
        fractions = [index / count for index in range(1, count)]
        points = ((lng + eastward * fraction, lat + (lat2 - lat) * fraction) for fraction in fractions)
        cells |= _point_cells(h3, points, resolution)
    return cells


def _polygon_cells(h3: Any, coordinates: object, resolution: int, path: str) -> set[str]:
    rings = [_positions(ring, path, 4) for ring in _as_list(coordinates, path)]
    if not rings:
        raise ValueError(f"{path} must have a ring")
    lngs, lats = ([position[axis] for position in rings[0]] for axis in (0, 1))
    width, height = max(lngs) - min(lngs), max(lats) - min(lats)
    km_per_degree_east = _KM_PER_DEGREE * math.cos(math.radians(min(map(abs, lats))))
    area = width * km_per_degree_east * height * _KM_PER_DEGREE
    _check_count(area / h3.average_hexagon_area(resolution, unit="km^2"), resolution, path)
    outer, *holes = [[(lat, lng) for lng, lat in ring] for ring in rings]
    inside = h3.h3shape_to_cells_experimental(h3.LatLngPoly(outer, *holes), resolution, contain="overlap")
    return {*inside, *_point_cells(h3, (position for ring in rings for position in ring), resolution)}


def _check_count(cells: float, resolution: int, path: str) -> None:
    if cells > MAX_CELLS:
        raise ValueError(
            f"{path} covers about {cells:,.0f} cells of resolution {resolution}, and the limit is {MAX_CELLS:,}: use a "
            "coarser resolution"
        )


def _check_resolution(resolution: object) -> None:
    if isinstance(resolution, bool) or not isinstance(resolution, int) or not 0 <= resolution <= 15:
        raise ValueError(f"resolution must be a whole number from 0 (the coarsest) to 15, not {resolution!r}")


def _check_names(properties: object) -> None:
    if isinstance(properties, str) or not isinstance(properties, Collection):
        raise ValueError(f"properties must be a list of names, such as ['kind'], not {properties!r}")


def _import_h3() -> Any:
    try:
        import h3
    except ImportError:
        raise ImportError("H3 cells need the package h3: pip install 'holdfast[geo]'") from None
    return h3
