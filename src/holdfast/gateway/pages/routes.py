"""The page, its stream of events and its static files.

Templates escape every value. Admission's Content-Security-Policy allows scripts from our own files alone, should an
escape ever be missing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import holdfast
from holdfast.gateway.context import CurrentGateway, Gateway, Loop
from holdfast.gateway.pages import formatting
from holdfast.gateway.pages.panels import Panel
from holdfast.gateway.pages.stream import PageStream
from holdfast.problem_json import Problem

router = APIRouter(include_in_schema=False)

_MEDIA_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_FOLDER = Path(__file__).parent
_FILES = {
    path.name: path.read_bytes() for path in sorted((_FOLDER / "static").iterdir()) if path.suffix in _MEDIA_TYPES
}
_VERSION = sha256(b"".join(_FILES.values())).hexdigest()[:12]

_templates = Environment(
    loader=FileSystemLoader(_FOLDER / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True,
)  # fmt: skip
_templates.filters |= {
    "span": formatting.format_span, "number": formatting.format_number, "time": formatting.format_time,
    "tone": formatting.tone,
}  # fmt: skip
_templates.globals |= {"version": _VERSION, "holdfast": holdfast.__version__}


def loops(gateway: Gateway) -> list[Loop]:
    gateway.pages = PageStream(gateway, _render)
    return [Loop("dashboard", gateway.pages.run)]


@router.get("/")
async def page(gateway: CurrentGateway) -> HTMLResponse:
    state = await gateway.pages.state()
    now = state.now()
    panels = {name: partial(_render, name, panel, now) for name, panel in state.panels.items()}
    count = state.panels["problems"]["count"]
    template = _templates.get_template("page.html")
    return HTMLResponse(template.render(panels=panels, count=count, now=now, replica=gateway.replica))


@router.get("/events")
async def events(gateway: CurrentGateway) -> StreamingResponse:
    subscription = gateway.pages.subscribe()
    first = await anext(subscription)  # raises before the answer begins when there are too many clients

    async def body() -> AsyncIterator[str]:
        try:
            yield first
            async for event in subscription:
                yield event
        finally:
            await subscription.aclose()  # type: ignore[attr-defined]

    headers = {"X-Accel-Buffering": "no"}  # nginx would collect events otherwise
    return StreamingResponse(body(), media_type="text/event-stream", headers=headers)


@router.get("/static/{name}")
async def static(name: str) -> Response:
    if name not in _FILES:
        raise Problem(404, f"there is no file {name!r:.100}")
    headers = {"Cache-Control": "private, max-age=31536000, immutable"}  # the page adds the version to the URL
    return Response(_FILES[name], media_type=_MEDIA_TYPES[Path(name).suffix], headers=headers)


def _render(name: str, panel: Panel, now: float) -> str:
    return _templates.get_template(f"{name}.html").render(panel=panel, now=now)
