"""What the audit says of a run: done, refused, failed or unknown; and never a word that is not so."""

from __future__ import annotations

import logging
import os
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Self

from holdfast import DriverError, EngineError, HoldfastError, OwnershipUnknown
from holdfast.commands.registry import CommandRefused, CommandUnsettled

if TYPE_CHECKING:
    from holdfast import Client

log = logging.getLogger("holdfast.commands")


class Stage(Enum):
    LOOKING = "looking"
    DOING = "doing"
    DONE = "done"


def verdict(stage: Stage, error: BaseException | None, *, atomic: bool) -> str:
    """In one word, and why. Refused: nothing was changed, for a reason. Failed: it went wrong, before anything was
    changed or, of a command that takes several steps, in the middle. Unknown: it may or may not have happened."""
    if stage is Stage.DONE:
        return "done" if error is None else f"done, and afterwards: {error}"
    if error is None:
        return "failed: it has not come to its end"
    certain = isinstance(error, HoldfastError) and not _in_doubt(error)
    if isinstance(error, CommandRefused) or (certain and (stage is Stage.LOOKING or atomic)):
        return f"refused: {error}"
    if stage is Stage.DOING and (_in_doubt(error) or not isinstance(error, Exception)):
        return f"unknown: {type(error).__name__}: {error}"
    return f"failed: {type(error).__name__}: {error}"


def _in_doubt(error: BaseException) -> bool:
    if isinstance(error, EngineError):
        return not error.certain
    if isinstance(error, DriverError):
        return error.status is None
    return isinstance(error, CommandUnsettled | OwnershipUnknown)


class Account:
    """Of one run, from its entry to its end. What goes wrong once it is done does not undo it: that is told, and kept
    in ``doubt``, but not raised."""

    def __init__(self, client: Client, entry: int, *, atomic: bool) -> None:
        self._client, self._entry, self._atomic = client, entry, atomic
        self._pid = os.getpid()
        self.stage = Stage.LOOKING
        self.doubt: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if os.getpid() != self._pid:  # a fork that leaves the command: how that ends is not for it to tell
            return False
        outcome = verdict(self.stage, error, atomic=self._atomic)
        if self.stage is Stage.DONE and error is not None:
            self.doubt = str(error)
        try:
            self._client.audit.end(self._entry, outcome)
        except HoldfastError as problem:
            self.doubt = f"entry {self._entry} of the audit does not say how it ended: {problem}"
            log.warning(
                "%s; it was: %s", self.doubt, outcome, extra={"event": "command.unrecorded", "outcome": str(outcome)}
            )
        return self.stage is Stage.DONE and isinstance(error, HoldfastError)
