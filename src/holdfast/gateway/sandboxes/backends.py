"""The driver as the reconciler uses it: ``get`` also creates or ends a backend when its record asks for that.

The record is the truth. It is written first, and a replica may die before it has called the driver. The leader reads
every record now and then, and a changed record at once, and completes what is left to do.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import holdfast
from holdfast.gateway.context import Gateway
from holdfast.gateway.sandboxes import records
from holdfast.gateway.sandboxes.records import (
    ADDRESS_VARIABLE,
    SUPERVISOR_LEASE,
    TOKEN_VARIABLE,
    TYPE,
    SandboxAction,
)
from holdfast.problem_json import Problem

_PAGE, _PAGE_BYTES = 1000, 4 << 20


class Backends:
    """The backends of this installation's records; the driver may have those of other installations, too."""

    def __init__(self, gateway: Gateway) -> None:
        self._client, self._driver, self._seal = gateway.client, gateway.driver, gateway.seal
        self._installation: str | None = None
        self._supervised: set[str] = set()
        """The ids of sandboxes that were given a token for their supervisor."""
        self._tokens: dict[str, str] = {}
        """Tokens of sandboxes that this replica creates for another one, until the driver has them."""

    async def installation(self) -> str:
        """The id of this installation, the same for all its replicas. The first replica stores it."""
        while self._installation is None:
            if (record := await self._client.objects.get("@gateway", "installation")) is not None:
                self._installation = str(record.payload["id"])
            else:
                with suppress(holdfast.AlreadyExists):
                    payload = {"id": uuid4().hex[:12]}
                    await self._client.objects.put_if("@gateway", "installation", payload, holdfast.MustCreate())
        return self._installation

    async def list(self) -> list[holdfast.reconciler.Backend]:
        prefix = f"{await self.installation()}/"
        backends = await self._driver.list()
        return [self._note_token(each) for each in backends if str(each.details.get("owner")).startswith(prefix)]

    async def get(self, id: str) -> holdfast.reconciler.Backend | None:
        """The backend of a record after the due action; None when the driver runs nothing for it."""
        installation, backend = await self.installation(), await self._driver.get(id)
        record = await self._client.objects.get(TYPE, id)
        payload = None if record is None else record.payload
        action = records.due_action(payload, backend, installation)
        if action is SandboxAction.CREATE and record is not None:
            backend = await self._create_for_record(record)
        elif action is SandboxAction.END and backend is not None:
            await self._driver.delete(id, run=backend.details["run"])
            backend = await self._driver.get(id)
        if backend is None or not records.is_backend_of(payload, backend, installation):
            self._supervised.discard(id)
            return None
        self._tokens.pop(id, None)
        return self._note_token(backend)

    async def watch(self) -> AsyncIterator[holdfast.reconciler.DriverEvent | None]:
        """The events of the driver, and one for every record that was changed. Raises when either source ends."""
        queue: asyncio.Queue[Any] = asyncio.Queue(100)
        events, changes = self._driver.watch(), self._client.objects.watch(TYPE)
        tasks: list[asyncio.Task[None]] = []
        try:
            await changes.begin()
            yield await anext(events)  # from here on neither source misses a change
            tasks += [asyncio.create_task(_forward(source, queue)) for source in (events, changes)]
            while True:
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # also when the caller that closes this is cancelled
                await events.aclose()
                await changes.close()

    async def session_present(self, id: str) -> bool:
        """False while a supervised sandbox has no supervisor connected to any replica: it is not ready then."""
        return id not in self._supervised or await self._client.leases.get(f"{SUPERVISOR_LEASE}{id}") is not None

    async def create(self, record: holdfast.ObjectRecord, token: str | None) -> holdfast.reconciler.Backend:
        """Create the backend of a record; the existing one when another replica has. DriverError 409 when the id is
        taken by another sandbox, without a status when this replica cannot open its variables."""
        payload = record.payload
        spec = {name: value for name, value in payload["spec"].items() if name != "supervised" and value is not None}
        del spec["env"]
        try:
            env = records.env(payload, self._seal)
        except Problem as error:
            raise holdfast.DriverError(f"sandbox {record.id!r} cannot be created: {error}") from None
        env |= {ADDRESS_VARIABLE: payload["gateway"]} | ({TOKEN_VARIABLE: token} if token else {})
        installation = await self.installation()
        try:
            return await self._driver.create(
                record.id, spec.pop("argv"), env=env, owner=records.owner(payload, installation), **spec
            )
        except holdfast.DriverError as error:
            existing = await self._driver.get(record.id) if error.status == 409 else None
            if existing is None or existing.deleting or not records.is_backend_of(payload, existing, installation):
                raise
            return existing  # it has another token, which is valid as well

    async def is_running(self, record: holdfast.ObjectRecord) -> bool:
        """Whether the driver has the backend of this record, and not that of another sandbox of its id."""
        backend = await self._driver.get(record.id)
        return backend is not None and records.is_backend_of(record.payload, backend, await self.installation())

    async def end(self, record: holdfast.ObjectRecord, wait: float) -> bool:
        """End the backend, and wait for its end. True when none of its processes runs any more."""
        backend = await self._driver.get(record.id)
        if backend is None or not records.is_backend_of(record.payload, backend, await self.installation()):
            return True
        return await self._driver.delete(record.id, wait=wait, run=backend.details["run"])

    async def end_orphans(self) -> None:
        """End backends without a record: a replica may stall between writing a record and creating its backend, while
        the record is deleted."""
        backends = {backend.id: backend for backend in await self.list()}
        after: str | None = None
        while page := await self._client.objects.list(TYPE, after=after, limit=_PAGE, max_bytes=_PAGE_BYTES):
            for record in page:
                backends.pop(record.id, None)
            after = page[-1].id
        for id in backends:
            await self.get(id)

    async def _create_for_record(self, record: holdfast.ObjectRecord) -> holdfast.reconciler.Backend:
        """Create the backend in place of the replica that wrote the record and went no further.

        That replica's token is unknown here, so the record gets a second one; either is valid.
        """
        token = None
        if record.payload["spec"]["supervised"]:
            token = self._tokens.setdefault(record.id, secrets.token_urlsafe(32))
            if not records.accepts_token(record.payload, token):
                tokens = [*record.payload["tokens"], records.hash_token(token)]
                await self._client.objects.put_if(
                    TYPE, record.id, {**record.payload, "tokens": tokens}, holdfast.MatchVersion(record.version)
                )
        try:
            return await self.create(record, token)
        except holdfast.DriverError as error:
            if error.status != 422:
                raise
            refused = holdfast.reconciler.BackendCondition("Ready", False, "Refused", str(error), terminal=True)
            details = {"owner": records.owner(record.payload, await self.installation())}
            return holdfast.reconciler.Backend(record.id, (refused,), details=details)

    def _note_token(self, backend: holdfast.reconciler.Backend) -> holdfast.reconciler.Backend:
        if TOKEN_VARIABLE in backend.details.get("env", ()):
            self._supervised.add(backend.id)
        else:
            self._supervised.discard(backend.id)
        return backend


async def _forward(source: Any, queue: asyncio.Queue[Any]) -> None:
    """Put all events of ``source`` into ``queue``, and at its end the error."""
    try:
        async for event in source:
            if event is None or isinstance(event, holdfast.reconciler.DriverEvent):
                await queue.put(event)
            elif event.kind != "deleted":
                await queue.put(holdfast.reconciler.DriverEvent("status", event.id))
        raise holdfast.DriverError("the stream of events has ended")
    except Exception as error:
        await queue.put(error)
