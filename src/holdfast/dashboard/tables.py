"""Tables of any records, as values: cells, the filter, the order and the pages, by pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.dashboard.formats import link, natural_order
from holdfast.dashboard.stream import Panel

PAGE_ROWS = 50


@dataclass(frozen=True, slots=True)
class PageCell:
    """One value of a table or of a list of facts: a text, a state, a point in time, or the time left of a lease."""

    text: str = ""
    href: str = ""
    is_name: bool = False
    """Whether it is a name, which is shortened in the middle where there is little room."""
    state: str = ""
    when: tuple[Literal["ago", "for", "left"], float] | None = None
    time: float | None = None
    number: float | None = None
    bar: Mapping[str, Any] | None = None
    """A row with ``until`` and ``ttl``."""
    note: str = ""
    action: str = ""
    """The link of an action; shown to operators alone."""

    @property
    def key(self) -> tuple[int, Any]:
        """Numbers before texts; texts in natural order."""
        for value in (self.number, self.time, self.when and self.when[1], self.bar and self.bar["until"]):
            if value is not None:
                return 0, [value]
        return 1, [f"{part:020}" if isinstance(part, int) else part for part in natural_order(self._text.lower())]

    @property
    def _text(self) -> str:
        return self.state or self.text

    @property
    def words(self) -> str:
        number = "" if self.number is None else f"{self.number:.0f}"
        return f"{self.text} {self.state} {self.note} {number}".lower()


@dataclass(frozen=True, slots=True)
class PageColumn:
    title: str
    is_number: bool = False
    is_wide: bool = False
    """Whether it is left out on narrow screens."""


Rows = list[list[PageCell]]


def table(title: str, columns: Sequence[PageColumn], rows: Rows, *, empty: str = "", note: str = "") -> Panel:
    """All ``rows``, as they are."""
    return {
        "kind": "table", "title": title, "columns": [(column, "", "") for column in columns], "rows": rows,
        "empty": empty, "note": note, "pages": (), "query": "",
    }  # fmt: skip


def listing(
    title: str, columns: Sequence[PageColumn], records: Sequence[Any], build: Callable[[Any], list[PageCell]],
    path: str, query: Mapping[str, str], *, empty: str, is_cut: bool = False,
) -> Panel:  # fmt: skip
    """The rows that ``query`` asks for: ``q`` filters, ``sort`` orders by a column (``-name``: descending), ``page``
    counts from 1. Unknown values are ignored. ``build`` makes a row of a record. ``is_cut``: the database has more
    records than were read.
    """
    words = query.get("q", "").lower().split()
    sort = query.get("sort", "")
    titles = [column.title.lower() for column in columns]
    is_sorted = sort.removeprefix("-") in titles
    is_built = bool(words or is_sorted)
    chosen: list[Any] = [build(record) for record in records] if is_built else list(records)
    if words:
        chosen = [row for row in chosen if all(any(word in cell.words for cell in row) for word in words)]
    if is_sorted:
        index = titles.index(sort.removeprefix("-"))
        chosen.sort(key=lambda row: row[index].key, reverse=sort.startswith("-"))
    last = max(1, -(-len(chosen) // PAGE_ROWS))
    page = int(query["page"]) if query.get("page", "").isdecimal() and len(query["page"]) < 9 else 1
    page = min(max(page, 1), last)
    given = {name: value for name, value in query.items() if name in ("q", "sort", "type") and value}
    pages = [
        (text, link(path, **given, page=str(number)), number == page)
        for text, number in (("first", 1), ("previous", page - 1), (f"{page} of {last}", page), ("next", page + 1),
                             ("last", last))
        if 1 <= number <= last and (number != page or text == f"{page} of {last}")
    ]  # fmt: skip
    heads = []
    for column, name in zip(columns, titles, strict=True):
        other = f"-{name}" if sort == name else name
        order = {name: "ascending", f"-{name}": "descending"}.get(sort, "none")
        heads.append((column, link(path, **{**given, "sort": other}), order))
    start = (page - 1) * PAGE_ROWS
    shown = chosen[start : start + PAGE_ROWS]
    if not is_built:  # most of 10,000 records are on other pages
        shown = [build(record) for record in shown]
    total = f"{len(chosen)} of {len(records)}" if words else str(len(records))
    cut = "; the database has more" if is_cut else ""
    note = f"{total} {'row' if total == '1' else 'rows'}{cut}"
    return {
        "kind": "table", "title": title, "columns": heads, "rows": shown,
        "empty": "No row contains these words." if words else empty, "note": note if records else "",
        "pages": pages if last > 1 else (), "query": query.get("q", ""),
    }  # fmt: skip


def facts(title: str, rows: Sequence[tuple[str, PageCell]]) -> Panel:
    """Labelled values; those without a value are left out."""
    return {"kind": "facts", "title": title, "rows": [(label, cell) for label, cell in rows if cell != PageCell()]}
