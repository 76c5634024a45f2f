"""Timestamps of rows: the statements return seconds since 1970, records have datetimes in UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import overload


@overload
def as_datetime(seconds: float) -> datetime: ...
@overload
def as_datetime(seconds: None) -> None: ...
def as_datetime(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
