"""Types of numeric command line arguments. A number out of range is refused before anything is started."""

import argparse
import math
from collections.abc import Callable
from contextlib import suppress


def positive(text: str) -> float:
    with suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"must be a number above 0, not {text}")


def seconds(minimum: float, maximum: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        with suppress(ValueError):
            if minimum <= (number := float(text)) <= maximum:
                return number
        raise argparse.ArgumentTypeError(f"must be a number of seconds from {minimum:g} to {maximum:g}, not {text}")

    return parse


def count(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        with suppress(ValueError):
            if (number := int(text)) >= minimum:
                return number
        raise argparse.ArgumentTypeError(f"must be a whole number from {minimum} on, not {text}")

    return parse
