"""What is closed at the end of its block."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """``with thing:`` closes it, whatever happens in the block."""

    @abstractmethod
    def close(self) -> None:
        """End it, and leave nothing of it. Harmless when closed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
