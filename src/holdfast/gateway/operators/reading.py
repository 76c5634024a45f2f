"""What there is to see. Nothing here writes, and every answer is bounded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query

import holdfast
from holdfast.gateway.context import Here
from holdfast.gateway.operators import answers
from holdfast.gateway.problem import Problem, documented

router = APIRouter(prefix="/api", tags=["operators"], responses=documented(422, 503))

TEXT = r"^[^\x00-\x1f\x7f-\x9f]+$"
Most = Annotated[int, Query(ge=1, le=1000, description="How many at the most.")]
Text = Annotated[str | None, Query(min_length=1, max_length=200, pattern=TEXT)]
Status = Literal["success", "failure", "running", "partial"]
Key = Annotated[
    str, Path(min_length=1, max_length=200, pattern=TEXT, description="The text that was its key, or its 64 digits.")
]


@router.get("/leases", summary="Who holds what, by name")
async def leases(here: Here, most: Most = 100, after: Text = None) -> answers.Leases:
    found = await here.client.leases.list()
    rest = [each for each in found if after is None or each.name > after]
    page = [answers.Lease.model_validate(each) for each in rest[:most]]
    return answers.Leases(leases=page, count=len(found), next=page[-1].name if len(rest) > most else None)


@router.get("/history", summary="Grants that have ended, the latest first")
async def history(here: Here, name: Text = None, most: Most = 100) -> answers.History:
    found = await here.client.leases.history(name, most=most)
    return answers.History(history=[answers.Grant.model_validate(each) for each in found])


@router.get("/locks", summary="Who holds which lock, and who waits for whom")
async def locks(here: Here, most: Most = 100) -> answers.Locks:
    found = await here.client.locks.list()
    return answers.Locks(locks=[answers.Lock.model_validate(each) for each in found[:most]], count=len(found))


@router.get("/operations", summary="What became of operations, the latest first")
async def operations(
    here: Here, status: Status | None = None, dataset: Text = None, most: Most = 100
) -> answers.Operations:
    found = await here.client.operations.list(status=status, dataset=dataset, most=most)
    return answers.Operations(operations=[answers.Operation.model_validate(each) for each in found])


@router.get("/operations/{key:path}", summary="One operation, and its entries in the log", responses=documented(404))
async def operation(here: Here, key: Key) -> answers.OperationWithLog:
    record = await here.client.operations.get(key)
    if record is None:
        raise Problem(404, f"there is no operation {key!r}")
    told: dict[str, Any] = answers.Operation.model_validate(record).model_dump()
    return answers.OperationWithLog(**told, wal=answers.entries(await here.client.operations.history(key)))


@router.get("/wal", summary="The log of all operations, in its order", responses=documented(410))
async def wal(
    here: Here,
    after: Annotated[
        str | None, Query(pattern=r"^[0-9]{1,18}(/[0-9]{1,18}/[0-9]{1,18})?$", description="`next` of a page.")
    ] = None,
    most: Most = 100,
) -> answers.Log:
    try:
        page = await here.client.operations.read(after, most=most)
    except holdfast.CursorExpired as error:
        raise Problem(410, str(error)) from None
    return answers.Log(wal=answers.entries(page.entries), next=page.cursor)


@router.get("/outbox", summary="How far each relay is behind, and what its sink refused")
async def outbox(here: Here, most: Most = 10) -> answers.Outbox:
    relays = []
    for each in await here.client.relays.list():
        refused = await here.client.relays.parked(each.name, most=most) if each.parked else []
        told = {name: getattr(each, name) for name in answers.Relay.model_fields if name != "refused"}
        relays.append(answers.Relay(**told, refused=[_parked(one) for one in refused]))
    return answers.Outbox(relays=relays, lag=max((each.lag for each in relays), default=0.0))


@router.get("/reviews", summary="Operations that somebody has to look at, or has")
async def reviews(
    here: Here,
    status: Literal["open", "approved", "rejected", "reset", "done", "any"] = "open",
    key: Text = None,
    most: Most = 100,
) -> answers.Reviews:
    found = await here.client.reviews.list(status=None if status == "any" else status, key=key, most=most)
    return answers.Reviews(reviews=[answers.Review.model_validate(each) for each in found])


@router.get("/gates", summary="Which gates are open, by whom and until when")
async def gates(here: Here) -> answers.Gates:
    return answers.Gates(gates=[answers.gate(each) for each in await here.client.gates.list()])


@router.get("/audit", summary="What operators did, who and why, the latest first")
async def audit(here: Here, most: Most = 100) -> answers.Audit:
    found = await here.client.audit.list(most=most)
    return answers.Audit(audit=[answers.Audited.model_validate(each) for each in found])


def _parked(record: Any) -> answers.Parked:
    event = record.event
    told = {name: getattr(record, name) for name in ("id", "key", "problem", "tries", "parked_at", "again")}
    return answers.Parked(label=event.label, type=event.type, **told)
