"""The pages that list rows which other roles write end by the bytes that they have read, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.dashboard import listings
from holdfast.dashboard.source import PageSource

PAGES = [listings.operations_page, listings.audit_page, listings.reviews_page]


async def test_a_page_that_ends_by_its_bytes_says_that_there_is_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.Client(f"sqlite:///{tmp_path / 'app.db'}") as client:
        for number in range(3):
            with pytest.raises(ZeroDivisionError):
                client.operation(f"key-{number}").run(lambda: 1 / 0)
            with pytest.raises(holdfast.OperationFailed):
                client.operation(f"key-{number}", retry=holdfast.Retry(attempts=1)).run(lambda: 1 / 0)
            client.audit.end(client.audit.begin("a.one", "it", actor="jane", reason="why"), "done")
        for max_bytes, note in ((1 << 20, "3 rows"), (1, "1 row; the database has more")):
            monkeypatch.setattr(listings, "MAX_BYTES", max_bytes)
            views = [await page(PageSource(client), {}) for page in PAGES]
            assert [view.panels["rows"]["note"] for view in views] == [note] * len(PAGES)
