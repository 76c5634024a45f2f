"""The datasets that an operation reads and writes, and the data contract that they have to meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The names of the datasets that an operation reads (``inputs``) and writes (``outputs``; empty: the dataset of its
    key), and the ``contract`` that they have to meet. TypeError or ValueError when an argument is wrong."""

    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    contract: Contract | None = None

    def __post_init__(self) -> None:
        for what in ("inputs", "outputs"):
            names = getattr(self, what)
            if isinstance(names, str) or not isinstance(names, Sequence):
                raise TypeError(f"{what} must be a list of names of datasets, not {names!r:.80}")
            object.__setattr__(self, what, tuple([check_name(name, f"a name in {what}", 1000) for name in names]))
        if self.contract is not None and not isinstance(self.contract, Contract):
            raise TypeError(f"contract must be a holdfast.lineage.Contract, not {self.contract!r:.80}")

    def _detail(self) -> dict[str, Any]:
        """The fields of a ``claimed`` entry."""
        fields = {"inputs": list(self.inputs), "outputs": list(self.outputs), "contract": self._contract_detail()}
        return {name: value for name, value in fields.items() if value}

    def _contract_detail(self) -> Mapping[str, Any] | None:
        return None if self.contract is None else {"name": self.contract.name, "version": self.contract.version}


NO_LINEAGE = Lineage()
