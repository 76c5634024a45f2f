from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.reconciler import ProcessDriver
from tests.children import PATIENCE
from tests.driver.daemon import Daemon, clean


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Short enough for the socket in it, and not made yet."""
    return tmp_path / "d"


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    """Also when a test fails."""
    yield
    for each in tmp_path.glob("**/sandboxes"):
        clean(each.parent)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Daemon]]:
    with ExitStack() as stack:
        yield lambda *options, **more: stack.enter_context(Daemon(folder, *options, **more))


@pytest.fixture
def daemon(start: Callable[..., Daemon]) -> Daemon:
    return start()


@pytest.fixture
def client(daemon: Daemon) -> ProcessDriver:
    return daemon.client()


@pytest.fixture
def raw(daemon: Daemon) -> Callable[[bytes], bytes]:
    """Say these bytes to the driver, and hear all that it answers until it closes."""

    def ask(data: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(PATIENCE)
            line.connect(os.fspath(daemon.folder / "driver.sock"))
            line.sendall(data)
            answer = b""
            while received := line.recv(65536):
                answer += received
            return answer

    return ask
