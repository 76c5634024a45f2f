"""A dashboard that is mounted in an application of its own, which a real server serves in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from tests.children import eventually


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of ``app`` while it is served."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started, "the server listens")
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()
