"""Routes of sandboxes. Sandboxes are records of the store, so any replica answers.

Every answer has the record's version as its ETag. A change or a deletion needs that ETag in If-Match.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

import holdfast
from holdfast.commands.gateway import to_be_deleted
from holdfast.gateway.context import CurrentGateway, Gateway
from holdfast.gateway.logs import WARNING, log
from holdfast.gateway.problem import documented
from holdfast.gateway.record_page import list_page
from holdfast.gateway.sandboxes import records
from holdfast.gateway.sandboxes.models import Id, NewSandbox, SandboxAnswer, SandboxChange, SandboxPage
from holdfast.gateway.sandboxes.records import TYPE
from holdfast.problem_json import Problem

router = APIRouter(prefix="/sandboxes", tags=["sandboxes"])

IfMatch = Annotated[str | None, Header(description='The ETag of what is to be changed, or "*".', examples=['"7"'])]
_RETRY = {"Retry-After": "1"}
_RECONCILER_TIMEOUT = 1.0
"""Seconds that a write waits until the reconciler of this replica has finished with the record."""
_UNCHANGED: dict[int | str, Any] = {304: {"description": "It is unchanged."}}
_TEXT: dict[int | str, Any] = {200: {"content": {"text/plain": {}}, "description": "Its stdout and stderr."}}
_ENDING: dict[int | str, Any] = {
    202: {"model": SandboxAnswer, "description": "It is being ended."},
    204: {"description": "None of its processes runs any more."},
}
IfNoneMatch = Annotated[str | None, Header(description="An ETag: 304 if that is still current.")]


@router.post("", status_code=201, response_model=SandboxAnswer, responses=documented(409, 422, 429, 503))
async def create(gateway: CurrentGateway, body: NewSandbox, response: Response) -> Any:
    """Run a program. The sandbox is recorded first and started then: after 201 it will run, even if this replica dies.
    Its phase says when it does."""
    id, token = body.id or f"sb-{uuid4().hex[:16]}", secrets.token_urlsafe(32) if body.supervised else None
    fields = body.model_dump() | {"limits": body.limits.model_dump(exclude_none=True)}
    address = gateway.settings.entrance or gateway.address
    payload = _check_size(records.new_payload(fields, address, token, gateway.seal))
    async with _exclude_reconciler(gateway, id):
        record = await gateway.client.objects.put_if(
            TYPE, id, payload, holdfast.MustCreate(), name=body.name, labels=body.labels
        )
        await _start(gateway, record, token)
    _set_etag(response, record)
    response.headers["Location"] = f"/sandboxes/{id}"
    return records.answer(record)


@router.get("/{id}", response_model=SandboxAnswer, responses={**documented(400, 404, 422, 503), **_UNCHANGED})
async def get(gateway: CurrentGateway, id: Id, response: Response, if_none_match: IfNoneMatch = None) -> Any:
    record = await get_record(gateway, id)
    if if_none_match is not None and _matches(if_none_match, record, "If-None-Match", weak=True):
        return Response(status_code=304, headers={"ETag": records.etag(record.version)})
    _set_etag(response, record)
    return records.answer(record)


@router.get("", response_model=SandboxPage, responses=documented(422, 503))
async def list_(
    gateway: CurrentGateway,
    label: Annotated[list[str], Query(description="key=value; all of them must match.", max_length=64)] = [],  # noqa: B006
    after: Annotated[str | None, Query(description="The next of the page before.", max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Any:
    """In the order of their ids: what is created or deleted on other pages does not move a page. Large sandboxes end
    a page before its limit."""
    page, next = await list_page(gateway, TYPE, after or None, limit, _parse_labels(label))
    return {"items": [records.answer(record) for record in page], "next": next}


@router.patch("/{id}", response_model=SandboxAnswer, responses=documented(400, 404, 409, 412, 422, 428, 503))
async def change(
    gateway: CurrentGateway, id: Id, body: SandboxChange, response: Response, if_match: IfMatch = None
) -> Any:
    """Change name, labels and metadata. The program cannot be changed."""
    given = body.model_dump(exclude_unset=True)
    columns: dict[str, Any] = {"name": given["name"]} if "name" in given else {}
    columns |= {"labels": given["labels"] or {}} if "labels" in given else {}

    def new_payload(record: holdfast.ObjectRecord) -> dict[str, Any]:
        if records.phase(record.payload) in ("Deleting", "Deleted"):
            raise Problem(409, f"sandbox {id!r} is being deleted", current=record.version)
        return _check_size({**record.payload, "metadata": given.get("metadata", record.payload["metadata"]) or {}})

    record = await _update(gateway, id, if_match, new_payload, **columns)
    _set_etag(response, record)
    return records.answer(record)


@router.delete("/{id}", status_code=204, responses={**documented(400, 404, 412, 422, 428, 503), **_ENDING})
async def delete(
    gateway: CurrentGateway,
    id: Id,
    if_match: IfMatch = None,
    wait: Annotated[float, Query(ge=0, le=60, description="Seconds to wait for its end.")] = 10.0,
) -> Response:
    """End all its processes and delete its record. After the answer that is certain, even if this replica dies."""

    def new_payload(record: holdfast.ObjectRecord) -> dict[str, Any] | None:
        return to_be_deleted(record.payload) if records.phase(record.payload) != "Deleting" else None

    record = await _update(gateway, id, if_match, new_payload)
    try:
        has_ended = await gateway.backends.end(record, wait)
    except holdfast.DriverError as error:
        log.event(
            "sandbox.ended_late", WARNING, "the leader will end sandbox %(sandbox)s; the driver did not now: %(error)s",
            sandbox=id, error=str(error),
        )  # fmt: skip
        has_ended = False
    if has_ended:
        await _delete_record(gateway, record)
        return Response(status_code=204)
    body = SandboxAnswer.model_validate(records.answer(record)).model_dump_json()
    return Response(body, 202, {"ETag": records.etag(record.version)}, "application/json")


@router.get("/{id}/log", response_class=StreamingResponse, responses={**documented(404, 409, 422, 502, 503), **_TEXT})
async def log_(
    gateway: CurrentGateway,
    id: Id,
    tail: Annotated[int | None, Query(ge=0, lt=10**18, description="The last lines only.")] = None,
    offset: Annotated[int | None, Query(ge=0, lt=10**18, description="From this byte on.")] = None,
    follow: Annotated[bool, Query(description="Continue until the sandbox ends.")] = False,
) -> Any:
    if tail is not None and offset is not None:
        raise Problem(422, "tail and offset exclude each other")
    record = await get_record(gateway, id)
    if not await gateway.backends.is_running(record):
        raise Problem(409, f"sandbox {id!r} does not run yet, or not any more: there is no log", headers=_RETRY)
    pieces = gateway.driver.log(id, tail=tail, offset=offset, follow=follow)
    return StreamingResponse(until_stopped(gateway, pieces), media_type="text/plain; charset=utf-8")


async def get_record(gateway: Gateway, id: str) -> Any:
    """Raises Problem 404 when there is no such sandbox."""
    record = await gateway.client.objects.get(TYPE, id)
    if record is None:
        raise Problem(404, f"there is no sandbox {id!r}")
    return record


async def _start(gateway: Gateway, record: holdfast.ObjectRecord, token: str | None) -> None:
    """Create the backend. When the driver refuses it, delete the record and raise Problem; when the driver does not
    answer, leave it to the leader."""
    try:
        await gateway.backends.create(record, token)
    except holdfast.DriverError as error:
        if error.status not in (422, 429) and not (error.status == 409 and await _is_taken(gateway, record.id)):
            log.event(
                "sandbox.started_late", WARNING,
                "the leader will start sandbox %(sandbox)s; the driver did not now: %(error)s",
                sandbox=record.id, error=str(error),
            )  # fmt: skip
            return
        await _delete_record(gateway, record)
        raise Problem(error.status or 502, str(error), headers=_RETRY if error.status == 429 else None) from error


async def _is_taken(gateway: Gateway, id: str) -> bool:
    """Whether another installation has this id in the driver. An earlier sandbox of ours ends by itself."""
    other = await gateway.driver.get(id)
    prefix = f"{await gateway.backends.installation()}/"
    return other is not None and not str(other.details.get("owner")).startswith(prefix)


async def _delete_record(gateway: Gateway, record: holdfast.ObjectRecord) -> None:
    """Delete this incarnation, also when the reconciler has changed the record since. The reconciler would delete it,
    too, a little later."""
    current: holdfast.ObjectRecord | None = record
    while current is not None and current.payload["incarnation"] == record.payload["incarnation"]:
        with suppress(holdfast.Conflict):
            await gateway.client.objects.delete_if(TYPE, record.id, current.version)
        current = await gateway.client.objects.get(TYPE, record.id)


def _check_size(payload: dict[str, Any]) -> dict[str, Any]:
    """Raises Problem 413 when the payload is too large. The limit leaves room for the status that is added later."""
    if (size := records.size(payload)) > records.MAX_BYTES:
        limit = f"spec and metadata have at most {records.MAX_BYTES} bytes as JSON, not {size}"
        raise Problem(413, f"{limit}: store the data elsewhere, and a reference to it here")
    return payload


async def _update(
    gateway: Gateway, id: str, if_match: str | None, new_payload: Callable[[Any], dict[str, Any] | None], **columns: Any
) -> Any:
    """Write ``new_payload(record)``, or nothing if that is None, and return the record.

    After a conflict If-Match is compared with the new record: ``*`` matches that, too.
    """
    async with _exclude_reconciler(gateway, id):
        while True:
            record = await _matching_record(gateway, id, if_match)
            if (payload := new_payload(record)) is None:
                return record
            with suppress(holdfast.Conflict):
                version = holdfast.MatchVersion(record.version)
                return await gateway.client.objects.put_if(TYPE, id, payload, version, **columns)


@asynccontextmanager
async def _exclude_reconciler(gateway: Gateway, id: str) -> AsyncIterator[None]:
    """Keep this replica's reconciler from the record, unless it holds it for too long: it may wait for a driver that
    hangs. This only avoids conflicts; the version decides."""
    async with AsyncExitStack() as stack:
        with suppress(TimeoutError):
            async with asyncio.timeout(_RECONCILER_TIMEOUT):
                await stack.enter_async_context(gateway.reconciler.exclusive(id))
        yield


async def _matching_record(gateway: Gateway, id: str, if_match: str | None) -> Any:
    """The record, if If-Match names its version. Raises Problem 404, 412 or 428."""
    record = await get_record(gateway, id)
    current = {"headers": {"ETag": records.etag(record.version)}, "current": record.version}
    if if_match is None:
        raise Problem(428, "If-Match is needed: the ETag of what is to be changed", **current)
    if not _matches(if_match, record, "If-Match", weak=False):
        raise Problem(412, f"sandbox {id!r} is at version {record.version}: read it again", **current)
    return record


def _matches(condition: str, record: holdfast.ObjectRecord, header: str, *, weak: bool) -> bool:
    try:
        return records.matches(condition, record.version, weak=weak)
    except ValueError as error:
        raise Problem(400, f"{header} {error}") from None


def _parse_labels(labels: list[str]) -> dict[str, str]:
    pairs = [label.partition("=") for label in labels]
    if bad := [key for key, equals, _ in pairs if not equals]:
        raise Problem(422, f"label must be key=value, not {bad[0]!r:.60}")
    parsed = {key: value for key, _, value in pairs}
    if len(parsed) < len({*labels}):
        raise Problem(422, "a label has one value: the same key is asked for with two")
    return parsed


async def until_stopped(gateway: Gateway, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pass ``pieces`` on until they end or the replica stops, also while no piece comes."""
    stopping = asyncio.create_task(gateway.stopping.wait())
    try:
        while True:
            next_piece = asyncio.ensure_future(anext(pieces, None))
            try:
                await asyncio.wait((next_piece, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not next_piece.done() or (piece := next_piece.result()) is None:
                    return
            finally:
                next_piece.cancel()
            yield piece
    finally:
        stopping.cancel()


def _set_etag(response: Response, record: holdfast.ObjectRecord) -> None:
    response.headers["ETag"] = records.etag(record.version)
