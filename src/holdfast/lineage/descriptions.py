"""What a caller knows of datasets, and the log does not: where the data is, what it covers, how it is licensed.

Pure. All of it is checked before an export uses any of it. Fields have the names and the form that they have in STAC.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any

Descriptions = Mapping[str, Mapping[str, Any]]
"""By the name of a dataset; for the item of an operation also by its key."""
Box = tuple[float, float, float, float]
"""West, south, east, north."""

_LICENSE = re.compile(r"[\w.+-]+")
_UNLISTED = (None, "other", "proprietary", "various")
"""Licences that are not in the list of SPDX."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[^\s<>\"{}|\\^`]+")
_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+(\s*;.*)?")
_LISTS = {"Point": 0, "MultiPoint": 1, "LineString": 1, "MultiLineString": 2, "Polygon": 2, "MultiPolygon": 3}
"""In how many lists the positions of a GeoJSON geometry are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Of one dataset, or of one operation. With a geometry there is a ``bbox``, and the other way round."""

    title: str | None = None
    description: str | None = None
    license: str | None = None
    geometry: Mapping[str, Any] | None = None
    bbox: Sequence[float] | None = None
    assets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    links: Sequence[Mapping[str, Any]] = ()

    @property
    def boxes(self) -> list[Box]:
        """The ``bbox`` in two dimensions: two boxes if it crosses the antimeridian, none without a ``bbox``."""
        return [] if self.bbox is None else _boxes(self.bbox)

    @property
    def license_url(self) -> str | None:
        """Of the link ``license``, else of the list of SPDX."""
        for link in self.links:
            if link["rel"] == "license":
                return str(link["href"])
        return None if self.license in _UNLISTED else f"https://spdx.org/licenses/{self.license}"


def parse_descriptions(descriptions: Descriptions | None) -> dict[str, Description]:
    """ValueError that says which description has which mistake."""
    if descriptions is not None and not isinstance(descriptions, Mapping):
        raise ValueError(f"descriptions must be an object with the names of datasets, not {descriptions!r:.80}")
    parsed = {}
    for name, values in (descriptions or {}).items():
        try:
            parsed[name] = _parse(values)
        except ValueError as error:
            raise ValueError(f"the description of {name!r}: {error}") from None
    return parsed


def outline(boxes: Sequence[Box]) -> dict[str, Any]:
    """Boxes as a GeoJSON geometry."""
    polygons = [[[[w, s], [e, s], [e, n], [w, n], [w, s]]] for w, s, e, n in boxes]
    if len(polygons) == 1:
        return {"type": "Polygon", "coordinates": polygons[0]}
    return {"type": "MultiPolygon", "coordinates": polygons}


def _parse(values: object) -> Description:
    names = [each.name for each in fields(Description)]
    values = _mapping(values, "it")
    if unknown := sorted(values.keys() - set(names), key=str):
        raise ValueError(f"unknown field {unknown[0]!r}; the fields are {', '.join(names)}")
    given = {name: value for name, value in values.items() if value is not None}
    for name in ("title", "description"):
        if name in given:
            _text(given[name], name)
    if "license" in given and not (isinstance(given["license"], str) and _LICENSE.fullmatch(given["license"])):
        raise ValueError(f"license must be an SPDX identifier or 'other', not {given['license']!r:.80}")
    for name, asset in _mapping(given.get("assets", {}), "assets").items():
        _check_target(asset, f"assets.{name}")
    for index, link in enumerate(_list(given.get("links", ()), "links")):
        _check_target(link, f"links[{index}]")
        _text(link.get("rel"), f"links[{index}].rel")
    if "bbox" in given:
        _check_bbox(given["bbox"])
    if "geometry" in given:
        positions = [position[:2] for position in _positions_of(given["geometry"], "geometry")]
        if not positions:
            raise ValueError("geometry must contain a position")
        lowest, highest = ([choose(axis) for axis in zip(*positions, strict=True)] for choose in (min, max))
        given.setdefault("bbox", [*lowest, *highest])
    elif "bbox" in given:
        given["geometry"] = outline(_boxes(given["bbox"]))
    return Description(**given)


def _check_target(value: object, path: str) -> None:
    """An asset or a link."""
    target = _mapping(value, path)
    href = target.get("href")
    if not isinstance(href, str) or not _URL.fullmatch(href):
        raise ValueError(f"{path}.href must be an absolute URL, such as s3://bucket/key, not {href!r:.80}")
    for name in ("title", "description"):
        if name in target:
            _text(target[name], f"{path}.{name}")
    if "type" in target and not (isinstance(target["type"], str) and _MEDIA_TYPE.fullmatch(target["type"])):
        raise ValueError(f"{path}.type must be a media type, such as image/tiff, not {target['type']!r:.80}")
    for role in _list(target.get("roles", ()), f"{path}.roles"):
        _text(role, f"a role in {path}.roles")


def _check_bbox(value: object) -> None:
    bbox = _list(value, "bbox")
    half = len(bbox) // 2
    if len(bbox) not in (4, 6):
        raise ValueError(f"bbox must have 4 or 6 numbers, west and south first, not {len(bbox)}")
    lower, upper = _position(bbox[:half], "bbox"), _position(bbox[half:], "bbox")
    if any(low > high for low, high in zip(lower[1:], upper[1:], strict=True)):
        raise ValueError(f"bbox must have its lower limits first: west, south, east, north; not {list(bbox)}")


def _positions_of(value: object, path: str) -> Iterator[Sequence[float]]:
    """The positions of a GeoJSON geometry."""
    geometry = _mapping(value, path)
    kind = geometry.get("type")
    if kind == "GeometryCollection":
        for index, each in enumerate(_list(geometry.get("geometries"), f"{path}.geometries")):
            yield from _positions_of(each, f"{path}.geometries[{index}]")
        return
    if kind not in _LISTS:
        raise ValueError(f"{path} must be a GeoJSON geometry, such as a Polygon, not of the type {kind!r:.80}")
    lines = [(geometry.get("coordinates"), f"{path}.coordinates")]
    for level in range(_LISTS[kind], 0, -1):
        is_ring = level == 1 and "Polygon" in kind
        least = 4 if is_ring else 2 if level == 1 and "LineString" in kind else 1
        inner = []
        for coordinates, where in lines:
            parts = _list(coordinates, where)
            if len(parts) < least or (is_ring and parts[0] != parts[-1]):
                closed = ", the last of which is the first" if is_ring else ""
                raise ValueError(f"{where} must have at least {least} elements{closed}")
            inner += [(part, f"{where}[{index}]") for index, part in enumerate(parts)]
        lines = inner
    for coordinates, where in lines:
        yield _position(coordinates, where)


def _position(value: object, path: str) -> Sequence[float]:
    position = _list(value, path)
    numbers = [each for each in position if type(each) is int or (type(each) is float and isfinite(each))]
    if len(position) not in (2, 3) or len(numbers) != len(position) or abs(numbers[0]) > 180 or abs(numbers[1]) > 90:
        raise ValueError(f"{path} must be longitude and latitude in degrees, not {value!r:.80}")
    return numbers


def _boxes(bbox: Sequence[float]) -> list[Box]:
    half = len(bbox) // 2
    (west, south), (east, north) = bbox[:2], bbox[half : half + 2]
    if west <= east:
        return [(west, south, east, north)]
    return [(west, south, 180, north), (-180, south, east, north)]


def _text(value: object, path: str) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{path} must be text, not {value!r:.80}")


def _list(value: object, path: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(f"{path} must be a list, not {value!r:.80}")
    return value


def _mapping(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} must be an object, not {value!r:.80}")
    return value
