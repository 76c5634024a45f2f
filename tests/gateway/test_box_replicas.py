"""Three replicas on PostgreSQL: who leads dies, all are restarted, a supervisor is connected to another one."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import holdfast
from tests.children import PATIENCE, eventually
from tests.driver.daemon import runs
from tests.gateway.replicas import Replica

SUPERVISOR = """
import json, os
from websockets.sync.client import connect
address = os.environ["HOLDFAST_GATEWAY"].replace("http", "ws", 1)
path = f"{address}/sandboxes/{os.environ['HOLDFAST_SANDBOX']}/supervisor"
token = {"Authorization": "Bearer " + os.environ["HOLDFAST_SUPERVISOR_TOKEN"]}
with connect(path, additional_headers=token) as socket:
    for text in socket:
        told = json.loads(text)
        if told["message"] == "go":
            break
        if told["message"] != "be silent":
            socket.send(json.dumps({"id": told["id"], "reply": {"heard": told["message"]}}))
import time
time.sleep(1000)
"""


def leader(replicas: list[Replica]) -> Replica:
    """Who leads, as the lease says."""
    with holdfast.Client(replicas[0].url) as client:
        seen: list[Replica] = []

        def leads() -> bool:
            lease = client.leases.get("gateway:reconciler")
            holder = "" if lease is None else lease.holder
            seen[:] = [each for each in replicas if holder.startswith(f"{each.name}:")]
            return bool(seen)

        eventually(leads, "one of them leads")
        return seen[0]


def becomes(replica: Replica, id: str, phase: str) -> dict[str, Any]:
    eventually(lambda: replica.http.get(f"/sandboxes/{id}").json().get("phase") == phase, f"{id} is {phase}")
    found: dict[str, Any] = replica.http.get(f"/sandboxes/{id}").json()
    return found


def ready(replica: Replica, id: str) -> dict[str, Any]:
    return becomes(replica, id, "Ready")


def test_the_leader_is_killed_and_the_driver_is_swept_elsewhere(replicas: list[Replica]) -> None:
    """Meanwhile no request fails that does not touch the dead one, and what is deleted without a leader ends."""
    first = leader(replicas)
    others = [each for each in replicas if each is not first]
    assert first.http.post("/sandboxes", json={"id": "before", "argv": ["sleep", "1000"], "grace": 0.1}).is_success
    pid = ready(others[0], "before")["status"]["details"]["pid"]
    with traffic(others) as answers:
        first.end(signal.SIGKILL)
        others[0].http.post("/sandboxes", json={"id": "after", "argv": ["sleep", "1000"], "grace": 0.1})
        ready(others[1], "after")  # only a leader tells so
        second = leader(replicas)
        assert second in others
        deleted = others[0].http.delete("/sandboxes/before", headers={"If-Match": "*"})
        asked = len(answers)
        eventually(lambda: len(answers) > asked + 10, "enough was asked meanwhile")
    assert deleted.status_code == 204
    assert not runs(pid)
    assert {each for each in answers if each >= 400} == set()
    first.restart()
    assert ready(first, "after")


def test_told_that_its_end_is_near_a_leader_hands_over_and_still_answers(replicas: list[Replica]) -> None:
    first = leader(replicas)
    first.process.send_signal(signal.SIGUSR1)
    eventually(lambda: leader(replicas) is not first, "another one leads")
    unready = first.http.get("/readyz")
    assert (unready.status_code, unready.json()["checks"]["running"]) == (503, False)
    assert first.http.post("/sandboxes", json={"id": "late", "argv": ["true"]}).status_code == 201
    assert first.http.get("/sandboxes").status_code == 200
    assert first.end() == 0
    first.restart()


def test_a_rolling_restart_under_load_loses_no_acknowledged_write(replicas: list[Replica]) -> None:
    """Each writes one record over and over, through whichever replica listens, and a new one now and then."""
    written: dict[str, int] = dict.fromkeys([each.name for each in replicas], 0)
    created: list[str] = []
    for name in written:
        replicas[0].http.post("/sandboxes", json={"id": name, "argv": ["sleep", "1000"], "grace": 0.1})

    def write(replica: Replica, http: httpx.Client) -> int:
        number = next(numbers)
        body = {"metadata": {"number": number}}
        answer = http.patch(f"/sandboxes/{replica.name}", json=body, headers={"If-Match": "*"})
        if answer.status_code == 200:
            written[replica.name] = number
        if number % 10 == 0 and http.post("/sandboxes", json={"id": f"w-{number}", "argv": ["true"]}).is_success:
            created.append(f"w-{number}")
        return answer.status_code

    numbers = itertools.count(1)
    session = replicas[0].http.post("/sessions", json={"ttl": 3600}).json()
    with traffic(replicas, write, pause=0.1) as answers:
        for each in replicas:
            assert each.end() == 0
            each.begin()
            each.ready()
        eventually(lambda: created and all(written.values()), "each has written")
    for name, number in written.items():
        assert 0 < number <= replicas[1].http.get(f"/sandboxes/{name}").json()["metadata"]["number"]
    for id in created:
        assert replicas[2].http.get(f"/sandboxes/{id}").is_success
        becomes(replicas[0], id, "Completed")  # it was run
    assert 500 not in answers
    for each in replicas:  # its slot outlives whoever claimed it, and lives by its own heartbeats
        assert each.http.post(f"/sessions/{session['id']}/heartbeat").json() == session


def test_a_message_reaches_a_supervisor_that_is_connected_elsewhere(replicas: list[Replica]) -> None:
    here, there = replicas[0], replicas[1]
    body = {"id": "watched", "argv": [sys.executable, "-c", SUPERVISOR], "supervised": True, "grace": 0.1}
    made = here.http.post("/sandboxes", json=body)  # which is the gateway that it is told
    assert made.status_code == 201, made.text
    assert made.json()["spec"]["env"] == []
    ready(there, "watched")
    _strangers_are_refused(there)
    assert there.http.get("/sandboxes/watched/supervisor").json()["address"] == here.address
    message = {"message": {"do": "status"}}
    for number, each in enumerate(replicas):
        keyed = {"Idempotency-Key": f"watched-{number}"}
        answer = each.http.post("/sandboxes/watched/messages", json=message, headers=keyed)
        assert (answer.status_code, answer.json()) == (200, {"reply": {"heard": {"do": "status"}}})
    silent = here.http.post("/sandboxes/watched/messages", json={"message": "be silent", "timeout": 0.2})
    assert silent.status_code == 504
    assert there.http.get("/sandboxes/watched").json()["phase"] == "Ready"
    gone = here.http.post("/sandboxes/watched/messages", json={"message": "go", "timeout": 60})
    assert gone.status_code == 502
    becomes(there, "watched", "Provisioning")
    assert there.http.post("/sandboxes/watched/messages", json=message).status_code == 409
    assert here.http.delete("/sandboxes/watched", headers={"If-Match": "*"}).status_code == 204


def _strangers_are_refused(replica: Replica) -> None:
    """Whoever is not the supervisor, and whatever there is not."""
    address = replica.address.replace("http", "ws", 1)
    for headers in ({}, {"Authorization": "Bearer guess"}, {"Authorization": "Basic Z3Vlc3M6"}):
        for id in ("watched", "none"):
            with pytest.raises(InvalidStatus) as refused:
                connect(f"{address}/sandboxes/{id}/supervisor", additional_headers=headers)
            assert refused.value.response.status_code == 403


def _read(replica: Replica, http: httpx.Client) -> int:
    return http.get("/sandboxes").status_code


@contextmanager
def traffic(
    replicas: list[Replica], ask: Callable[[Replica, httpx.Client], int] = _read, *, pause: float = 0.05
) -> Iterator[list[int]]:
    """Ask each of them all the time; the statuses. One that does not listen is tried again."""
    answers: list[int] = []
    over = threading.Event()

    def go_on(replica: Replica) -> None:
        while not over.wait(pause):
            try:
                with httpx.Client(base_url=replica.address, timeout=PATIENCE, verify=False, trust_env=False) as http:
                    answers.append(ask(replica, http))
            except httpx.TransportError:
                if ask is _read:
                    answers.append(599)
                time.sleep(0.02)

    threads = [threading.Thread(target=go_on, args=(each,)) for each in replicas]
    for each in threads:
        each.start()
    try:
        yield answers
    finally:
        over.set()
        for each in threads:
            each.join()
