"""The energy and carbon that one execution of an operation cost: an estimate from the time of its function and from
facts about the machine and the grid. Pure: ``energy_clock`` measures the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

JOULES_PER_KWH = 3_600_000.0
Clock = str
"""Whose CPU time was counted: "thread", "task" (its own steps only), or "loop" (everything that ran on it)."""


class Estimate(NamedTuple):
    """What a meter returns for one execution: the amounts, the method, and its parameters."""

    energy_joules: float
    carbon_grams: float
    method: str
    parameters: Mapping[str, Any]


class Meter(Protocol):
    """``begin()`` is called right before the function. What it returns is called right after the function, with CPU
    seconds, wall seconds and whose CPU time that is; None means that this execution was not measured."""

    def begin(self) -> Callable[[float, float, Clock], Estimate | None]: ...


@dataclass(frozen=True, kw_only=True)
class Energy:
    """``watts``: drawn by a busy CPU, for each CPU second. ``grams_per_kwh``: the carbon intensity of the grid, in
    grams of CO2 equivalent. ``idle_watts``: drawn in any case, for each second of wall time."""

    watts: float
    grams_per_kwh: float
    idle_watts: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{field.name} must be a number, not {value!r:.80}")
            if not 0 <= value <= 1_000_000:
                raise ValueError(f"{field.name} must be from 0 to 1000000, not {value!r}")

    def begin(self) -> Callable[[float, float, Clock], Estimate]:
        """The method of a Meter: returns ``estimate``, which is called at the end."""
        return self.estimate

    def estimate(self, cpu_seconds: float, wall_seconds: float, clock: Clock = "thread") -> Estimate:
        """The energy and carbon of that much time."""
        joules = cpu_seconds * self.watts + wall_seconds * self.idle_watts
        parameters = {field.name: getattr(self, field.name) for field in fields(self)}
        return Estimate(joules, joules / JOULES_PER_KWH * self.grams_per_kwh, f"cpu_time:{clock}", parameters)


def energy_record(cpu_seconds: float, wall_seconds: float, estimate: Estimate) -> dict[str, Any]:
    """The estimate as log and events carry it. ValueError when JSON has no form for a value."""
    numbers = {
        "cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds, "energy_joules": estimate.energy_joules,
        "carbon_grams": estimate.carbon_grams,
    }  # fmt: skip
    for name, value in numbers.items():
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name} is {value!r}")
    parameters = {name: value for name, value in estimate.parameters.items() if value is not None}
    for name, value in parameters.items():
        if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"parameter {name!r} is {value!r:.80}")
    rounded = {name: float(f"{value:.6g}") for name, value in numbers.items()}
    return {**rounded, "estimate": True, "method": estimate.method, "parameters": parameters}


def check_meter(meter: object) -> Any:
    if meter is not None and not callable(getattr(meter, "begin", None)):
        raise TypeError(
            f"energy must be a holdfast.lineage.Energy, or an object with a method begin(), not {meter!r:.80}"
        )
    return meter
