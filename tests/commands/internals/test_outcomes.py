"""The outcome in the audit is what became of the command: done, refused, failed or unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast
from holdfast import commands as operator
from holdfast.commands import execute, registry
from holdfast.commands.audit_entry import Stage, describe_outcome
from holdfast.lease.grant import LeaseGrant
from holdfast.recipes.gate_terms import gate_terms, runtime_terms
from tests.children import eventually
from tests.cli.command import at, call

JANE: dict[str, Any] = {"actor": "jane", "reason": "its machine is gone"}


class Unanswered(holdfast.EngineError):
    certain = False


class QuickClient(holdfast.Client):
    """Its runtime and gate leases notice within 0.1 s that they are lost; see the fixture."""

    lost: set[str]


@pytest.fixture
def client(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[QuickClient]:
    terms = runtime_terms(600.0)._replace(renew_every=0.1)
    monkeypatch.setattr("holdfast.recipes.gate.runtime_terms", lambda ttl: terms)
    monkeypatch.setattr(
        "holdfast.recipes.gate_terms.gate_terms",
        lambda name, **given: gate_terms(name, **given | {"ttl": 600.0})._replace(renew_every=0.1),
    )
    lose = LeaseGrant._lose

    def lost(grant: LeaseGrant, error: holdfast.HoldfastError) -> None:
        lose(grant, error)
        quick.lost.add(grant.name)

    monkeypatch.setattr(LeaseGrant, "_lose", lost)
    with QuickClient(sqlite_url) as quick:
        quick.lost = set()
        yield quick


def outcomes(client: holdfast.Client, action: str) -> list[str | None]:
    return [entry.outcome for entry in client.audit.list() if entry.action == action]


def after_change(monkeypatch: pytest.MonkeyPatch, callback: Callable[[], object]) -> None:
    """Call ``callback`` once the command has made its change."""
    apply = execute._apply

    def apply_and_call(*arguments: Any) -> None:
        apply(*arguments)
        callback()

    monkeypatch.setattr(execute, "_apply", apply_and_call)


@pytest.mark.parametrize(
    ("lost", "command"),
    [(operator.RUNTIME, "lease.release"), ("@gate:leases", "lease.release"), ("@gate:schema", "schema.migrate")],
)
def test_a_command_that_loses_its_lease_after_it_was_done_is_done(
    client: QuickClient, sqlite_url: str, monkeypatch: pytest.MonkeyPatch, lost: str, command: str
) -> None:
    """The caller and the audit learn that the lease was lost, too; but the change was made."""
    with holdfast.Client(sqlite_url) as other:
        other.lease("nightly-import").acquire()

        def rob() -> None:
            assert other.leases.force_release(lost, actor="thief", reason="because")
            eventually(lambda: lost in client.lost, "the holder has noticed the loss")

        after_change(monkeypatch, rob)
        given = {"name": "nightly-import"} if command == "lease.release" else {}
        outcome = operator.run(client, command, given, **JANE)
        assert (other.leases.get("nightly-import") is None) == bool(given)
    assert outcome.doubt is not None
    assert f"lease '{lost}'" in outcome.doubt
    assert outcomes(client, command) == [f"done, then an error: {outcome.doubt}"[:200]]


def test_a_command_whose_answer_is_lost_is_neither_done_nor_refused(
    either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease was released, and the answer was lost. A second query would say that the lease is not held."""
    with holdfast.Client(either) as other:
        other.lease("nightly-import", ttl=60, auto_renew=False).acquire()
        once = "after:lease_force_release_if=error@1" + ";" * (
            either[0] == "p"
        )  # hits are counted a process and a text
        monkeypatch.setenv("HOLDFAST_FAILPOINTS", once)
        with holdfast.Client(either) as client, pytest.raises(holdfast.EngineError):
            operator.run(client, "lease.release", {"name": "nightly-import"}, **JANE)
        monkeypatch.delenv("HOLDFAST_FAILPOINTS")
        assert other.leases.get("nightly-import") is None
        [outcome] = outcomes(other, "lease.release")
        assert outcome is not None
        assert outcome.startswith("unknown: ")


def test_a_command_that_could_not_say_how_it_ended_is_done_all_the_same(client: QuickClient, sqlite_url: str) -> None:
    client.slots("tuner", 1).claim(owner="s-1")
    command = at(sqlite_url, "do", "slot.release", "tuner", "1", "--actor", "jane", "--reason", "why")
    done = call(*command, HOLDFAST_FAILPOINTS="before:audit_end=error")
    assert (done.returncode, client.slots("tuner", 1).in_use()) == (0, 0)
    assert "the change was made, but then an error occurred: audit entry" in done.stderr
    assert outcomes(client, "slot.release") == [None], "the entry has no outcome, because it could not be written"


def test_what_goes_wrong_in_the_middle_is_a_failure_and_an_interrupt_is_in_doubt(
    client: QuickClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    errors: list[BaseException] = []

    @operator.command("a.several", gate="several", subject="x", destructive=True)
    def several(window: Any) -> Any:
        """Take several steps."""
        yield ["one and two"]
        raise errors[-1]

    words = {}
    for error in (
        holdfast.LeaseLost("after the first step"), ZeroDivisionError("by zero"), KeyboardInterrupt(), Unanswered("hm"),
        operator.CommandUnsettled("it goes on"), operator.CommandRefused("nothing to do"),
    ):  # fmt: skip
        errors.append(error)
        with pytest.raises(type(error)):
            operator.run(client, "a.several", **JANE)
        words[type(error).__name__] = (outcomes(client, "a.several")[0] or "").partition(":")[0]
    assert words == {
        "LeaseLost": "failed", "ZeroDivisionError": "failed", "KeyboardInterrupt": "unknown", "Unanswered": "unknown",
        "CommandUnsettled": "unknown", "CommandRefused": "refused",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "error", "atomic", "word"),
    [
        (Stage.PLANNING, holdfast.PolicyDenied("no"), False, "refused"),
        (Stage.PLANNING, Unanswered("no answer"), False, "failed"),
        (Stage.PLANNING, ZeroDivisionError(), False, "failed"),
        (Stage.PLANNING, KeyboardInterrupt(), True, "failed"),
        (Stage.APPLYING, holdfast.LeaseLost("it passed on"), True, "refused"),
        (Stage.APPLYING, holdfast.LeaseLost("it passed on"), False, "failed"),
        (Stage.APPLYING, holdfast.EngineError("refused by the server"), True, "refused"),
        (Stage.APPLYING, Unanswered("no answer"), True, "unknown"),
        (Stage.APPLYING, holdfast.OwnershipUnknown("?"), True, "unknown"),
        (Stage.APPLYING, holdfast.DriverError("no answer"), True, "unknown"),
        (Stage.APPLYING, holdfast.DriverError("no", status=409), True, "refused"),
        (Stage.DONE, None, False, "done"),
        (Stage.DONE, holdfast.LeaseLost("it passed on"), False, "done, then an error"),
    ],
)
def test_the_word_for_it(stage: Stage, error: BaseException | None, atomic: bool, word: str) -> None:
    assert describe_outcome(stage, error, atomic=atomic).partition(":")[0] == word
