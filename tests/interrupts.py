"""Raises KeyboardInterrupt before a chosen bytecode instruction of holdfast.

That is stricter than the interpreter, which handles signals only at some instructions. Instructions are observed with a
trace function, and from Python 3.12 on with ``sys.monitoring``: there a trace function misses most of them.
"""

from __future__ import annotations

import sys
from dis import opname
from functools import cache
from inspect import CO_GENERATOR
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

import holdfast

RETURNS = ("RETURN_VALUE", "RETURN_CONST")
TOOL = 4
"""A tool id of sys.monitoring that is free."""

monitoring: Any = getattr(sys, "monitoring", None)


@cache
def generated(*folders: str) -> tuple[str, ...]:
    """The generated (sync) files in these folders of the package."""
    package = Path(holdfast.__file__).parent
    files = [path for folder in folders for path in (package / folder).rglob("*.py")]
    return tuple(str(path) for path in files if path.read_text(encoding="utf-8").startswith("# Generated"))


class Interrupt:
    """Raises once, in this thread, before instruction number ``at`` of files whose path contains one of ``within`` and
    none of ``without``."""

    def __init__(self, at: int, *within: str, without: tuple[str, ...] = ()) -> None:
        self.at = self.left = at
        self.within, self.without = within, without
        self.raised = False
        self.where = ""

    def __enter__(self) -> None:
        if monitoring is None:
            sys.settrace(self._called)
            return
        self.thread = get_ident()
        monitoring.use_tool_id(TOOL, __name__)
        monitoring.register_callback(TOOL, monitoring.events.INSTRUCTION, self._monitored)
        monitoring.restart_events()
        monitoring.set_events(TOOL, monitoring.events.INSTRUCTION)

    def __exit__(self, *_: object) -> None:
        if monitoring is None:
            sys.settrace(None)
            return
        monitoring.set_events(TOOL, 0)
        monitoring.register_callback(TOOL, monitoring.events.INSTRUCTION, None)
        monitoring.free_tool_id(TOOL)

    def spares(self, code: CodeType, place: int) -> bool:
        """Whether this instruction is not to be interrupted; subclasses decide."""
        return False

    def _concerns(self, code: CodeType) -> bool:
        path = code.co_filename
        matches = any(part in path for part in self.within) and not any(part in path for part in self.without)
        return matches and code.co_name != "__del__"

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        if not self._concerns(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._traced

    def _traced(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            self._before_instruction(frame, frame.f_lasti)
        return self._traced

    def _monitored(self, code: CodeType, place: int) -> Any:
        if not self._concerns(code):
            return monitoring.DISABLE
        if get_ident() == self.thread:
            self._before_instruction(sys._getframe(1), place)
        return None

    def _before_instruction(self, frame: FrameType, place: int) -> None:
        if not self.raised and not self.spares(frame.f_code, place) and not _swallows(frame.f_code, place):
            self.left -= 1
            if self.left < 0 and not _is_in_finalizer(frame):
                self.raised = True
                self.where = stack(frame)
                raise KeyboardInterrupt


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """Whether the garbage collector has called it, wherever it came by: the interpreter ignores what is raised then."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _swallows(code: CodeType, place: int) -> bool:
    """Whether a generator ends there. If it was garbage, an exception raised then is ignored by the interpreter."""
    return bool(code.co_flags & CO_GENERATOR) and opname[code.co_code[place]] in ("CALL_INTRINSIC_1", "RERAISE")


def returns(code: CodeType, place: int) -> bool:
    """Whether the instruction is a return: the interpreter handles no signals there."""
    return opname[code.co_code[place]] in RETURNS


def stack(frame: FrameType | None) -> str:
    """The innermost calls, to find what was interrupted."""
    calls: list[str] = []
    while frame is not None and len(calls) < 5:
        calls.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(calls)
