"""Pairs of a flavour and an engine that together cover each value, for tests in which the two cannot interact.

A parameter set replaces the parameters of the fixtures that it names.
"""

from __future__ import annotations

import pytest

from tests.conftest import MAJORS, NEWEST

ALL = [("sync", "sqlite"), ("async", "sqlite"), ("sync", MAJORS[0]), ("async", NEWEST)]
"""Every engine in both flavours, because the sessions of both are written by hand, and both versions of PostgreSQL."""

CONTRACT = pytest.mark.parametrize(("connect", "emptied"), [*ALL, ("sync", "poor"), ("async", "poor")], indirect=True)
"""For a contract suite on the fixture ``emptied``; once more on a PostgreSQL without LISTEN and session locks."""

EACH_ONCE = pytest.mark.parametrize(("connect", "either"), [("sync", "sqlite"), ("async", "postgres")], indirect=True)
"""For a test of what is generated: each flavour and each engine once."""

ONE_FLAVOUR = pytest.mark.parametrize("connect", ["async"], indirect=True)
"""For a test on one engine of what both flavours share. The async flavour is the source of the other."""

EACH_URL = pytest.mark.parametrize(
    ("connect", "url"),
    [("sync", "sqlite"), ("sync", f"postgres{MAJORS[0]}"), ("async", f"postgres{NEWEST}")],
    indirect=True,
)
"""The same for a test that takes ``url``: its answer may depend on the version of PostgreSQL."""
