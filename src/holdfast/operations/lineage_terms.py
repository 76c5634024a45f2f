"""What an operation says of the data that it reads and writes, and the contract that these are held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.names import check_name


@dataclass(frozen=True, slots=True)
class Contract:
    """A data contract: ``check``, if there is one, is called after the function as a postcondition is, and its verdict
    is recorded with the operation."""

    name: str
    version: str
    check: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_name(self.name, "the name of a contract")
        check_name(self.version, "the version of a contract")
        if self.check is not None and not callable(self.check):
            raise TypeError(f"the check of a contract must be a function, not {self.check!r:.80}")


class Lineage(NamedTuple):
    """``outputs``: empty means the dataset of the key."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    contract: Contract | None = None

    @classmethod
    def check(cls, inputs: Sequence[str], outputs: Sequence[str], contract: Contract | None) -> Lineage:
        if inputs == outputs == () and contract is None:
            return NOTHING
        for given, what in ((inputs, "inputs"), (outputs, "outputs")):
            if isinstance(given, str) or not isinstance(given, Sequence):
                raise TypeError(f"{what} must be a list of names of datasets, not {given!r:.80}")
            for name in given:
                check_name(name, f"a name in {what}", 1000)
        if contract is not None and not isinstance(contract, Contract):
            raise TypeError(f"contract must be a holdfast.Contract, not {contract!r:.80}")
        return cls(tuple(inputs), tuple(outputs), contract)

    def detail(self) -> dict[str, Any]:
        """As it stands in the log."""
        said = {"inputs": list(self.inputs), "outputs": list(self.outputs), "contract": self.agreed()}
        return {name: value for name, value in said.items() if value}

    def agreed(self) -> Mapping[str, Any] | None:
        return None if self.contract is None else {"name": self.contract.name, "version": self.contract.version}


NOTHING = Lineage()
