"""The audit entry of one run of a command, and the outcome it is completed with: done, refused, failed or unknown.

The entry is begun before anything is done. An outcome never claims more than is certain.
"""

from __future__ import annotations

import os
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Self

from holdfast import DriverError, EngineError, HoldfastError, OwnershipUnknown
from holdfast.commands.registry import CommandRefused, CommandUnsettled
from holdfast.telemetry import WARNING, logger

if TYPE_CHECKING:
    from holdfast import Client

log = logger("holdfast.commands")


class Stage(Enum):
    """How far a run has come."""

    PLANNING = "planning"
    APPLYING = "applying"
    DONE = "done"


def describe_outcome(stage: Stage, error: BaseException | None, *, atomic: bool) -> str:
    """One word, and the error if there was one.

    done: the change was made. refused: nothing was changed; a command raises CommandRefused only before its first
    change. failed: an error before the change, or between two steps of a command that is not atomic. unknown: the
    change may or may not have been made.
    """
    if stage is Stage.DONE:
        return "done" if error is None else f"done, then an error: {error}"
    if error is None:
        return "failed: it did not complete"
    is_certain = isinstance(error, HoldfastError) and not _is_in_doubt(error)
    if isinstance(error, CommandRefused) or (is_certain and (stage is Stage.PLANNING or atomic)):
        return f"refused: {error}"
    if stage is Stage.APPLYING and (_is_in_doubt(error) or not isinstance(error, Exception)):
        return f"unknown: {type(error).__name__}: {error}"
    return f"failed: {type(error).__name__}: {error}"


def _is_in_doubt(error: BaseException) -> bool:
    """Whether what the error interrupted may have happened."""
    if isinstance(error, EngineError):
        return not error.certain
    if isinstance(error, DriverError):
        return error.status is None
    return isinstance(error, CommandUnsettled | OwnershipUnknown)


class AuditEntry:
    """The open audit entry of a run, completed when its block exits.

    An error of holdfast after the change was made does not undo the change: the block swallows it and keeps its text in
    ``doubt``. An error while the outcome is written is never raised: ``doubt`` says that the entry has no outcome.
    """

    def __init__(self, client: Client, number: int, *, atomic: bool) -> None:
        self._client, self._number, self._atomic = client, number, atomic
        self._pid = os.getpid()
        self.stage = Stage.PLANNING
        self.doubt: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if os.getpid() != self._pid:  # a forked child leaves the block: the outcome is for its parent to record
            return False
        outcome = describe_outcome(self.stage, error, atomic=self._atomic)
        if self.stage is Stage.DONE and error is not None:
            self.doubt = str(error)
        try:
            self._client.audit.end(self._number, outcome)
        except HoldfastError as problem:
            self.doubt = f"audit entry {self._number} has no outcome: it could not be written: {problem}"
            log.event(
                "command.unrecorded",
                WARNING,
                "%(doubt)s; the outcome was: %(outcome)s",
                doubt=self.doubt,
                outcome=outcome,
            )
        return self.stage is Stage.DONE and isinstance(error, HoldfastError)
