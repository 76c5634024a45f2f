"""Pairs of an engine and a flavour that together cover each engine and each flavour.

For tests outside of the contract suites, which run every combination: the sync flavour is generated from the async one,
so what a test asks of one engine in one flavour holds in the other.
"""

from __future__ import annotations

import pytest

from tests.conftest import MAJORS

either_pairs = pytest.mark.parametrize(
    ("either", "connect"), [("sqlite", "sync"), ("postgres", "async")], indirect=True
)
"""For a test that takes ``either`` and ``connect``, or a fixture that does."""

url_pairs = pytest.mark.parametrize(
    ("url", "connect"),
    [("sqlite", "sync"), *((f"postgres{major}", "async") for major in MAJORS)],
    indirect=True,
)
"""For a test that takes ``url`` and ``connect``: what it asks may depend on the version of PostgreSQL."""
