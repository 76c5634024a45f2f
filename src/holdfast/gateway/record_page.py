"""A page of records for a client, bounded in bytes. How many are read at a time is bounded, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import holdfast
from holdfast.dashboard.source import PageSource
from holdfast.gateway.context import Gateway

PAGE_BYTES = 1 << 19
"""Of the payloads, or texts, of a page, unless it has a single record."""


async def list_page(
    gateway: Gateway, type: str, after: str | None, limit: int, labels: Mapping[str, str] | None = None
) -> tuple[Sequence[holdfast.ObjectRecord], str | None]:
    """The records behind ``after``, and where the next page begins; None at the end."""
    objects = gateway.client.objects
    async with gateway.listings:
        page = await objects.list(type, labels=labels, after=after, limit=limit, max_bytes=PAGE_BYTES)
        if not page:
            return page, None
        is_last = len(page) < limit and not await objects.list(type, labels=labels, after=page[-1].id, limit=1)
    return page, None if is_last else page[-1].id


async def bounded_list(
    gateway: Gateway, method: Callable[..., Any], limit: int, **filters: Any
) -> tuple[Sequence[Any], bool]:
    """The first records of a listing without pages, and whether there are more."""
    async with gateway.listings:
        return await PageSource(gateway.client).bounded(method, limit=limit, max_bytes=PAGE_BYTES, **filters)
