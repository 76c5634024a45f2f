"""SIGKILL at every boundary between statements: exactly one effect in a transaction, and outside never a second one
without the rollback or the probe that was declared. Effects are rows in a real table."""

from __future__ import annotations

import json

import holdfast
from tests.children import Child, query
from tests.operations.crasher import FINISHED, HALF_DONE, RETRIED, UNTOUCHED

PROGRAM = "import runpy; runpy.run_module('tests.operations.crasher', run_name='__main__', alter_sys=True)"
KILLED = -9
POLICIES = ("refuse", "rollback", "verify")


def crashes(url: str, mode: str, *policies: str) -> dict[str, list[tuple[str, int, int, str, int]]]:
    """For each policy and each place where an attempt was killed: how that and the next one ended, what the next one
    returned, and how many effects there are."""
    with holdfast.Client(url) as client:
        client.leases.list()  # SQLite makes its tables now
    query(url, "create table effect (what text)")
    found: dict[str, list[tuple[str, int, int, str, int]]] = {policy: [] for policy in policies}
    with Child(PROGRAM, url, mode, *policies) as child:
        for line in iter(child.line, "<end>"):
            policy, *crash = json.loads(line)
            found[policy].append(tuple(crash))
        assert child.wait() == 0
    with holdfast.Client(url) as client:
        assert client.operations.verify().broken == (), "whatever was killed, the chains are sound"
    return found


def test_in_a_transaction_there_is_exactly_one_effect(either: str) -> None:
    found = crashes(either, "transaction", "-")["-"]
    killed = [each for each in found if each[1] == KILLED]
    assert len(killed) >= 8, found
    assert [each for each in found if each[2:] != (0, "success", 1)] == []
    assert all(each[1] in (KILLED, 0) for each in found), "whoever is not killed ends well"


def test_outside_there_is_never_a_second_effect(either: str) -> None:
    for policy, found in crashes(either, "external", *POLICIES).items():
        assert [each for each in found if each[1:3] != (KILLED, 0)] == []
        ends = {boundary: (said, effects) for boundary, _, _, said, effects in found}
        if policy != "refuse":
            retried = RETRIED if policy == "rollback" else ()
            assert ends == dict.fromkeys((*HALF_DONE, *retried), ("success", 1)), policy
            continue
        for boundary in (*UNTOUCHED, *FINISHED):
            assert ends.pop(boundary) == ("success", 1), boundary
        assert ends == {boundary: ("partial", int(boundary == "effect:after")) for boundary in HALF_DONE}


def test_in_a_batch_there_is_never_a_second_effect(either: str) -> None:
    found = crashes(either, "batch", "-")["-"]
    assert [each for each in found if each[1:3] != (KILLED, 0)] == []
    ends = {boundary: (said, effects) for boundary, _, _, said, effects in found}
    left = {boundary: effects for boundary, (said, effects) in ends.items() if said == "partial"}
    assert left == {
        "after:operation_claim_many=kill@1": 0, "effect:before": 0, "effect:after": 1,
        "before:operation_finish_many=kill@1": 1,
    }  # fmt: skip
    assert {ends[boundary] for boundary in ends.keys() - left.keys()} == {("success", 1)}
