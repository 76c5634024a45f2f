"""What the execution of an operation cost in energy and carbon: an estimate, of the time that its function took and of
what is known about the machine and the grid. Asks no clock and reads no meter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

JOULES_PER_KWH = 3_600_000.0
Clock = str
"""Whose CPU time was counted: "thread", "task" (the steps of it alone), or "loop" (whatever ran on it meanwhile)."""


class Estimate(NamedTuple):
    """What a meter says of one execution, how it came to it, and with which parameters."""

    energy_joules: float
    carbon_grams: float
    method: str
    parameters: Mapping[str, Any]


class Meter(Protocol):
    """``begin()`` is called right before the function; what comes back is called right after it, with its CPU seconds,
    its wall seconds and whose CPU time that is. None: this one was not measured."""

    def begin(self) -> Callable[[float, float, Clock], Estimate | None]: ...


@dataclass(frozen=True, kw_only=True)
class Energy:
    """``watts``: what a CPU that is busy draws, for each second of its time. ``grams_per_kwh``: the carbon intensity of
    the grid, in grams of CO2 equivalent. ``idle_watts``: what is drawn in any case, for each second of the wall's."""

    watts: float
    grams_per_kwh: float
    idle_watts: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{each.name} must be a number, not {value!r:.80}")
            if not 0 <= value <= 1_000_000:
                raise ValueError(f"{each.name} must be from 0 to 1000000, not {value!r}")

    def begin(self) -> Callable[[float, float, Clock], Estimate]:
        """As every meter has it: what comes back is called at the end."""
        return self.estimate

    def estimate(self, cpu_seconds: float, wall_seconds: float, clock: Clock = "thread") -> Estimate:
        """What so much time comes to."""
        joules = cpu_seconds * self.watts + wall_seconds * self.idle_watts
        known = {each.name: getattr(self, each.name) for each in fields(self)}
        return Estimate(joules, joules / JOULES_PER_KWH * self.grams_per_kwh, f"cpu_time:{clock}", known)


def facts(cpu_seconds: float, wall_seconds: float, said: Estimate) -> dict[str, Any]:
    """As it stands in the log, and in what is told. ValueError when there is something in it that no JSON has."""
    numbers = {
        "cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds, "energy_joules": said.energy_joules,
        "carbon_grams": said.carbon_grams,
    }  # fmt: skip
    for name, value in numbers.items():
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name} is {value!r}")
    known = {name: value for name, value in said.parameters.items() if value is not None}
    for name, value in known.items():
        if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"parameter {name!r} is {value!r:.80}")
    rounded = {name: float(f"{value:.6g}") for name, value in numbers.items()}
    return {**rounded, "estimate": True, "method": said.method, "parameters": known}


def check_meter(meter: object) -> Any:
    if meter is not None and not callable(getattr(meter, "begin", None)):
        raise TypeError(f"energy must be a holdfast.Energy, or something else that has begin(), not {meter!r:.80}")
    return meter
