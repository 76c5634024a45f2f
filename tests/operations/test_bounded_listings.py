"""Listings whose rows other roles write are bounded in bytes, on every engine and in both flavours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import holdfast

Connect = Callable[..., Any]
ROWS = 4


def fail() -> None:
    raise ValueError("why " * 100)


def write(client: Any) -> None:
    """Four operations that have failed, each with an entry in the audit and a review."""
    for number in range(ROWS):
        key = f"key-{number}"
        with pytest.raises(ValueError, match="why"):
            client.operation(key).run(fail)
        with pytest.raises(holdfast.OperationFailed):
            client.operation(key, retry=holdfast.Retry(attempts=1)).run(fail)
        client.audit.end(client.audit.begin("a.one", "it", actor="jane", reason="why " * 40), "done")


LISTINGS: dict[str, Callable[[Any], Callable[..., Sequence[Any]]]] = {
    "operations": lambda client: client.operations.list,
    "failures": lambda client: lambda **options: client.operations.list(status="failure", **options),
    "reviews": lambda client: client.reviews.list,
    "audit": lambda client: client.audit.list,
}


@pytest.mark.parametrize("name", LISTINGS)
def test_a_listing_ends_before_it_has_too_many_bytes(connect: Connect, url: str, name: str) -> None:
    client = connect(url)
    write(client)
    rows = LISTINGS[name](client)
    whole = rows()
    assert len(whole) == ROWS
    lists = [rows(max_bytes=size) for size in range(1, 4000, 50)]
    assert all(each == whole[: len(each)] for each in lists), "it begins as the whole does"
    lengths = [len(each) for each in lists]
    assert lengths == sorted(lengths)
    assert {*lengths} == {1, 2, 3, 4}
    assert len(rows(max_bytes=4000, limit=3)) == 3
    with pytest.raises(ValueError, match="max_bytes"):
        rows(max_bytes=0)


def test_pages_of_the_log_that_end_by_their_bytes_miss_nothing(connect: Connect, url: str) -> None:
    client = connect(url)
    write(client)
    whole = client.operations.read().entries
    entries, after, sizes = [], None, set()
    while (page := client.operations.read(after, max_bytes=1)).entries:
        entries += page.entries
        after = page.cursor
        sizes.add(len({each.operation for each in page.entries}))
    assert entries == whole
    assert sizes == {1}
    assert client.operations.read(max_bytes=1 << 20).entries == whole
    assert 0 < len(client.operations.read(max_bytes=2000).entries) < len(whole)
