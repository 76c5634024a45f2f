"""A service with records of folders: every replica runs this, and one of them reconciles.

The driver is thirty lines: a backend is a folder below ROOT, ready if it has a file "ready", and failed for good if it
has a file "failed". Create, change and remove folders, and look at the records.

    python -m examples.reconciler.folders sqlite:///app.db ROOT
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import holdfast
from holdfast.reconciler import Backend, BackendCondition, DriverEvent


class Folders:
    def __init__(self, root: Path) -> None:
        self._root = root

    async def list(self) -> list[Backend]:
        return [backend for path in sorted(self._root.iterdir()) if (backend := await self.get(path.name))]

    async def get(self, id: str) -> Backend | None:
        folder = self._root / id
        if not folder.is_dir():
            return None
        if (folder / "failed").exists():
            return Backend(id, (BackendCondition("Ready", False, "Failed", terminal=True),))
        return Backend(id, (BackendCondition("Ready", (folder / "ready").exists(), "Looked"),))

    async def watch(self) -> AsyncIterator[DriverEvent | None]:
        """Polls for changes: every difference to the last listing is an event."""
        before: dict[str, Backend] | None = None
        while True:
            now = {each.id: each for each in await self.list()}
            for id in [] if before is None else sorted(before.keys() | now.keys()):
                if before.get(id) != now.get(id):  # type: ignore[union-attr]
                    yield DriverEvent("status" if id in now else "deleted", id)
            before = now
            yield None
            await asyncio.sleep(0.2)


async def serve(url: str, root: Path, **timings: Any) -> None:
    """Run until SIGTERM. Then the lease is handed over at once, and the next replica starts with a sweep."""
    async with holdfast.AsyncClient(url) as client:
        reconciler = client.reconciler("folder", Folders(root), **timings)
        await client.elector("folders").run(reconciler.run, signals=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2])))
