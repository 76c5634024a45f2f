"""The page, its stream, and the few files that it needs. Everything that is shown of a name or a payload is text; and
should it not be, the shield's policy lets nothing run that is not a file of ours."""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import holdfast
from holdfast.gateway.context import Gateway, Here, Loop
from holdfast.gateway.pages import words
from holdfast.gateway.pages.parts import Part
from holdfast.gateway.pages.telling import Teller
from holdfast.gateway.problem import Problem

router = APIRouter(include_in_schema=False)

_KINDS = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_HERE = Path(__file__).parent
_FILES = {each.name: each.read_bytes() for each in sorted((_HERE / "static").iterdir()) if each.suffix in _KINDS}
_VERSION = sha256(b"".join(_FILES.values())).hexdigest()[:12]

_templates = Environment(
    loader=FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True,
)  # fmt: skip
_templates.filters |= {"span": words.span, "number": words.number, "moment": words.moment, "tone": words.tone}
_templates.globals |= {"version": _VERSION, "holdfast": holdfast.__version__}


def loops(gateway: Gateway) -> list[Loop]:
    teller = gateway.rooms["pages"] = Teller(gateway, _render)
    return [Loop("dashboard", teller.serve)]


@router.get("/")
async def page(here: Here) -> HTMLResponse:
    picture = await _teller(here).picture()
    now = picture.now()
    rendered = {name: partial(_render, name, part, now) for name, part in picture.parts.items()}
    body = _templates.get_template("page.html").render(
        parts=rendered, count=picture.parts["problems"]["count"], now=now, replica=here.replica
    )
    return HTMLResponse(body)


@router.get("/events")
async def events(here: Here) -> StreamingResponse:
    stream = _teller(here).watch()
    first = await anext(stream)  # so that one too many is answered with a problem

    async def told() -> Any:
        try:
            yield first
            async for each in stream:
                yield each
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    headers = {"X-Accel-Buffering": "no"}  # a proxy that collects would tell nothing
    return StreamingResponse(told(), media_type="text/event-stream", headers=headers)


@router.get("/static/{name}")
async def static(name: str) -> Response:
    if name not in _FILES:
        raise Problem(404, f"there is no file {name!r:.100}")
    headers = {"Cache-Control": "private, max-age=31536000, immutable"}  # another version has another address
    return Response(_FILES[name], media_type=_KINDS[Path(name).suffix], headers=headers)


def _teller(here: Gateway) -> Teller:
    teller: Teller = here.rooms["pages"]
    return teller


def _render(name: str, part: Part, now: float) -> str:
    return _templates.get_template(f"{name}.html").render(part=part, now=now)
