"""The queries of operators. They write nothing, and every answer is bounded.

A route returns the library's records; pydantic validates them against the ``response_model`` in ``models``.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query

import holdfast
from holdfast.gateway.context import CurrentGateway
from holdfast.gateway.operators import models
from holdfast.gateway.problem import documented
from holdfast.gateway.record_page import PAGE_BYTES, bounded_list
from holdfast.problem_json import Problem

router = APIRouter(prefix="/api", tags=["operators"], responses=documented(422, 503))

PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]+$"
Limit = Annotated[int, Query(ge=1, le=1000, description="The maximum number of items.")]
Text = Annotated[str | None, Query(min_length=1, max_length=200, pattern=PRINTABLE)]
Status = Literal["success", "failure", "running", "partial", "undone"]
Key = Annotated[
    str,
    Path(min_length=1, max_length=200, pattern=PRINTABLE, description="The text of its key, or its 64 hex digits."),
]


@router.get("/leases", summary="Leases and their holders, by name", response_model=models.LeasePage)
async def leases(gateway: CurrentGateway, limit: Limit = 100, after: Text = None) -> Any:
    records = await gateway.client.leases.list()
    rest = [record for record in records if after is None or record.name > after]
    page = rest[:limit]
    return {"leases": page, "count": len(records), "next": page[-1].name if len(rest) > limit else None}


@router.get("/history", summary="Grants that have ended, the latest first", response_model=models.HistoryList)
async def history(gateway: CurrentGateway, name: Text = None, limit: Limit = 100) -> Any:
    return {"history": await gateway.client.leases.history(name, limit=limit)}


@router.get("/locks", summary="Locks, their holders and waiters", response_model=models.LockList)
async def locks(gateway: CurrentGateway, limit: Limit = 100) -> Any:
    records = await gateway.client.locks.list()
    return {"locks": records[:limit], "count": len(records)}


@router.get("/operations", summary="Operations, the latest first", response_model=models.OperationList)
async def operations(
    gateway: CurrentGateway, status: Status | None = None, dataset: Text = None, limit: Limit = 100
) -> Any:
    page, more = await bounded_list(gateway, gateway.client.operations.list, limit, status=status, dataset=dataset)
    return {"operations": page, "more": more}


@router.get(
    "/operations/{key:path}", summary="One operation, and its entries in the log", responses=documented(404),
    response_model=models.OperationWithLog,
)  # fmt: skip
async def operation(gateway: CurrentGateway, key: Key) -> Any:
    record = await gateway.client.operations.get(key)
    if record is None:
        raise Problem(404, f"there is no operation {key!r}")
    return {**asdict(record), "wal": await gateway.client.operations.history(key)}


@router.get(
    "/wal",
    summary="The log of all operations, in its order",
    responses=documented(410),
    response_model=models.LogEntryPage,
)
async def wal(
    gateway: CurrentGateway,
    after: Annotated[
        str | None, Query(pattern=r"^[0-9]{1,18}(/[0-9]{1,18}/[0-9]{1,18})?$", description="`next` of a page.")
    ] = None,
    limit: Limit = 100,
) -> Any:
    try:
        async with gateway.listings:
            page = await gateway.client.operations.read(after, limit=limit, max_bytes=PAGE_BYTES)
    except holdfast.CursorExpired as error:
        raise Problem(410, str(error)) from None
    return {"wal": page.entries, "next": page.cursor}


@router.get("/schedules", summary="Schedules, what runs, and what is next", response_model=models.ScheduleList)
async def schedules(gateway: CurrentGateway, limit: Limit = 100) -> Any:
    records = await gateway.client.schedules.list()
    return {"schedules": records[:limit], "count": len(records)}


@router.get(
    "/schedules/{name:path}", summary="What became of the slots of a schedule, the latest first",
    responses=documented(404), response_model=models.ScheduleRunList,
)  # fmt: skip
async def schedule_runs(gateway: CurrentGateway, name: Key, limit: Limit = 100) -> Any:
    try:
        return {"runs": await gateway.client.schedules.runs(name, limit=limit)}
    except LookupError as error:
        raise Problem(404, str(error)) from None


@router.get(
    "/outbox", summary="How far each relay is behind, and what its sink refused", response_model=models.RelayList
)
async def outbox(gateway: CurrentGateway, limit: Limit = 10) -> Any:
    relays = []
    for relay in await gateway.client.relays.list():
        refused = await gateway.client.relays.parked(relay.name, limit=limit) if relay.parked else []
        relays.append({**asdict(relay), "refused": refused})
    return {"relays": relays, "lag": max((relay["lag"] for relay in relays), default=0.0)}


@router.get("/reviews", summary="Operations that need, or had, a review", response_model=models.ReviewList)
async def reviews(
    gateway: CurrentGateway,
    status: Literal["open", "approved", "rejected", "reset", "done", "any"] = "open",
    key: Text = None,
    limit: Limit = 100,
) -> Any:
    only = None if status == "any" else status
    page, more = await bounded_list(gateway, gateway.client.reviews.list, limit, status=only, key=key)
    return {"reviews": page, "more": more}


@router.get("/gates", summary="Open gates, by whom and until when", response_model=models.GateList)
async def gates(gateway: CurrentGateway) -> Any:
    """A gate is open while the lease behind it is held."""
    leases = await gateway.client.gates.list()
    return {
        "gates": [
            {
                **asdict(lease),
                "name": lease.name.partition(":")[2],
                "timed": "for" in lease.info,
                "reason": lease.info.get("reason"),
            }
            for lease in leases
        ]
    }


@router.get("/audit", summary="What operators did and why, the latest first", response_model=models.AuditList)
async def audit(gateway: CurrentGateway, limit: Limit = 100) -> Any:
    page, more = await bounded_list(gateway, gateway.client.audit.list, limit)
    return {"audit": page, "more": more}
