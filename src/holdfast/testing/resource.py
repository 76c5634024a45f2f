"""The base class of everything here that must be closed: servers, proxies, clocks, recorders."""

from abc import ABC, abstractmethod
from typing import Self


class Resource(ABC):
    """A context manager that closes itself at the end of the block, also after an exception."""

    @abstractmethod
    def close(self) -> None:
        """Free everything it owns. Does nothing when it is closed already."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
