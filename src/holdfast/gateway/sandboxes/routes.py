"""Sandboxes over HTTP: records of the store, whichever replica is asked.

Every answer has the record's version as its ETag, and whoever changes or deletes one says in If-Match what it believes
to change.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

import holdfast
from holdfast.commands.gateway import to_be_deleted
from holdfast.gateway.context import Gateway, Here
from holdfast.gateway.problem import Problem, documented
from holdfast.gateway.sandboxes import records
from holdfast.gateway.sandboxes.backends import Backends
from holdfast.gateway.sandboxes.models import Id, NewSandbox, Sandbox, SandboxChange, Sandboxes
from holdfast.gateway.sandboxes.records import TYPE

log = logging.getLogger("holdfast.gateway")

router = APIRouter(prefix="/sandboxes", tags=["sandboxes"])

IfMatch = Annotated[str | None, Header(description='The ETag of what is to be changed, or "*".', examples=['"7"'])]
_SOON = {"Retry-After": "1"}
_PATIENCE = 1.0
"""Seconds that a write waits for watch and sweep of this replica to be done with the record."""
_SAME: dict[int | str, Any] = {304: {"description": "It is still that."}}
_TEXT: dict[int | str, Any] = {200: {"content": {"text/plain": {}}, "description": "What it wrote, both outputs."}}
_ENDING: dict[int | str, Any] = {
    202: {"model": Sandbox, "description": "It is being ended."},
    204: {"description": "Nothing of it runs any more."},
}
IfNoneMatch = Annotated[str | None, Header(description="An ETag: 304 if it is still that.")]


@router.post("", status_code=201, response_model=Sandbox, responses=documented(409, 422, 429, 503))
async def create(here: Here, asked: NewSandbox, response: Response) -> Any:
    """Have a program run. It is recorded first and started then: 201 says that it will run, whatever happens to this
    replica; its phase says when it does."""
    id, token = asked.id or f"sb-{uuid4().hex[:16]}", secrets.token_urlsafe(32) if asked.supervised else None
    given = asked.model_dump() | {"limits": asked.limits.model_dump(exclude_none=True)}
    payload = _fitting(records.made(given, here.settings.entrance or here.address, token))
    async with _in_turn(here, id):
        record = await here.client.objects.put_if(
            TYPE, id, payload, holdfast.MustCreate(), name=asked.name, labels=asked.labels
        )
        await _start(here, record, token)
    _mark(response, record)
    response.headers["Location"] = f"/sandboxes/{id}"
    return records.told(record)


@router.get("/{id}", response_model=Sandbox, responses={**documented(400, 404, 422, 503), **_SAME})
async def get(here: Here, id: Id, response: Response, if_none_match: IfNoneMatch = None) -> Any:
    record = await found(here, id)
    if if_none_match is not None and _matches(if_none_match, record, "If-None-Match", weak=True):
        return Response(status_code=304, headers={"ETag": records.etag(record.version)})
    _mark(response, record)
    return records.told(record)


@router.get("", response_model=Sandboxes, responses=documented(422, 503))
async def list_(
    here: Here,
    label: Annotated[list[str], Query(description="key=value; all of them must be there.", max_length=64)] = [],  # noqa: B006
    after: Annotated[str | None, Query(description="The next of the page before.", max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Any:
    """In the order of their ids: a page stays what it is, whatever comes or goes on the pages before."""
    page = await here.client.objects.list(TYPE, labels=_labels(label), after=after or None, most=limit)
    return {"items": [records.told(each) for each in page], "next": page[-1].id if len(page) == limit else None}


@router.patch("/{id}", response_model=Sandbox, responses=documented(400, 404, 409, 412, 422, 428, 503))
async def change(here: Here, id: Id, asked: SandboxChange, response: Response, if_match: IfMatch = None) -> Any:
    """Name, labels and metadata. What runs cannot be changed."""
    given = asked.model_dump(exclude_unset=True)
    more: dict[str, Any] = {"name": given["name"]} if "name" in given else {}
    more |= {"labels": given["labels"] or {}} if "labels" in given else {}

    def changed(record: Any) -> dict[str, Any]:
        if records.phase(record.payload) in ("Deleting", "Deleted"):
            raise Problem(409, f"sandbox {id!r} is being deleted", current=record.version)
        return _fitting({**record.payload, "metadata": given.get("metadata", record.payload["metadata"]) or {}})

    record = await _write(here, id, if_match, changed, **more)
    _mark(response, record)
    return records.told(record)


@router.delete("/{id}", status_code=204, responses={**documented(400, 404, 412, 422, 428, 503), **_ENDING})
async def delete(
    here: Here,
    id: Id,
    if_match: IfMatch = None,
    wait: Annotated[float, Query(ge=0, le=60, description="Seconds to wait for its end.")] = 10.0,
) -> Response:
    """End all its processes and forget it. From the answer on that is certain, whatever happens to this replica."""

    def doomed(record: Any) -> dict[str, Any] | None:
        return to_be_deleted(record.payload) if records.phase(record.payload) != "Deleting" else None

    record = await _write(here, id, if_match, doomed)
    try:
        gone = await backends(here).end(record, wait)
    except holdfast.DriverError as error:
        log.warning(
            "sandbox %r is ended by whoever leads, the driver did not take it now: %s",
            id,
            error,
            extra={"event": "sandbox.ended_late", "sandbox": id, "error": str(error)},
        )
        gone = False
    if gone:
        await _forget(here, record)
        return Response(status_code=204)
    told = Sandbox.model_validate(records.told(record)).model_dump_json()  # as every other answer tells it
    return Response(told, 202, {"ETag": records.etag(record.version)}, "application/json")


@router.get("/{id}/log", response_class=StreamingResponse, responses={**documented(404, 409, 422, 502, 503), **_TEXT})
async def log_(
    here: Here,
    id: Id,
    tail: Annotated[int | None, Query(ge=0, lt=10**18, description="The last lines only.")] = None,
    offset: Annotated[int | None, Query(ge=0, lt=10**18, description="From this byte on.")] = None,
    follow: Annotated[bool, Query(description="And what it will write, to its end.")] = False,
) -> Any:
    if tail is not None and offset is not None:
        raise Problem(422, "tail and offset exclude each other")
    record = await found(here, id)
    if not await backends(here).runs(record):
        raise Problem(409, f"sandbox {id!r} does not run yet, or not any more: there is no log", headers=_SOON)
    pieces = here.driver.log(id, tail=tail, offset=offset, follow=follow)
    return StreamingResponse(until_stopped(here, pieces), media_type="text/plain; charset=utf-8")


def backends(here: Gateway) -> Backends:
    made: Backends = here.rooms["backends"]
    return made


async def found(here: Gateway, id: str) -> Any:
    record = await here.client.objects.get(TYPE, id)
    if record is None:
        raise Problem(404, f"there is no sandbox {id!r}")
    return record


async def _start(here: Gateway, record: Any, token: str | None) -> None:
    """What the driver refuses is not left to stand in the store; what it did not hear of, whoever leads tells it."""
    try:
        await backends(here).make(record, token)
    except holdfast.DriverError as error:
        if error.status not in (422, 429) and not (error.status == 409 and await _is_taken(here, record.id)):
            log.warning(
                "sandbox %r is started by whoever leads, the driver did not take it now: %s",
                record.id,
                error,
                extra={"event": "sandbox.started_late", "sandbox": record.id, "error": str(error)},
            )
            return
        await _forget(here, record)
        raise Problem(error.status or 502, str(error), headers=_SOON if error.status == 429 else None) from error


async def _is_taken(here: Gateway, id: str) -> bool:
    """By somebody else than us: what is ours of an earlier record of that id goes by itself."""
    other = await here.driver.get(id)
    return other is not None and not str(other.details.get("owner")).startswith(f"{await backends(here).home()}/")


async def _forget(here: Gateway, record: Any) -> None:
    """The reconciler would, too, a little later; and it may have written it since."""
    known = record.payload["incarnation"]
    while record is not None and record.payload["incarnation"] == known:
        with suppress(holdfast.Conflict):
            await here.client.objects.delete_if(TYPE, record.id, record.version)
        record = await here.client.objects.get(TYPE, record.id)


def _fitting(payload: dict[str, Any]) -> dict[str, Any]:
    """Nothing is recorded whose status could not be."""
    if (size := records.size(payload)) > records.MOST:
        told = f"what runs and its metadata have at most {records.MOST} bytes as JSON, not {size}: keep a reference"
        raise Problem(413, told)
    return payload


async def _write(
    here: Gateway, id: str, condition: str | None, change: Callable[[Any], dict[str, Any] | None], **more: Any
) -> Any:
    """What the client believes is looked at again when somebody was faster: ``*`` is good for what there is then."""
    async with _in_turn(here, id):
        while True:
            record = await _expected(here, id, condition)
            if (payload := change(record)) is None:
                return record
            with suppress(holdfast.Conflict):
                version = holdfast.MatchVersion(record.version)
                return await here.client.objects.put_if(TYPE, id, payload, version, **more)


@asynccontextmanager
async def _in_turn(here: Gateway, id: str) -> AsyncIterator[None]:
    """Neither watch nor sweep is at the record, unless that takes too long, for they may wait for a driver that hangs.
    The version decides all the same."""
    async with AsyncExitStack() as turn:
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await turn.enter_async_context(here.reconciler.exclusive(id))
        yield


async def _expected(here: Gateway, id: str, condition: str | None) -> Any:
    """The record, if it is what the client believes."""
    record = await found(here, id)
    current = {"headers": {"ETag": records.etag(record.version)}, "current": record.version}
    if condition is None:
        raise Problem(428, "If-Match is needed: the ETag of what is to be changed", **current)
    if not _matches(condition, record, "If-Match", weak=False):
        raise Problem(412, f"sandbox {id!r} is at version {record.version}: read it again", **current)
    return record


def _matches(condition: str, record: Any, header: str, *, weak: bool) -> bool:
    try:
        return records.matches(condition, record.version, weak=weak)
    except ValueError as error:
        raise Problem(400, f"{header} {error}") from None


def _labels(given: list[str]) -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    if bad := [key for key, equals, _ in pairs if not equals]:
        raise Problem(422, f"label must be key=value, not {bad[0]!r:.60}")
    found = {key: value for key, _, value in pairs}
    if len(found) < len({*given}):
        raise Problem(422, "a label has one value: the same key is asked for with two")
    return found


async def until_stopped(here: Gateway, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """However long it writes nothing."""
    stopping = asyncio.create_task(here.stopping.wait())
    try:
        while True:
            coming = asyncio.ensure_future(anext(pieces, None))
            try:
                await asyncio.wait((coming, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not coming.done() or (piece := coming.result()) is None:
                    return
            finally:
                coming.cancel()
            yield piece
    finally:
        stopping.cancel()


def _mark(response: Response, record: Any) -> None:
    response.headers["ETag"] = records.etag(record.version)
