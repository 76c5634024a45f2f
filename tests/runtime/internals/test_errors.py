"""Errors travel between processes with what they carry, and show the names that users catch them by."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.database import driver_errors

CARRIED: dict[str, dict[str, Any]] = {
    "NotAcquired": {"name": "import", "holder": "a:1:b", "expires_at": datetime(2026, 11, 18, tzinfo=UTC)},
    "Conflict": {"current": 7},
    "AlreadyExists": {"current": 7, "owner": "sb-1"},
    "OperationInProgress": {"key": "0b", "label": "load"},
    "OperationFailed": {"key": "0b", "label": "load", "status": "partial", "error": {"type": "OSError"}},
    "KeyReused": {"key": "0b", "label": "load"},
    "PolicyDenied": {"review": 7},
    "DriverError": {"status": 409},
    "Refused": {"sqlstate": "42501"},
}
CARRIED |= dict.fromkeys(("AcquireTimeout", "LockReentered"), CARRIED["NotAcquired"])
ERRORS = [
    name
    for name in holdfast.__all__
    if isinstance(kind := getattr(holdfast, name), type) and issubclass(kind, Exception)
]


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_copied_with_what_it_carries(name: str) -> None:
    error = getattr(holdfast, name)("what happened", **CARRIED.get(name, {}))
    error.add_note("and when")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (type(other), other.args, vars(other)) == (type(error), ("what happened",), vars(error))
        assert (str(other), type(other).__module__) == ("what happened", "holdfast")


def test_the_error_that_psycopg_raises_is_pickled_as_ours() -> None:
    driver_errors.teach_psycopg()
    error = psycopg.errors.lookup(driver_errors.SQLSTATE)("lease 'import' has passed on")
    other = pickle.loads(pickle.dumps(error))
    assert (type(other), str(other)) == (holdfast.FencedOut, "lease 'import' has passed on")


def refuse(name: str) -> None:
    raise holdfast.NotAcquired(f"lease {name!r} is held", name=name, holder="web-3")


def test_a_worker_process_hands_its_error_to_the_caller() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool, pytest.raises(holdfast.NotAcquired) as refused:
        pool.submit(refuse, "import").result(60)
    assert (refused.value.name, refused.value.holder) == ("import", "web-3")
