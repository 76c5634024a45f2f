"""Wrong arguments of operations: refused at once, before anything is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import AsyncOp, Checks, OperationOptions, Retry
from holdfast.lineage import Contract, Lineage

Connect = Callable[..., Any]


def generator() -> Iterator[int]:
    yield 1


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
        ({"retry": 3}, TypeError, r"^retry must be a holdfast\.Retry, not 3$"),
        ({"checks": [int]}, TypeError, r"^checks must be a holdfast\.Checks, not \[<class 'int'>\]$"),
        ({"lineage": {"inputs": []}}, TypeError, r"^lineage must be a holdfast\.lineage\.Lineage, not \{'inputs'"),
        ({"options": False}, TypeError, r"^options must be a holdfast\.OperationOptions, not False$"),
        ({"rollback": 7}, TypeError, "rollback must be a function"),
        ({"rollback": "unknown"}, ValueError, "no rollback is registered as 'unknown'; there are: none"),
        ({"verify": "x"}, TypeError, "verify must be a function"),
        ({"payload": open}, TypeError, "payload is a builtin_function_or_method, which has no canonical form"),
        ({"actor": ""}, ValueError, "actor must have"),
        ({"join": True}, ValueError, r"^join=True needs tx=, a connection"),
        ({"join": False}, ValueError, r"^join=False needs tx=, a connection"),
        ({"join": 1, "tx": "conn"}, TypeError, r"^join must be True, False or None, not 1$"),
        ({"on_lost": "hope"}, ValueError, r"^on_lost must be 'flag', 'cancel', 'exit' or a callable, not 'hope'$"),
        ({"on_lost": "exit", "tx": "conn"}, ValueError, r"^on_lost='exit' is for an operation under a lease"),
        ({"on_lost": "cancel", "tx": "conn"}, ValueError, r"^on_lost='cancel' is for an operation under a lease"),
        ({"on_lost": print, "tx": "conn"}, ValueError, r"^on_lost=<built-in .*> is for an operation under a lease"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_at_once(untouched: Any, options: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        untouched.operation("k", **options)


def test_only_what_can_be_cancelled_and_called_takes_on_lost(tmp_path: Path) -> None:
    async def report(op: AsyncOp) -> None: ...

    client = holdfast.Client(f"sqlite:///{tmp_path / 'app.db'}")
    with pytest.raises(ValueError, match="on_lost='cancel' is for asyncio: a thread cannot be cancelled"):
        client.operation("k", on_lost="cancel")
    with pytest.raises(TypeError, match="on_lost must be a plain function"):
        client.operation("k", on_lost=report)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_conditions_that_only_begin_when_they_are_called_are_refused(untouched: Any) -> None:
    for checks in (Checks(before=[generator]), Checks(after=[generator])):
        with pytest.raises(TypeError, match=r"a condition must be a .*function, not .*generator"):
            untouched.operation("k", checks=checks)
    with pytest.raises(TypeError, match=r"the check of a contract must be a .*function, not .*generator"):
        untouched.operation("k", lineage=Lineage(contract=Contract("c", "1", generator)))


@pytest.mark.parametrize(
    ("build", "arguments", "error", "message"),
    [
        (Retry, {"attempts": 0}, ValueError, "attempts must be 1 or more, not 0"),
        (Retry, {"attempts": True}, TypeError, "attempts must be an int, not True"),
        (Retry, {"attempts": "3"}, TypeError, "attempts must be an int, not '3'"),
        (Retry, {"in_this_run": -1}, ValueError, "in_this_run must be 0 or more, not -1"),
        (Retry, {"in_this_run": 1.0}, TypeError, "in_this_run must be an int, not 1.0"),
        (Retry, {"first": 0}, ValueError, "first must be between 0.001 and 86400 seconds, not 0"),
        (Retry, {"first": "1"}, TypeError, "first must be a number of seconds, not str"),
        (Retry, {"longest": math.inf}, ValueError, "longest must be between 0.001 and 86400 seconds, not inf"),
        (Retry, {"longest": math.nan}, ValueError, "longest must be between 0.001 and 86400 seconds, not nan"),
        (Retry, {"longest": True}, TypeError, "longest must be a number of seconds, not bool"),
        (Retry, {"first": 2, "longest": 1}, ValueError, "longest must be at least first=2 seconds, not 1"),
        (Retry, {"remember": ["E"]}, TypeError, "remember must be a list of exception classes, not ['E']"),
        (Retry, {"remember": [int]}, TypeError, "remember must be a list of exception classes, not [<class 'int'>]"),
        (Retry, {"remember": 7}, TypeError, "remember must be a list of exception classes, not 7"),
        (
            Retry,
            {"remember": ValueError},
            TypeError,
            "remember must be a list of exception classes, not <class 'ValueError'>",
        ),
        (Checks, {"before": [1]}, TypeError, "before must be a list of functions, not [1]"),
        (Checks, {"before": int}, TypeError, "before must be a list of functions, not <class 'int'>"),
        (Checks, {"after": "rows"}, TypeError, "after must be a list of functions, not 'rows'"),
        (Checks, {"after": ""}, TypeError, "after must be a list of functions, not ''"),
        (OperationOptions, {"reuse": 0}, TypeError, "reuse must be True or False, not 0"),
        (OperationOptions, {"marks_effect": None}, TypeError, "marks_effect must be True or False, not None"),
        (OperationOptions, {"sovereign": "no"}, TypeError, "sovereign must be True or False, not 'no'"),
        (Lineage, {"inputs": "raw"}, TypeError, "inputs must be a list of names of datasets, not 'raw'"),
        (Lineage, {"outputs": 7}, TypeError, "outputs must be a list of names of datasets, not 7"),
        (Lineage, {"outputs": [1]}, TypeError, "a name in outputs must be a str, not int"),
        (Lineage, {"inputs": [""]}, ValueError, "a name in inputs must have 1 to 1000 characters, not 0: ''"),
        (
            Lineage,
            {"contract": ("c", "1")},
            TypeError,
            "contract must be a holdfast.lineage.Contract, not ('c', '1')",
        ),
    ],
    ids=str,
)
def test_a_group_checks_its_arguments_when_it_is_made(
    build: Callable[..., object], arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        build(**arguments)
    assert str(raised.value) == message


def test_groups_have_defaults_and_are_values() -> None:
    retry = Retry()
    assert (retry.attempts, retry.in_this_run, retry.first, retry.longest, retry.remember) == (3, 0, 0.05, 30.0, ())
    assert (Checks().before, Checks().after) == ((), ())
    options = OperationOptions()
    assert (options.reuse, options.marks_effect, options.sovereign) == (True, False, False)
    assert (Lineage().inputs, Lineage().outputs, Lineage().contract) == ((), (), None)
    names, errors = ["raw"], list[type[Exception]]([ValueError])
    lineage, remembers = Lineage(inputs=names), Retry(first=1, remember=errors)
    names.append("later")
    errors.append(KeyError)
    assert lineage == Lineage(inputs=("raw",))
    assert remembers == Retry(first=1.0, remember=(ValueError,))
    assert len({lineage, Lineage(inputs=["raw"]), remembers, Retry(), Checks(), Checks(before=[int]), options}) == 6
    groups: list[Any] = [retry, Checks(), options, lineage]
    for group, name in zip(groups, ("attempts", "before", "reuse", "inputs"), strict=True):
        assert not hasattr(group, "__dict__")
        with pytest.raises(FrozenInstanceError):
            setattr(group, name, ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retry": Retry(in_this_run=2)}, "in_this_run must be 0 for run_many, not 2"),
        ({"checks": Checks(before=[int])}, "before must be empty for run_many, not"),
        ({"options": OperationOptions(marks_effect=True)}, "marks_effect must be False for run_many, not True"),
    ],
    ids=str,
)
def test_what_a_batch_cannot_do_is_refused_at_once(untouched: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        untouched.operations.run_many(["a"], len, **options)


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

    client = holdfast.Client(f"sqlite:///{tmp_path / 'app.db'}")
    for function in (later, generator):
        with pytest.raises(TypeError, match="generator function"):
            client.operation("k").run(function)
        with pytest.raises(TypeError, match="generator function"):
            client.operation("k")(function)
    assert list(tmp_path.iterdir()) == []
