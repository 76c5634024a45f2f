"""The private names of other packages that we depend on, each with what we need of it. A new release may drop one."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json.encoder
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "holdfast"


def a_reentrant_lock_knows_its_owner() -> None:
    lock: Any = threading.RLock()
    assert not lock._is_owned()
    with lock:
        assert lock._is_owned()


def the_running_loop_can_be_asked_for_outside_of_one() -> None:
    assert asyncio._get_running_loop() is None

    async def inside() -> bool:
        return asyncio._get_running_loop() is asyncio.get_running_loop()

    assert asyncio.run(inside())


def a_class_can_be_registered_for_an_sqlstate() -> None:
    from psycopg import errors

    assert errors.lookup("40001") is errors._sqlcodes["40001"]


def a_connection_counts_its_transaction_blocks() -> None:
    from psycopg import _connection_base, transaction

    assert "self._num_transactions" in inspect.getsource(_connection_base)
    assert "_num_transactions" in inspect.getsource(transaction)


def statements_can_be_run_on_a_pgconn() -> None:
    from psycopg import generators
    from psycopg.errors import error_from_result

    assert callable(generators.execute)
    assert callable(error_from_result)


def the_encoder_of_json_can_be_made_by_hand() -> None:
    assert getattr(json.encoder, "c_make_encoder", None) is not None


def ctypes_can_be_used_without_its_package() -> None:
    import _ctypes

    assert all(hasattr(_ctypes, name) for name in ("call_function", "dlopen", "dlsym"))


def a_response_has_its_file() -> None:
    assert "self.fp" in inspect.getsource(http.client.HTTPResponse)
    assert http.client.HTTPConnection.response_class is http.client.HTTPResponse


def a_pool_of_connections_can_be_replaced() -> None:
    urllib3 = pytest.importorskip("urllib3")
    assert {"http", "https"} <= urllib3.PoolManager().pool_classes_by_scheme.keys()


def uvicorn_captures_signals_in_a_method() -> None:
    uvicorn = pytest.importorskip("uvicorn")
    assert callable(uvicorn.Server.capture_signals)
    assert uvicorn.Server(uvicorn.Config(lambda: None)).server_state.tasks == set()


def uvicorn_answers_400_in_a_method() -> None:
    pytest.importorskip("uvicorn")
    from uvicorn.protocols.http.h11_impl import H11Protocol

    assert callable(H11Protocol.send_400_response)
    assert callable(H11Protocol.handle_websocket_upgrade)
    source = inspect.getsource(H11Protocol)
    assert "self.conn" in source
    assert "self.transport" in source


def h11_extracts_heads_from_a_buffer() -> None:
    h11 = pytest.importorskip("h11")
    from h11._receivebuffer import ReceiveBuffer

    assert isinstance(h11.Connection(h11.SERVER)._receive_buffer, ReceiveBuffer)
    buffer = ReceiveBuffer()
    buffer += b"a\r\nb\r\n\r\nc"
    assert [bytes(line) for line in buffer.maybe_extract_lines() or ()] == [b"a", b"b"]
    assert "self._extract(" in inspect.getsource(ReceiveBuffer.maybe_extract_lines)


def fastapi_tells_the_route_in_the_scope() -> None:
    pytest.importorskip("fastapi")
    import fastapi.routing

    assert "effective_route_context" in inspect.getsource(fastapi.routing)


def codecarbon_keeps_its_tasks() -> None:
    emissions = pytest.importorskip(
        "codecarbon.emissions_tracker", reason="codecarbon is not installed: pip install codecarbon"
    )
    assert "_tasks" in inspect.getsource(emissions)


NAMES: dict[str, Callable[[], None]] = {
    "RLock._is_owned": a_reentrant_lock_knows_its_owner,
    "asyncio._get_running_loop": the_running_loop_can_be_asked_for_outside_of_one,
    "psycopg.errors._sqlcodes": a_class_can_be_registered_for_an_sqlstate,
    "psycopg.Connection._num_transactions": a_connection_counts_its_transaction_blocks,
    "psycopg.generators.execute": statements_can_be_run_on_a_pgconn,
    "psycopg.errors.error_from_result": statements_can_be_run_on_a_pgconn,
    "json.encoder.c_make_encoder": the_encoder_of_json_can_be_made_by_hand,
    "_ctypes.call_function": ctypes_can_be_used_without_its_package,
    "http.client.HTTPResponse.fp": a_response_has_its_file,
    "urllib3.PoolManager.pool_classes_by_scheme": a_pool_of_connections_can_be_replaced,
    "uvicorn.Server.capture_signals": uvicorn_captures_signals_in_a_method,
    "uvicorn.Server.server_state.tasks": uvicorn_captures_signals_in_a_method,
    "uvicorn H11Protocol.handle_websocket_upgrade": uvicorn_answers_400_in_a_method,
    "uvicorn H11Protocol.send_400_response": uvicorn_answers_400_in_a_method,
    "h11._receivebuffer.ReceiveBuffer, h11 Connection._receive_buffer": h11_extracts_heads_from_a_buffer,
    'scope["fastapi"]["effective_route_context"] of FastAPI': fastapi_tells_the_route_in_the_scope,
    "codecarbon EmissionsTracker._tasks": codecarbon_keeps_its_tasks,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_there_and_does_what_we_need(name: str) -> None:
    NAMES[name]()


def test_every_private_name_in_the_code_is_listed() -> None:
    marked = [
        (path.name, comment)
        for path in PACKAGE.rglob("*.py")
        for comment in re.findall(r"# private: (.*)", path.read_text(encoding="utf-8"))
    ]
    assert len(marked) > 10
    assert not [where for where in marked if not any(where[1].startswith(name) for name in NAMES)]
