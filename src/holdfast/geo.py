"""GeoJSON generalised to H3 cells, and whether it is: where something is, said no more exactly than by a cell.

What is masked is a Feature whose geometry is the outline of a cell and whose property ``h3`` names it, and which tells
a position in no other way: by a bounding box, a finer cell, or a property that holds coordinates. Those are known by
their names (lat, lon, easting, bbox, wkt, geohash, …) and by what they look like (a pair of numbers with decimals, WKT,
WKB as PostGIS gives it, GeoJSON, also as a text or as a name). What else a text may give away is for people to know.

h3 comes with the ``geo`` extra, and is imported by whoever calls this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from decimal import Decimal
from itertools import pairwise
from typing import Any

from holdfast.cells import as_list, as_mapping, cells_of

CELL = "h3"
"""The property that names the cell."""
_GEOMETRIES = frozenset(
    {"Point", "MultiPoint", "LineString", "MultiLineString", "Polygon", "MultiPolygon", "GeometryCollection"}
)
_KINDS = _GEOMETRIES | {"Feature", "FeatureCollection"}
_NAMES = frozenset(
    """lat latitude lon lng longitude easting northing bbox wkt wkb geom geometry coord coords coordinate coordinates
    geohash geojson mgrs utm olc pluscode""".split()  # noqa: SIM905
)
_NAMES_OF_NUMBERS = frozenset({"x", "y", "long", "east", "north"})
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_POSITION = re.compile(
    r"-?\d{1,3}\.\d{3,}\D{1,4}-?\d{1,3}\.\d{3,}|\b(?:point|linestring|polygon|multi[a-z]+)\s*(?:z|m|zm)?\s*\("
    r"|(?<![0-9a-f])(?:010[1-7]0000[02468ace]0|00[02468ace]000000[1-7])[0-9a-f]{32}",  # WKB, in either order of bytes
    re.IGNORECASE,
)
_CELL = re.compile(r"(?<![0-9a-f])0?8[0-9a-f]{14}(?![0-9a-f])", re.IGNORECASE)
"""What h3 is asked about: it is not for longer numbers, and a hash is one."""


def mask_h3(geojson: Mapping[str, Any], resolution: int) -> dict[str, Any]:
    """The same as a FeatureCollection of H3 cells: of each Feature every cell that it touches, with its properties but
    for those that tell a position. ``resolution``: 0 (the coarsest) to 15; one that is a coarser cell already stays."""
    h3, features = _h3(), []
    _check_resolution(resolution)
    for geometry, properties, where in _parts(geojson, "geojson"):
        kept = {name: value for name, value in properties.items() if not _tells(h3, name, value, resolution)}
        named = kept.pop(CELL, None)
        if geometry is None:
            features.append(_feature(None, kept))
        elif _is_cell(h3, named, geometry, resolution):
            features.append(_feature(_outline(h3, named), {**kept, CELL: named}))
        else:
            cells = sorted(cells_of(h3, geometry, resolution, where))
            features += [_feature(_outline(h3, cell), {**kept, CELL: cell}) for cell in cells]
    return {"type": "FeatureCollection", "features": features}


def is_masked(geojson: Mapping[str, Any], resolution: int) -> bool:
    """Whether it says where something is by H3 cells alone, of that resolution or coarser: what ``mask_h3`` returns."""
    _check_resolution(resolution)
    return next(_unmasked(_h3(), geojson, resolution, "geojson"), None) is None


def exposed(payload: object, resolution: int) -> str | None:
    """Why a payload must not be written where that resolution is the finest allowed; None when it may be."""
    h3, seen = _h3(), [0]
    found = list(_scan(h3, payload, resolution, "payload", seen))
    if found:
        return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
    return None if seen[0] else "there is no GeoJSON in its payload"


def _scan(h3: Any, value: object, resolution: int, where: str, seen: list[int]) -> Iterator[str]:
    if isinstance(value, Mapping) and value.get("type") in _KINDS:
        seen[0] += 1
        yield from _unmasked(h3, value, resolution, where)
    elif isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        if not isinstance(value, Mapping) and _tells(h3, "", value, resolution, deep=False):
            yield f"{where} tells a position"
        for name, each in pairs:
            path = f"{where}[{name}]" if isinstance(name, int) else f"{where}.{name}"
            called = "" if isinstance(name, int) else str(name)
            if _says(h3, called, resolution) or (_is_plain(each) and _tells(h3, called, each, resolution)):
                yield f"{path} tells a position"
            elif isinstance(each, Mapping | list | tuple):
                yield from _scan(h3, each, resolution, path, seen)


def _unmasked(h3: Any, value: object, resolution: int, where: str) -> Iterator[str]:
    """What is wrong with it, with the way to it."""
    if not isinstance(value, Mapping) or value.get("type") not in _KINDS:
        yield f"{where} is no GeoJSON"
        return
    if value["type"] in _GEOMETRIES:
        yield f"{where} is a bare {value['type']}, and says of no cell that it is one"
        return
    known = {"type", "features"} if value["type"] == "FeatureCollection" else {"type", "geometry", "properties"}
    for name, member in value.items():
        if name not in known and _tells(h3, name, member, resolution):
            yield f"{where}.{name} tells a position"
    if value["type"] == "FeatureCollection":
        for number, each in enumerate(as_list(value.get("features"), f"{where}.features")):
            yield from _unmasked(h3, each, resolution, f"{where}.features[{number}]")
        return
    properties = as_mapping(value.get("properties") or {}, f"{where}.properties")
    for name, each in properties.items():
        if name != CELL and _tells(h3, name, each, resolution):
            yield f"{where}.properties.{name} tells a position"
    geometry, cell = value.get("geometry"), properties.get(CELL)
    if (geometry is not None or cell is not None) and not _is_cell(h3, cell, geometry, resolution):
        yield f"{where} is not the outline of the H3 cell that it names, of resolution {resolution} or coarser"


def _parts(value: object, where: str) -> Iterator[tuple[Mapping[str, Any] | None, Mapping[str, Any], str]]:
    """Geometries with their properties."""
    found = as_mapping(value, where)
    kind = found.get("type")
    if kind == "FeatureCollection":
        for number, each in enumerate(as_list(found.get("features"), f"{where}.features")):
            yield from _parts(each, f"{where}.features[{number}]")
    elif kind == "Feature":
        geometry = found.get("geometry")
        properties = as_mapping(found.get("properties") or {}, f"{where}.properties")
        yield None if geometry is None else as_mapping(geometry, f"{where}.geometry"), properties, f"{where}.geometry"
    elif kind in _GEOMETRIES:
        yield found, {}, where
    else:
        raise ValueError(f"{where} must be GeoJSON, with a type that is one of {', '.join(sorted(_KINDS))}: {kind!r}")


def _is_cell(h3: Any, cell: object, geometry: object, resolution: int) -> bool:
    if not isinstance(cell, str) or not _CELL.fullmatch(cell) or not h3.is_valid_cell(cell):
        return False
    return h3.get_resolution(cell) <= resolution and bool(geometry == _outline(h3, cell))


def _outline(h3: Any, cell: str) -> dict[str, Any]:
    ring = [[lng, lat] for lat, lng in h3.cell_to_boundary(cell)]
    return {"type": "Polygon", "coordinates": [[*ring, ring[0]]]}


def _feature(geometry: dict[str, Any] | None, properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Feature", "geometry": geometry, "properties": dict(properties)}


def _tells(h3: Any, name: object, value: object, resolution: int, *, deep: bool = True) -> bool:
    """Whether a property says where something is, by its name or by what it looks like."""
    called = str(name)
    if _says(h3, called, resolution):
        return True
    if value is None or isinstance(value, bool):
        return False
    words = {word.lower() for word in _WORDS.findall(called)}
    if words & _NAMES or (words & _NAMES_OF_NUMBERS and isinstance(value, int | float)):
        return True
    if isinstance(value, bytes | bytearray | memoryview):
        raw = bytes(value)
        return _says(h3, raw.hex(), resolution) or _tells(h3, "", raw.decode("latin-1"), resolution)
    if isinstance(value, str):
        return _says(h3, value, resolution) or _tells(h3, "", _read(value), resolution)
    if isinstance(value, int):
        return _says(h3, f"{value:x}", resolution)
    if isinstance(value, Mapping):
        return deep and any(_tells(h3, each, member, resolution) for each, member in value.items())
    if isinstance(value, list | tuple | AbstractSet):
        pair = any(_is_degrees(one) and _is_degrees(other) for one, other in pairwise(value))
        return pair or (deep and any(_tells(h3, "", each, resolution) for each in value))
    return False


def _is_degrees(value: object) -> bool:
    return isinstance(value, float | Decimal) and abs(float(value)) <= 180 and bool(value % 1)


def _says(h3: Any, text: str, resolution: int) -> bool:
    """Whether coordinates are in a text, or a finer cell."""
    cells = [each for each in _CELL.findall(text) if h3.is_valid_cell(each)]
    return any(h3.get_resolution(each) > resolution for each in cells) or _POSITION.search(text) is not None


def _read(text: str) -> object:
    """An object or a list that is told as a text of JSON; None when it is no such text."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        found: object = json.loads(text)
    except ValueError:
        return None
    return found


def _is_plain(value: object) -> bool:
    """Whether there is no object in it, which could be GeoJSON."""
    return not isinstance(value, Mapping) and (not isinstance(value, list | tuple) or all(map(_is_plain, value)))


def _check_resolution(resolution: object) -> None:
    if isinstance(resolution, bool) or not isinstance(resolution, int) or not 0 <= resolution <= 15:
        raise ValueError(f"resolution must be a whole number from 0 (the coarsest) to 15, not {resolution!r}")


def _h3() -> Any:
    try:
        import h3
    except ImportError:
        raise ImportError("H3 cells need the package h3: pip install 'holdfast[geo]'") from None
    return h3
