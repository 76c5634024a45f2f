"""A Great Expectations checkpoint as a condition of an operation, before or after it:

    from holdfast.integrations.great_expectations import expects
    checks = holdfast.Checks(after=[expects(context.checkpoints.get("parcels"))])
    client.operation(key, tx=conn, checks=checks).run(load)

The library itself reports success for a suite without expectations, and for a checkpoint without validations. Here that
is a failure, because nothing was checked. The package is not imported; results of versions 0.18 and 1.x are
understood.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SHOWN = 5


class ExpectationsFailed(Exception):
    """The data do not meet the expectations, or there are none."""


class expects:  # noqa: N801 - reads as a sentence where it is used
    """A condition that runs ``checkpoint`` with ``arguments``. Returns True, or raises ExpectationsFailed."""

    def __init__(self, checkpoint: Any, /, *, name: str | None = None, **arguments: Any) -> None:
        if not callable(getattr(checkpoint, "run", None)):
            raise TypeError(f"checkpoint must have a method run, as a Checkpoint has: {checkpoint!r:.80}")
        self._checkpoint, self._arguments = checkpoint, arguments
        self.__name__ = name or f"checkpoint {getattr(checkpoint, 'name', None) or 'without a name'}"

    def __repr__(self) -> str:
        return f"<{self.__name__}>"

    def __call__(self, *_: object) -> bool:
        if failures := list(problems(self._checkpoint.run(**self._arguments))):
            more = f"; and {len(failures) - _SHOWN} more" if len(failures) > _SHOWN else ""
            raise ExpectationsFailed(f"{self.__name__}: {'; '.join(failures[:_SHOWN])}{more}")
        return True


def problems(result: Any) -> Iterator[str]:
    """The failures in the result of a checkpoint or of a validation."""
    validations = list(_validations(result))
    if not validations:
        yield "it validated nothing"
    has_failures = False
    for number, validation in enumerate(validations, 1):
        for problem in _failures_of(validation, number):
            has_failures = True
            yield problem
    if validations and not has_failures and not _get(result, "success"):
        yield "it did not succeed, and gives no reason"


def _validations(result: Any) -> Iterator[Any]:
    runs = _get(result, "run_results")
    if runs is None:  # the result of a single validation
        if _get(result, "statistics") is not None or _get(result, "results") is not None:
            yield result
        return
    for run in runs.values():
        inner = _get(run, "validation_result")  # in 0.18
        yield run if inner is None else inner


def _failures_of(validation: Any, number: int) -> Iterator[str]:
    suite = _get(validation, "suite_name") or _get(_get(validation, "meta"), "expectation_suite_name") or number
    results = _get(validation, "results") or []
    evaluated = _get(_get(validation, "statistics"), "evaluated_expectations")
    if not (len(results) if evaluated is None else evaluated):
        yield f"suite {suite!r} is empty: nothing was expected of the data"
        return
    failed = [_expectation(each) for each in results if not _get(each, "success")]
    for expectation in failed:
        yield f"suite {suite!r}: {expectation} was not met"
    if not failed and not _get(validation, "success"):
        yield f"suite {suite!r} was not met"


def _expectation(result: Any) -> str:
    config = _get(result, "expectation_config")
    kind = _get(config, "type") or _get(config, "expectation_type") or "an expectation"
    column = _get(_get(config, "kwargs"), "column")
    return f"{kind}({column})" if column else str(kind)


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
