"""The audit says what has become of a command, and nothing else: done, refused, failed or unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast
from holdfast import commands as operator
from holdfast.commands import registry, running
from holdfast.commands.account import Stage, verdict
from holdfast.lease.grant import LeaseGrant
from holdfast.recipes.gate_terms import gate_terms, runtime_terms
from tests.children import eventually
from tests.cli.command import at, call

JANE: dict[str, Any] = {"actor": "jane", "reason": "its machine is gone"}


class Unheard(holdfast.EngineError):
    certain = False


class Quick(holdfast.Client):
    """Its leases learn soon that they are lost; see the fixture."""

    lost: set[str]


@pytest.fixture
def client(either: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Quick]:
    terms = runtime_terms(600.0)._replace(renew_every=0.1)
    monkeypatch.setattr("holdfast.recipes.gate.runtime_terms", lambda ttl: terms)
    monkeypatch.setattr(
        "holdfast.recipes.gate_terms.gate_terms",
        lambda name, **given: gate_terms(name, **given | {"ttl": 600.0})._replace(renew_every=0.1),
    )
    lose = LeaseGrant._lose

    def lost(grant: LeaseGrant, error: holdfast.HoldfastError) -> None:
        lose(grant, error)
        made.lost.add(grant.name)

    monkeypatch.setattr(LeaseGrant, "_lose", lost)
    with Quick(either) as made:
        made.lost = set()
        yield made


def outcomes(client: holdfast.Client, action: str) -> list[str | None]:
    return [each.outcome for each in client.audit.list() if each.action == action]


def after(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """Let something happen once the command has done what it is about."""
    finish = running._finish

    def finished(*given: Any) -> None:
        finish(*given)
        then()

    monkeypatch.setattr(running, "_finish", finished)


@pytest.mark.parametrize(
    ("lost", "command"),
    [(operator.RUNTIME, "lease.release"), ("@gate:leases", "lease.release"), ("@gate:schema", "schema.migrate")],
)
def test_a_command_that_loses_its_lease_after_it_was_done_is_done(
    client: Quick, either: str, monkeypatch: pytest.MonkeyPatch, lost: str, command: str
) -> None:
    """That it was not alone any more is told, too, to whoever ran it and in the audit; but it has happened."""
    with holdfast.Client(either) as other:
        other.lease("nightly-import").acquire()

        def rob() -> None:
            assert other.leases.force_release(lost, actor="thief", reason="because")
            eventually(lambda: lost in client.lost, "its holder has learned")

        after(monkeypatch, rob)
        given = {"name": "nightly-import"} if command == "lease.release" else {}
        done = operator.run(client, command, given, **JANE)
        assert (other.leases.get("nightly-import") is None) == bool(given)
    assert done.doubt is not None
    assert f"lease '{lost}'" in done.doubt
    assert outcomes(client, command) == [f"done, and afterwards: {done.doubt}"[:200]]


def test_a_command_whose_answer_is_lost_is_neither_done_nor_refused(
    either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease was taken away, and nobody has heard. Asked once more, the database would say that nobody has it."""
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
        [said] = outcomes(other, "lease.release")
        assert said is not None
        assert said.startswith("unknown: ")


def test_a_command_that_could_not_say_how_it_ended_is_done_all_the_same(client: Quick, either: str) -> None:
    client.slots("tuner", 1).claim(owner="s-1")
    command = at(either, "do", "slot.release", "tuner", "1", "--actor", "jane", "--reason", "why")
    done = call(*command, HOLDFAST_FAILPOINTS="before:audit_end=error")
    assert (done.returncode, client.slots("tuner", 1).in_use()) == (0, 0)
    assert "it is done, and afterwards: entry" in done.stderr
    assert outcomes(client, "slot.release") == [None], "an entry without an end: nobody could tell it"


def test_what_goes_wrong_in_the_middle_is_a_failure_and_an_interrupt_is_in_doubt(
    client: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    errors: list[BaseException] = []

    @operator.command("a.several", gate="several", subject="x", destructive=True)
    def several(window: Any) -> Any:
        """Take several steps."""
        yield ["one and two"]
        raise errors[-1]

    said = {}
    for error in (
        holdfast.LeaseLost("after the first step"), ZeroDivisionError("by zero"), KeyboardInterrupt(), Unheard("hm"),
        operator.CommandUnsettled("it goes on"), operator.CommandRefused("nothing to do"),
    ):  # fmt: skip
        errors.append(error)
        with pytest.raises(type(error)):
            operator.run(client, "a.several", **JANE)
        said[type(error).__name__] = (outcomes(client, "a.several")[0] or "").partition(":")[0]
    assert said == {
        "LeaseLost": "failed", "ZeroDivisionError": "failed", "KeyboardInterrupt": "unknown", "Unheard": "unknown",
        "CommandUnsettled": "unknown", "CommandRefused": "refused",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "error", "atomic", "word"),
    [
        (Stage.LOOKING, holdfast.PolicyDenied("no"), False, "refused"),
        (Stage.LOOKING, Unheard("no answer"), False, "failed"),
        (Stage.LOOKING, ZeroDivisionError(), False, "failed"),
        (Stage.LOOKING, KeyboardInterrupt(), True, "failed"),
        (Stage.DOING, holdfast.LeaseLost("it passed on"), True, "refused"),
        (Stage.DOING, holdfast.LeaseLost("it passed on"), False, "failed"),
        (Stage.DOING, holdfast.EngineError("refused by the server"), True, "refused"),
        (Stage.DOING, Unheard("no answer"), True, "unknown"),
        (Stage.DOING, holdfast.OwnershipUnknown("?"), True, "unknown"),
        (Stage.DOING, holdfast.DriverError("no answer"), True, "unknown"),
        (Stage.DOING, holdfast.DriverError("no", status=409), True, "refused"),
        (Stage.DONE, None, False, "done"),
        (Stage.DONE, holdfast.LeaseLost("it passed on"), False, "done, and afterwards"),
    ],
)
def test_the_word_for_it(stage: Stage, error: BaseException | None, atomic: bool, word: str) -> None:
    assert verdict(stage, error, atomic=atomic).partition(":")[0] == word
