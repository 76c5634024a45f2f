"""Wrong arguments of operations: refused at once, before anything is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast

Connect = Callable[..., Any]


@pytest.fixture
def untouched(connect: Connect, tmp_path: Path) -> Iterator[Any]:
    """A client of a file that must not even be made."""
    yield connect(f"sqlite:///{tmp_path / 'app.db'}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"when_locked": "hope"}, ValueError, "when_locked must be one of wait, backoff, skip, fail, escalate"),
        ({"on_partial": "rollback"}, ValueError, "on_partial='rollback' needs rollback="),
        ({"on_partial": "verify"}, ValueError, "on_partial='verify' needs verify="),
        ({"on_partial": "hope"}, ValueError, "on_partial must be"),
        ({"timeout": -1}, ValueError, "timeout must be between"),
        ({"ttl": 0}, ValueError, "ttl must be between"),
        ({"ttl": math.nan}, ValueError, "ttl must be between"),
        ({"keep": 0}, ValueError, "keep must be between"),
        ({"max_attempts": 0}, ValueError, "max_attempts must be 1 or more, not 0"),
        ({"max_attempts": True}, TypeError, "max_attempts must be an int"),
        ({"retries": -1}, ValueError, "retries must be 0 or more"),
        ({"remember_errors": ["ValueError"]}, TypeError, "remember_errors must be a list of exception classes"),
        ({"remember_errors": ValueError}, TypeError, "remember_errors must be a list of exception classes"),
        ({"rollback": 7}, TypeError, "rollback must be a function"),
        ({"rollback": "unknown"}, ValueError, "no rollback is registered as 'unknown'; there are: none"),
        ({"verify": "x"}, TypeError, "verify must be a function"),
        ({"preconditions": [1]}, TypeError, "a condition must be a function"),
        ({"payload": open}, TypeError, "payload is a builtin_function_or_method, which has no canonical form"),
        ({"actor": ""}, ValueError, "actor must have"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_at_once(untouched: Any, options: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        untouched.operation("k", **options)


def test_wrong_keys_and_functions_are_refused_at_once(untouched: Any) -> None:
    for key in ("", "x" * 201, "a\nb"):
        with pytest.raises(ValueError, match=r"^key must"):
            untouched.operation(key)
    for wrong in (7, b"x", None):
        with pytest.raises(TypeError, match="key must be a str or an OperationKey"):
            untouched.operation(wrong)
    with pytest.raises(TypeError, match="function must be a function"):
        untouched.operation("k").run(7)
    with pytest.raises(TypeError, match=r"cannot use the transaction of a builtins\.str"):
        untouched.operation("k", tx="conn").run(int)
    with pytest.raises(TypeError, match="use this operation as a decorator"):
        untouched.operation(lambda: "k").run(int)
    with pytest.raises(ValueError, match="status must be one of"):
        untouched.operations.list(status="done")
    for dataset in ("a\0b", "", 7):
        with pytest.raises((ValueError, TypeError), match=r"^dataset must"):
            untouched.operations.list(dataset=dataset)
    with pytest.raises(ValueError, match="nothing to register"):
        untouched.operations.register("x")
    for option, given in (("batch", 0), ("batch", 1.5), ("batch", True), ("progress", 7), ("key", 7), ("payload", 7)):
        with pytest.raises((ValueError, TypeError), match=f"^{option} must be"):
            untouched.operations.run_many(["a"], len, **{option: given})


def test_a_function_that_only_begins_when_it_is_called_is_refused(tmp_path: Path) -> None:
    """Its result would be a coroutine, and nothing would have been done."""

    async def later() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    client = holdfast.Client(f"sqlite:///{tmp_path / 'app.db'}")
    for function in (later, generator):
        with pytest.raises(TypeError, match="generator function"):
            client.operation("k").run(function)
        with pytest.raises(TypeError, match="generator function"):
            client.operation("k")(function)
    assert list(tmp_path.iterdir()) == []
