"""Where the pages read: a client, sync or async, and what a gateway adds to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Any, NamedTuple

import holdfast
from holdfast.dashboard.charts import WaitSamples
from holdfast.dashboard.formats import link
from holdfast.dashboard.stream import PageView


class AddedPage(NamedTuple):
    """A page that the application which mounts the dashboard adds to it."""

    read: Callable[[PageSource, Mapping[str, str]], Awaitable[PageView]]
    """The page for the query of its address."""
    title: str = ""
    """In the navigation; empty: it is not there."""
    type: str = ""
    """The type of the objects that have such a page: lists link to it with ``id``, and ``title`` to their list."""


MAX_READ = 10_000
"""Rows that a page reads, of those with no bound of their own: as many as a listing returns."""
MAX_ROW_BYTES = 8 << 20
"""Of the texts of one record: the database refuses longer ones."""


@dataclass(frozen=True, slots=True)
class PageSource:
    client: Any
    """A ``holdfast.Client``, whose calls run in threads, or a ``holdfast.AsyncClient`` of the running loop."""
    pools: Mapping[str, int] = field(default_factory=dict)
    """The configured capacities, by pool."""
    elector: Callable[[], str | None] = lambda: None
    """The lease whose holder leads the replicas of a gateway."""
    pages: Mapping[str, AddedPage] = field(default_factory=dict)
    """By path."""
    waits: WaitSamples = field(default_factory=WaitSamples)

    @property
    def object_pages(self) -> dict[str, str]:
        """The path of the page of an object, by its type."""
        return {page.type: path for path, page in self.pages.items() if page.type}

    @property
    def navigation(self) -> list[tuple[str, str]]:
        """Link and title of the pages that are added."""
        return [
            (link("/objects", type=page.type) if page.type else path, page.title)
            for path, page in self.pages.items()
            if page.title
        ]

    async def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The result of a method of ``client``."""
        if iscoroutinefunction(method):
            return await method(*arguments, **options)
        return await asyncio.to_thread(method, *arguments, **options)

    async def bounded(
        self, method: Callable[..., Any], *, limit: int, max_bytes: int, **options: Any
    ) -> tuple[Sequence[Any], bool]:
        """The first rows of a listing, and whether there are more. One row more fits into the second reading."""
        rows = await self.call(method, limit=limit, max_bytes=max_bytes, **options)
        if len(rows) == MAX_READ:
            return rows, True
        more = await self.call(method, limit=len(rows) + 1, max_bytes=max_bytes + MAX_ROW_BYTES, **options)
        return rows, len(more) > len(rows)

    async def rows(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Sequence[Any]:
        """As ``call``; empty when the server refuses it, because the role may not read these tables."""
        try:
            rows: Sequence[Any] = await self.call(method, *arguments, **options)
        except holdfast.Refused:
            return ()
        return rows
