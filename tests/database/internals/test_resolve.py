"""A resolver that hangs costs what the call may cost, and every address of a name gets its chance."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.database import postgres
from holdfast.database.sessions import open_session
from holdfast.database.url import parse
from holdfast.errors import Unreachable
from holdfast.runtime.clock import now
from tests.children import PATIENCE

PLACE = "127.0.0.1"


@pytest.fixture
def unanswered() -> Iterator[threading.Event]:
    answer = threading.Event()
    yield answer
    answer.set()


def test_a_resolver_that_does_not_answer_is_not_waited_for(
    unanswered: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libpq asks the resolver inside its connect, and nothing bounds that: a keeper would stand still meanwhile."""

    def hang(*_: Any, **__: Any) -> Any:
        unanswered.wait(PATIENCE)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with pytest.raises(Unreachable, match=r"'db\.invalid' could not be resolved in time"):
        open_session(parse("postgresql://db.invalid/app"), 0.3)


def test_a_name_without_an_address_says_so() -> None:
    with pytest.raises(Unreachable, match=r"'no-such-host\.invalid' could not be resolved"):
        open_session(parse("postgresql://no-such-host.invalid/app"), PATIENCE)


def test_the_second_address_of_a_name_is_tried_when_the_first_does_not_answer(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first may take half of the time; here it is given a moment of it, and the one that answers all it needs."""
    shares: list[float] = []
    connect = postgres._connect_one

    def hurried(conninfo: str, deadline: float) -> Any:
        if threading.current_thread() is not threading.main_thread():  # a client of another test connects
            return connect(conninfo, deadline)
        shares.append(deadline - now())
        return connect(conninfo, now() + (0.2 if len(shares) == 1 else PATIENCE))

    monkeypatch.setattr(postgres, "_connect_one", hurried)
    with socket.socket() as silent:  # takes a connection and says nothing
        port = int(postgres_url.rpartition(":")[2].partition("/")[0])
        silent.bind(("127.0.0.2", port))
        silent.listen()
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.2", PLACE)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        session = open_session(parse(postgres_url.replace(PLACE, "db.invalid")), 120)
        assert session.call("session_open", {}, PATIENCE)[0]["in_recovery"] is False
        session.close()
    assert shares[0] <= 60 < shares[1]


@pytest.mark.parametrize("host", ["localhost", PLACE])
def test_a_name_and_its_address_lead_to_the_same_server(postgres_url: str, host: str) -> None:
    session = open_session(parse(postgres_url.replace(PLACE, host)), PATIENCE)
    assert session.call("session_open", {}, PATIENCE)
    session.close()
