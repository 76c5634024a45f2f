"""What the driver runs for the records: made when it never was, ended when it is to go, at every look.

The record is the truth. It is written first, and a replica may die before it has told the driver: whoever leads looks
at every record now and then, and at those that were changed at once, and does then what is left to do.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import holdfast
from holdfast.gateway.context import Gateway
from holdfast.gateway.sandboxes import records
from holdfast.gateway.sandboxes.records import GATEWAY, SUPERVISOR, TOKEN, TYPE, Step

log = logging.getLogger("holdfast.gateway")

_PAGE = 1000


class Backends:
    """The driver, as the reconciler sees it: the backends of our records, and nobody else's."""

    def __init__(self, gateway: Gateway) -> None:
        self._client, self._driver = gateway.client, gateway.driver
        self._home: str | None = None
        self._supervised: set[str] = set()
        self._tokens: dict[str, str] = {}

    async def home(self) -> str:
        """The name of this installation, the same for all its replicas: a driver may have others to serve."""
        while self._home is None:
            if (record := await self._client.objects.get("gateway", "installation")) is not None:
                self._home = str(record.payload["id"])
            else:
                with suppress(holdfast.AlreadyExists):
                    made = {"id": uuid4().hex[:12]}
                    await self._client.objects.put_if("gateway", "installation", made, holdfast.MustCreate())
        return self._home

    async def list(self) -> list[holdfast.Backend]:
        home = await self.home()
        found = await self._driver.list()
        return [self._noted(each) for each in found if str(each.details.get("owner")).startswith(f"{home}/")]

    async def get(self, id: str) -> holdfast.Backend | None:
        """As it is once what is due has been done."""
        home, backend = await self.home(), await self._driver.get(id)
        record = await self._client.objects.get(TYPE, id)
        payload = None if record is None else record.payload
        step = records.due(payload, backend, home)
        if step is Step.MAKE:
            backend = await self._made(record)
        elif step is Step.END and backend is not None:
            await self._driver.delete(id, run=backend.details["run"])
            backend = await self._driver.get(id)
        if backend is None or not records.is_of(payload, backend, home):
            self._supervised.discard(id)
            return None
        self._tokens.pop(id, None)
        return self._noted(backend)

    async def watch(self) -> AsyncIterator[holdfast.DriverEvent | None]:
        """What the driver tells, and which records were changed by somebody."""
        heard: asyncio.Queue[Any] = asyncio.Queue(100)
        events, changes = self._driver.watch(), self._client.objects.watch(TYPE)
        tasks: list[asyncio.Task[None]] = []
        try:
            await changes.begin()
            yield await anext(events)  # from here on both are heard
            tasks += [asyncio.create_task(_pass_on(each, heard)) for each in (events, changes)]
            while True:
                told = await heard.get()
                if isinstance(told, Exception):
                    raise told
                yield told
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # whoever closes this may be cancelled, too
                await events.aclose()
                await changes.close()

    async def session_present(self, id: str) -> bool:
        """A sandbox that is to be supervised is not ready before its supervisor is connected somewhere."""
        return id not in self._supervised or await self._client.leases.get(f"{SUPERVISOR}{id}") is not None

    async def make(self, record: Any, token: str | None) -> holdfast.Backend:
        """Asked twice it is one sandbox, whoever asks; DriverError 409 when there is another one of that id."""
        payload = record.payload
        spec = {name: value for name, value in payload["spec"].items() if name != "supervised" and value is not None}
        env = {**spec.pop("env"), GATEWAY: payload["gateway"]} | ({TOKEN: token} if token else {})
        home = await self.home()
        try:
            return await self._driver.create(
                record.id, spec.pop("argv"), env=env, owner=records.owner(payload, home), **spec
            )
        except holdfast.DriverError as error:
            found = await self._driver.get(record.id) if error.status == 409 else None
            if found is None or found.deleting or not records.is_of(payload, found, home):
                raise
            return found  # with another token, which is as good

    async def runs(self, record: Any) -> bool:
        """Whether the driver has it, and not another one of that id."""
        found = await self._driver.get(record.id)
        return found is not None and records.is_of(record.payload, found, await self.home())

    async def end(self, record: Any, wait: float) -> bool:
        """True when nothing of it runs any more."""
        found = await self._driver.get(record.id)
        if found is None or not records.is_of(record.payload, found, await self.home()):
            return True
        return await self._driver.delete(record.id, wait=wait, run=found.details["run"])

    async def end_strays(self) -> None:
        """What runs without a record: of a replica that was asked to make it, and stood still until it was deleted."""
        ours = {each.id: each for each in await self.list()}
        after: str | None = None
        while page := await self._client.objects.list(TYPE, after=after, most=_PAGE):
            for record in page:
                ours.pop(record.id, None)
            after = page[-1].id
        for id in ours:
            await self.get(id)

    async def _made(self, record: Any) -> holdfast.Backend:
        """In place of whoever wrote the record and did not get so far. Its token is unknown here, so there is one more,
        and either is good."""
        token = None
        if record.payload["spec"]["supervised"]:
            token = self._tokens.setdefault(record.id, secrets.token_urlsafe(32))
            if not records.knows(record.payload, token):
                more = [*record.payload["tokens"], records.hashed(token)]
                await self._client.objects.put_if(
                    TYPE, record.id, {**record.payload, "tokens": more}, holdfast.MatchVersion(record.version)
                )
        try:
            return await self.make(record, token)
        except holdfast.DriverError as error:
            if error.status != 422:
                raise
            refused = holdfast.BackendCondition("Ready", False, "Refused", str(error), terminal=True)
            details = {"owner": records.owner(record.payload, await self.home())}
            return holdfast.Backend(record.id, (refused,), details=details)

    def _noted(self, backend: holdfast.Backend) -> holdfast.Backend:
        if TOKEN in backend.details.get("env", ()):
            self._supervised.add(backend.id)
        else:
            self._supervised.discard(backend.id)
        return backend


async def _pass_on(source: Any, heard: asyncio.Queue[Any]) -> None:
    """Until it ends, and then why."""
    try:
        async for each in source:
            if each is None or isinstance(each, holdfast.DriverEvent):
                await heard.put(each)
            elif each.kind != "deleted":
                await heard.put(holdfast.DriverEvent("status", each.id))
        raise holdfast.DriverError("it has nothing more to tell")
    except Exception as error:
        await heard.put(error)
