"""The dashboard of a replica, at the root of its address: ``holdfast.dashboard`` with what a gateway adds to it."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from holdfast.dashboard.app import ROUTES, Dashboard
from holdfast.dashboard.source import PageSource
from holdfast.dashboard.webhook import Webhook
from holdfast.gateway.context import Gateway, Loop
from holdfast.gateway.page_views import PATHS, added_pages

router = APIRouter(include_in_schema=False)
_PANELS = frozenset({"leaders", "leases", "locks", "slots", "operations", "sandboxes", "agents"})
"""Shown in any case, with what fills them."""


def loops(gateway: Gateway) -> list[Loop]:
    gateway.pages = Dashboard(
        gateway.client,
        operator=_operator,
        run=gateway.commands.run,
        source=PageSource(
            gateway.client,
            gateway.settings.pools,
            lambda: getattr(gateway.elector, "name", None),
            added_pages(gateway),
        ),
        answered_by=gateway.replica,
        links=("/healthz", "/readyz", "/metrics", "/openapi.json"),
        always=_PANELS,
        stopping=gateway.stopping,
    )
    target = gateway.settings.webhook
    webhook = [] if target is None else [Loop("webhook", Webhook(gateway.pages.source, target).run)]
    return [Loop("samples of waits", gateway.pages.sample_waits), *webhook]


def _operator(request: Request) -> str | None:
    """The name of the token, if it may operate; admission refuses writes of the others."""
    name: str | None = request.state.principal if request.state.may_operate else None
    return name


def _add_route(path: str, method: str, handler: str) -> None:
    async def answer(request: Request) -> Response:
        response: Response = await getattr(request.app.state.gateway.pages, handler)(path, request)
        return response

    router.add_api_route(path, answer, methods=[method])


for _route in (*ROUTES, *((path, "GET", "page") for path in PATHS)):
    _add_route(*_route)
