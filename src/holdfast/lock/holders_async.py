"""The same on an event loop: looking into every process takes milliseconds."""

from __future__ import annotations

import asyncio

from holdfast.database.url import Database
from holdfast.lock import holders as blocking
from holdfast.lock.holders import Holder


async def holders(database: Database) -> list[Holder]:
    return await asyncio.to_thread(blocking.holders, database)
