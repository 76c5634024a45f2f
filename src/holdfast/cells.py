"""Which H3 cells a geometry of GeoJSON touches. What may be told by them is in ``geo``, which also brings h3."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

MOST = 100_000
"""Cells that a geometry may come to."""


def cells_of(h3: Any, geometry: Mapping[str, Any], resolution: int, where: str) -> set[str]:
    kind = geometry.get("type")
    if kind == "GeometryCollection":
        parts = as_list(geometry.get("geometries"), f"{where}.geometries")
        return {cell for part in parts for cell in cells_of(h3, as_mapping(part, where), resolution, where)}
    given, path = geometry.get("coordinates"), f"{where}.coordinates"
    match kind:
        case "Point":
            return _touched(h3, [_position(given, path)], resolution)
        case "MultiPoint":
            return _touched(h3, _positions(given, path, 0), resolution)
        case "LineString":
            return _line(h3, _positions(given, path, 2), resolution, path)
        case "MultiLineString":
            lines = as_list(given, path)
            return {cell for line in lines for cell in _line(h3, _positions(line, path, 2), resolution, path)}
        case "Polygon":
            return _area(h3, given, resolution, path)
        case "MultiPolygon":
            return {cell for each in as_list(given, path) for cell in _area(h3, each, resolution, path)}
        case _:
            raise ValueError(f"{where} must be a geometry of GeoJSON, not of type {kind!r}")


def _touched(h3: Any, positions: Iterable[tuple[float, float]], resolution: int) -> set[str]:
    return {h3.latlng_to_cell(lat, lng, resolution) for lng, lat in positions}


def _line(h3: Any, positions: Sequence[tuple[float, float]], resolution: int, where: str) -> set[str]:
    step = h3.average_hexagon_edge_length(resolution, unit="km") / 2
    found = _touched(h3, positions, resolution)
    for (lng, lat), (lng2, lat2) in pairwise(positions):
        count = math.ceil(h3.great_circle_distance((lat, lng), (lat2, lng2), unit="km") / step)
        _check_size(count, resolution, where)
        east = (lng2 - lng + 180) % 360 - 180  # the shorter way, be it across the date line
        parts = [number / count for number in range(1, count)]
        found |= _touched(h3, ((lng + east * part, lat + (lat2 - lat) * part) for part in parts), resolution)
    return found


def _area(h3: Any, given: object, resolution: int, where: str) -> set[str]:
    rings = [_positions(ring, where, 4) for ring in as_list(given, where)]
    if not rings:
        raise ValueError(f"{where} must have a ring")
    east, north = ([position[axis] for position in rings[0]] for axis in (0, 1))
    width, height = max(east) - min(east), max(north) - min(north)
    across = 111.32 * math.cos(math.radians(min(map(abs, north))))
    _check_size(width * height * 111.32 * across / h3.average_hexagon_area(resolution, unit="km^2"), resolution, where)
    outer, *holes = [[(lat, lng) for lng, lat in ring] for ring in rings]
    shape = h3.LatLngPoly(outer, *holes)
    inside = h3.h3shape_to_cells_experimental(shape, resolution, contain="overlap")
    return {*inside, *_touched(h3, (position for ring in rings for position in ring), resolution)}


def _position(value: object, where: str) -> tuple[float, float]:
    found = as_list(value, where)
    numbers = [each for each in found[:2] if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(numbers) != 2 or not (abs(numbers[0]) <= 180 and abs(numbers[1]) <= 90):
        raise ValueError(
            f"{where} must be [longitude, latitude] in degrees, from -180 and -90 to 180 and 90: {value!r}"
        )
    return numbers[0], numbers[1]


def _positions(value: object, where: str, least: int) -> list[tuple[float, float]]:
    found = [_position(each, where) for each in as_list(value, where)]
    if len(found) < least:
        raise ValueError(f"{where} must have {least} positions or more, not {len(found)}")
    return found


def as_list(value: object, where: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} must be a list, not {type(value).__name__}")
    return value


def as_mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object of GeoJSON, not {type(value).__name__}")
    return value


def _check_size(cells: float, resolution: int, where: str) -> None:
    if cells > MOST:
        raise ValueError(
            f"{where} comes to some {cells:,.0f} cells of resolution {resolution}, and {MOST:,} is the most: take a "
            "coarser resolution"
        )
