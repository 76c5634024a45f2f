"""The ASGI application of the dashboard: pages, their streams of events, static files, and the dialogs of actions.

Templates escape every value. The Content-Security-Policy allows scripts from our own files alone, should an escape ever
be missing. A form is accepted only from a page of the same origin, and only for a request that has an operator.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from inspect import isawaitable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import holdfast
from holdfast import commands as governed
from holdfast.dashboard import actions, activity, formats, listings, snapshot, things
from holdfast.dashboard.charts import SAMPLE_EVERY
from holdfast.dashboard.panels import build_panels
from holdfast.dashboard.snapshot import MAX_BYTES, Snapshot
from holdfast.dashboard.source import MAX_READ, PageSource
from holdfast.dashboard.stream import PageStream, PageView, Panel
from holdfast.dashboard.timeline import HOUR, WINDOWS

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
    from starlette.routing import Route, Router
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"the dashboard needs {missing.name}: pip install 'holdfast[server]'", name=missing.name
    ) from None

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with no-referrer, a browser sends no origin with a form
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
MAX_STREAMS = 200
"""Clients that watch at a time."""
LIFETIME = 10.0
"""Seconds of a stream where the server cannot say that it stops: so long it waits for its last client."""
_MAX_QUERY = 4096
_MAX_FORM = 65536
_MEDIA_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_FOLDER = Path(__file__).parent
_FILES = {
    path.name: path.read_bytes() for path in sorted((_FOLDER / "static").iterdir()) if path.suffix in _MEDIA_TYPES
}

_templates = Environment(
    loader=FileSystemLoader(_FOLDER / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True,
)  # fmt: skip
_templates.filters |= {
    "span": formats.format_span, "number": formats.format_number, "time": formats.format_time,
    "tone": formats.tone, "middle": formats.truncate, "clock": formats.format_clock,
}  # fmt: skip
_templates.globals |= {
    "version": sha256(b"".join(_FILES.values())).hexdigest()[:12], "holdfast": holdfast.__version__,
    "link": formats.link,
}  # fmt: skip

Query = Mapping[str, str]
Reading = Callable[[PageSource, Query], Awaitable[PageView]]
Operator = Callable[[Any], str | Awaitable[str | None] | None]
Work = Callable[[holdfast.Client], Any]

_PAGES: dict[str, Reading] = {
    "/lease": things.lease_page, "/lock": things.lock_page, "/operation": things.operation_page,
    "/schedule": things.schedule_page, "/pool": things.pool_page, "/explain": things.explain_page,
    "/leases": listings.leases_page, "/history": listings.history_page, "/locks": listings.locks_page,
    "/operations": listings.operations_page, "/schedules": listings.schedules_page, "/audit": listings.audit_page,
    "/objects": listings.objects_page, "/reviews": listings.reviews_page, "/charts": activity.charts_page,
}  # fmt: skip
_NAVIGATION = (
    ("/", "Overview"), ("/charts", "Charts"), ("/leases", "Leases"), ("/locks", "Locks"), ("/operations", "Operations"),
    ("/schedules", "Schedules"), ("/reviews", "Reviews"), ("/history", "History"), ("/audit", "Audit"),
)  # fmt: skip
_CONTENTS = ("rows", "pools", "tiles", "roots", "sentences", "empty", "relays", "text")
"""Of a panel: one that has none of these is hidden."""


class Dashboard:
    """The application that ``dashboard`` returns; the gateway and the command line give it more.

    ``run`` executes a function of a client in a thread. ``always``: the panels that are shown even if they are empty.
    ``stopping`` ends all streams.
    """

    def __init__(
        self,
        client: Any,
        *,
        operator: Operator | None = None,
        run: Callable[[Work], Awaitable[Any]] | None = None,
        source: PageSource | None = None,
        answered_by: str = "",
        links: tuple[str, ...] = (),
        always: frozenset[str] = frozenset({"leases"}),
        stopping: asyncio.Event | None = None,
    ) -> None:
        if not isinstance(client, holdfast.Client | holdfast.AsyncClient):
            raise TypeError(f"client must be a holdfast.Client or AsyncClient, not {type(client).__name__}")
        if operator is not None and run is None and not isinstance(client, holdfast.Client):
            raise TypeError("operator= needs a holdfast.Client: governed commands run in threads")
        self.source = source or PageSource(client)
        self._pages = _PAGES | {path: page.read for path, page in self.source.pages.items()}
        self._operator, self._run = operator, run or self._run_in_thread
        self._answered_by, self._links = answered_by, links
        self._always = always | {"problems", "findings"}
        self._lifetime = LIFETIME if stopping is None else None
        self._stopping = stopping or asyncio.Event()
        self._last: Snapshot | None = None
        self._streams: dict[Any, PageStream] = {}
        self._router = Router([
            Route(path, partial(getattr(self, handler), path), methods=[method])
            for path, method, handler in (*ROUTES, *((path, "GET", "page") for path in self.source.pages))
        ])  # fmt: skip

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._router(scope, receive, send)

    # Pages

    async def page(self, path: str, request: Request) -> Response:
        query = dict(request.query_params)
        actor = await self._actor(request)
        if len(request.url.query) > _MAX_QUERY:
            return self._message(
                request, 414, "The address is too long", f"A query has at most {_MAX_QUERY} characters."
            )
        try:
            stream = self._stream(path, query, _base(request), actor is not None)
            state = await stream.state()
        except ValueError as error:
            return self._message(request, 422, "The address is not valid", str(error))
        now = state.now()
        panels = {name: self._panel(request, name, panel, now, actor) for name, panel in state.view.panels.items()}
        count = state.view.panels["problems"]["count"] if path == "/" else 0
        return self._html(
            request, "overview.html" if path == "/" else "page.html", actor=actor, panels=panels, view=state.view,
            now=now, path=path, query=query, count=count,
        )  # fmt: skip

    def _panel(self, request: Request, name: str, panel: Panel, now: float, actor: str | None) -> tuple[Panel, str]:
        return panel, self._render(_base(request), actor is not None, name, panel, now)

    def _render(self, base: str, may_act: bool, name: str, panel: Panel, now: float) -> str:
        """The HTML of a panel; empty when it is hidden."""
        if name not in self._always and not any(panel.get(content) for content in _CONTENTS):
            return ""
        template = _templates.get_template(f"{panel.get('kind', name)}.html")
        return template.render(panel=panel, now=now, base=base, may_act=may_act)

    def _stream(self, path: str, query: Query, base: str, may_act: bool) -> PageStream:
        """The stream of a page, shared by all who watch it. Unwatched ones are dropped when there are many."""
        key = path, tuple(sorted(query.items())), base, may_act
        if key not in self._streams:
            if len(self._streams) >= MAX_STREAMS:
                self._streams = {key: stream for key, stream in self._streams.items() if stream.clients}
            previous: list[PageView] = []
            self._streams[key] = PageStream(
                partial(self._read, path, query, previous), partial(self._render, base, may_act), self._stopping,
                self._lifetime,
            )  # fmt: skip
        return self._streams[key]

    async def _read(self, path: str, query: Query, previous: list[PageView]) -> PageView:
        """The view of a page. When the database does not answer: the previous one, with the reason."""
        if path == "/":
            self._last = await snapshot.take_snapshot(self.source, self._last)
            if self._last.trouble is None:
                self.source.waits.add(self._last.at, self._last.leases, self._last.locks)
            window = WINDOWS.get(query.get("window", ""), HOUR)
            return PageView("Overview", self._last.at, build_panels(self._last, window))
        trouble = {"kind": "trouble", "text": ""}
        try:
            async with asyncio.timeout(snapshot.READ_WITHIN):
                view = await self._pages[path](self.source, query)
            view = replace(view, panels={"trouble": trouble, **view.panels})
            previous[:] = [view]
        except (holdfast.HoldfastError, TimeoutError) as error:
            trouble["text"] = str(error) or f"the database has not answered in {snapshot.READ_WITHIN:g} s"
            last = previous[0] if previous else PageView(path.strip("/").capitalize(), time.time(), {})
            view = replace(last, panels={**last.panels, "trouble": trouble})
        return view

    async def events(self, _: str, request: Request) -> Response:
        """The stream of the page ``at``."""
        query = dict(request.query_params)
        path = query.pop("at", "/")
        actor = await self._actor(request)
        if path not in ("/", *self._pages) or len(request.url.query) > _MAX_QUERY:
            return self._message(request, 404, "There is no such page", path[:200])
        if sum(stream.clients for stream in self._streams.values()) >= MAX_STREAMS:
            text = f"{MAX_STREAMS} clients watch here already."
            return self._message(request, 503, "Too many clients", text, {"retry-after": "10"})
        try:
            subscription = self._stream(path, query, _base(request), actor is not None).subscribe()
            first = await anext(subscription)
        except ValueError as error:
            return self._message(request, 422, "The address is not valid", str(error))

        async def body() -> AsyncIterator[str]:
            try:
                yield first
                async for event in subscription:
                    yield event
            finally:
                await subscription.aclose()  # type: ignore[attr-defined]

        headers = {**HEADERS, "x-accel-buffering": "no"}  # nginx would collect events otherwise
        return StreamingResponse(body(), media_type="text/event-stream", headers=headers)

    async def static(self, _: str, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _FILES:
            return self._message(request, 404, "There is no such file", name[:100])
        caching = {"cache-control": "private, max-age=31536000, immutable"}  # the page adds the version to the URL
        return Response(_FILES[name], media_type=_MEDIA_TYPES[Path(name).suffix], headers={**HEADERS, **caching})

    # Actions

    async def dialog(self, _: str, request: Request) -> Response:
        """The dry run of a command, and the form that runs it."""
        return await self._dialog(request, dict(request.query_params), "", "")

    async def act(self, _: str, request: Request) -> Response:
        """Run a command, if its plan is still the one that the operator has read."""
        actor, name = await self._actor(request), request.path_params["name"]
        if actor is None or name not in actions.ACTIONS:
            return self._message(request, 403, "Refused", "This dashboard is read-only for you.")
        if not _is_same_origin(request):
            return self._message(request, 403, "Refused", "A page of another origin sent this form.")
        form = await _read_form(request)
        if form is None:
            return self._message(request, 413, "Refused", f"A form has at most {_MAX_FORM} bytes.")
        given = {**form, **dict(request.query_params)}
        values, reason = actions.clean(name, given), form.get("reason", "").strip()

        def work(client: holdfast.Client) -> tuple[bool, Any]:
            planned = governed.run(client, name, values, actor=actor, reason=reason or "dry run", dry_run=True)
            if actions.plan_digest(planned.changes) != form.get("plan"):
                return False, None
            return True, governed.run(client, name, values, actor=actor, reason=reason)

        try:
            is_run, outcome = await self._run(work)
        except (holdfast.HoldfastError, ValueError) as error:
            return await self._dialog(request, given, reason, str(error), is_certain=_is_certain(error))
        if not is_run:
            return await self._dialog(
                request, given, reason, "What it would change is different now: read the plan again."
            )
        return RedirectResponse(
            f"{_base(request)}{formats.link('/entry', id=str(outcome.entry))}", 303, headers=HEADERS
        )

    async def _dialog(
        self, request: Request, given: Query, reason: str, error: str, *, is_certain: bool = True
    ) -> Response:
        """``is_certain``: whether the command that ended with ``error`` has changed nothing."""
        actor, name = await self._actor(request), request.path_params["name"]
        if name not in actions.ACTIONS:
            return self._message(request, 404, "There is no such action", name[:100])
        values = actions.clean(name, given)
        command = actions.command_line(name, values, reason or "…")
        if actor is None:
            text = f"This dashboard is read-only for you. As a command: {command}"
            return self._message(request, 403, "Read-only", text)
        work = partial(_plan, name=name, values=values, actor=actor)
        changes, refusal = await self._run(work)
        declared = governed.commands()[name]
        return self._html(
            request, "dialog.html", actor=actor, view=PageView(name, time.time(), {}), command=command,
            summary=declared.summary, destructive=declared.destructive, changes=changes[: actions.MAX_CHANGES],
            more=len(changes[actions.MAX_CHANGES :]), refusal=refusal, error=error,
            is_certain=is_certain, reason=reason,
            plan=actions.plan_digest(changes), fields=actions.fields(name, dict(request.query_params)), given=given,
        )  # fmt: skip

    async def entry(self, _: str, request: Request) -> Response:
        """One entry of the audit."""
        number = request.query_params.get("id", "")
        try:
            entries = await self.source.call(self.source.client.audit.list, limit=MAX_READ, max_bytes=MAX_BYTES)
        except holdfast.HoldfastError as error:
            return self._message(request, 503, "The database does not answer", str(error))
        entry = next((entry for entry in entries if str(entry.id) == number), None)
        if entry is None:
            return self._message(request, 404, "There is no such entry", f"The audit has no entry {number[:20]}.")
        detail = entry.detail if isinstance(entry.detail, Mapping) else {}
        changes = [str(change) for change in detail.get("changes", ())]
        return self._html(
            request, "entry.html", actor=await self._actor(request), entry=entry, changes=changes,
            view=PageView("Audit entry", time.time(), {}, number),
        )  # fmt: skip

    async def _actor(self, request: Request) -> str | None:
        """The operator of this request; None: it may only read."""
        if self._operator is None:
            return None
        actor = self._operator(request)
        if isawaitable(actor):
            actor = await actor
        if actor is not None and not str(actor).strip():
            raise TypeError(f"operator= must return the name of the operator or None, not {actor!r:.60}")
        return actor

    async def _run_in_thread(self, work: Work) -> Any:
        return await asyncio.to_thread(work, self.source.client)

    async def sample_waits(self) -> None:
        """Sample who waits, until the dashboard stops. Without this it is done only while the overview or the charts
        are open."""
        while not self._stopping.is_set():
            with suppress(holdfast.HoldfastError):
                await activity.sample_waits(self.source)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), SAMPLE_EVERY)

    # Answers

    def _html(self, request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
        base = _base(request)
        values = {"path": "", "query": {}, "count": 0, "now": time.time(), **values}
        text = _templates.get_template(template).render(
            base=base, replica=self._answered_by, links=self._links, may_act=values.get("actor") is not None,
            navigation=(*_NAVIGATION, *self.source.navigation), added=self.source.pages, **values,
        )  # fmt: skip
        return HTMLResponse(text, status, headers=HEADERS)

    def _message(
        self, request: Request, status: int, title: str, text: str, headers: Mapping[str, str] | None = None
    ) -> Response:
        answer = self._html(
            request, "message.html", status=status, actor=None, view=PageView(title, time.time(), {}), text=text,
        )  # fmt: skip
        answer.headers.update(headers or {})
        return answer


def dashboard(client: holdfast.Client | holdfast.AsyncClient, *, operator: Operator | None = None) -> Dashboard:
    """An ASGI application that shows the database of ``client``: ``app.mount("/holdfast", holdfast.dashboard(client))``
    in Starlette or FastAPI. Everybody who can reach it can read it: put your own authentication in front of it.

    ``client``: a ``Client``, or an ``AsyncClient`` of the application's event loop. ``operator``: a function of the
    request, sync or async, that returns the name of the operator who sends it, or None. Requests with an operator may
    run governed commands; without it the dashboard is read-only. It needs a ``Client``.
    """
    return Dashboard(client, operator=operator)


ROUTES = (
    *((path, "GET", "page") for path in ("/", *_PAGES)),
    ("/events", "GET", "events"),
    ("/static/{name}", "GET", "static"),
    ("/entry", "GET", "entry"),
    ("/act/{name}", "GET", "dialog"),
    ("/act/{name}", "POST", "act"),
)
"""Path, method and the method of ``Dashboard`` that answers; it is given the path and the request."""


def _plan(client: holdfast.Client, *, name: str, values: Mapping[str, str], actor: str) -> tuple[list[str], str]:
    """What the command would change, or why it is refused."""
    try:
        outcome = governed.run(client, name, values, actor=actor, reason="dry run", dry_run=True)
    except (holdfast.HoldfastError, ValueError) as error:
        return [], str(error)
    return outcome.changes, ""


def _is_certain(error: Exception) -> bool:
    """Whether an error of a command says that nothing was changed."""
    if isinstance(error, holdfast.EngineError):
        return error.certain
    return not isinstance(error, governed.CommandUnsettled | holdfast.OwnershipUnknown | holdfast.DriverError)


def _base(request: Request) -> str:
    """Where the dashboard is mounted."""
    base: str = request.scope.get("root_path", "")
    return base.rstrip("/")


def _is_same_origin(request: Request) -> bool:
    """Whether a page of this origin sent the form. A browser names the origin, so a request without one is refused: it
    might be that of a foreign page, to which the browser adds credentials."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    host = urlsplit(request.headers.get("origin", "")).netloc.lower()
    return bool(host) and host == request.headers.get("host", "").lower()


async def _read_form(request: Request) -> dict[str, str] | None:
    """The fields of a form; None when it is too long."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_FORM:
            return None
    return dict(parse_qsl(body.decode(errors="replace"), max_num_fields=50))
