"""What the generator of the sync files does with overloads."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "scripts" / "unasync.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("unasync", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_overloads_that_differ_only_in_what_is_awaited_become_one_signature() -> None:
    source = """
class AsyncThing:
    @overload
    async def run(self, work: Callable[..., Awaitable[T]]) -> T: ...

    @overload
    async def run(self, work: Callable[..., T]) -> T: ...

    async def run(self, work: Callable[..., Awaitable[T] | T]) -> T:
        return await maybe_await(work())

    @overload
    def get(self, key: str) -> str: ...

    @overload
    def get(self, key: int) -> int: ...

    @overload
    def get(self, key: Awaitable[int]) -> int: ...

    def get(self, key): ...
"""
    lines = [line.strip() for line in load().convert(source).splitlines() if line.strip()]
    assert lines == [
        "class Thing:",
        "def run(self, work: Callable[..., T | T]) -> T:",
        "return maybe_await(work())",
        "@overload",
        "def get(self, key: str) -> str: ...",
        "@overload",
        "def get(self, key: int) -> int: ...",
        "def get(self, key): ...",
    ]
