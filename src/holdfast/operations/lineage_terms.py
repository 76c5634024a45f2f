"""The datasets that an operation reads and writes, and the data contract that they have to meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.names import check_name


@dataclass(frozen=True, slots=True)
class Contract:
    """A data contract. ``check``, if given, is called after the function like a postcondition, and its verdict is
    recorded with the operation."""

    name: str
    version: str
    check: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_name(self.name, "the name of a contract")
        check_name(self.version, "the version of a contract")
        if self.check is not None and not callable(self.check):
            raise TypeError(f"the check of a contract must be a function, not {self.check!r:.80}")


class Lineage(NamedTuple):
    """Empty ``outputs`` mean the dataset of the key."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    contract: Contract | None = None

    @classmethod
    def check(cls, inputs: Sequence[str], outputs: Sequence[str], contract: Contract | None) -> Lineage:
        """The arguments, checked. TypeError or ValueError when one is wrong."""
        for names, what in ((inputs, "inputs"), (outputs, "outputs")):
            if isinstance(names, str) or not isinstance(names, Sequence):
                raise TypeError(f"{what} must be a list of names of datasets, not {names!r:.80}")
            for name in names:
                check_name(name, f"a name in {what}", 1000)
        if contract is not None and not isinstance(contract, Contract):
            raise TypeError(f"contract must be a holdfast.lineage.Contract, not {contract!r:.80}")
        return cls(tuple(inputs), tuple(outputs), contract)

    def detail(self) -> dict[str, Any]:
        """The fields of a ``claimed`` entry."""
        fields = {"inputs": list(self.inputs), "outputs": list(self.outputs), "contract": self.contract_detail()}
        return {name: value for name, value in fields.items() if value}

    def contract_detail(self) -> Mapping[str, Any] | None:
        return None if self.contract is None else {"name": self.contract.name, "version": self.contract.version}


NO_LINEAGE = Lineage()
