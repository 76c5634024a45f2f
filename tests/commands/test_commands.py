"""Governed commands: with an actor and a reason, one at a time, while their gate is open, with an audit entry."""

from __future__ import annotations

import ast
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

import holdfast
from holdfast import commands as operator
from holdfast.commands import execute, registry
from tests.children import NONE, PATIENCE, query, rows
from tests.cli.command import ask, at, call, invoke, printed, valid

ROOT = Path(__file__).parents[2]
JANE: dict[str, Any] = {"actor": "jane", "reason": "its machine is gone"}
BY_JANE = ("--actor", "jane", "--reason", "its machine is gone")


@pytest.fixture
def client(either: str) -> Iterator[holdfast.Client]:
    with holdfast.Client(either) as client:
        yield client


def entries(client: holdfast.Client, action: str) -> list[Any]:
    return [each for each in client.audit.list() if each.action == action]


def test_a_command_leaves_who_why_what_how_it_ended_and_under_which_fence(client: holdfast.Client) -> None:
    grant = client.lease("nightly-import", holder="worker-1").acquire()
    outcome = operator.run(client, "lease.release", {"name": "nightly-import"}, **JANE)
    assert outcome.changes == [f"lease 'nightly-import', held by worker-1 with fence {grant.fence}, is released"]
    assert client.leases.get("nightly-import") is None
    [entry] = entries(client, "lease.release")
    assert (entry.actor, entry.reason, entry.subject) == ("jane", "its machine is gone", "nightly-import")
    assert (entry.outcome, entry.fence, entry.id) == ("done", outcome.fence, outcome.entry)
    assert outcome.fence is not None
    assert outcome.fence > grant.fence
    assert entry.detail["changes"] == outcome.changes
    assert entry.detail["parameters"] == {"name": "nightly-import"}
    [window] = entries(client, "gate.window")
    assert (window.subject, window.outcome) == ("leases", "closed")
    [ended] = client.leases.history("nightly-import")
    assert (ended.outcome, ended.actor, ended.reason) == ("forced", "jane", "its machine is gone")


def test_a_dry_run_shows_what_would_change_and_changes_nothing(either: str, client: holdfast.Client) -> None:
    client.lease("nightly-import", holder="worker-1").acquire()
    client.slots("tuner", 4).claim(owner="session-1")
    planned: dict[str, dict[str, Any]] = {
        "lease.release": {"name": "nightly-import"},
        "slot.release": {"pool": "tuner", "slot": "1"},
        "gate.open": {"name": "dot_config", "seconds": 60},
        "schema.migrate": {},
        "lock.end": {"pid": 1},
    }
    for name, values in planned.items():
        outcome = operator.run(client, name, values, dry_run=True, **JANE)
        assert (outcome.dry_run, outcome.fence, outcome.entry) == (True, None, None)
        assert outcome.changes or name in ("schema.migrate", "lock.end")
    assert [each.name for each in client.leases.list()] == ["@slot:tuner:1", "nightly-import"]
    assert client.audit.list() == []
    done = invoke(*at(either, "do", "lease.release", "nightly-import", "--dry-run", *BY_JANE))
    assert (done.returncode, done.stderr) == (0, "dry run: nothing was changed\n")
    assert "held by worker-1" in done.stdout
    assert client.leases.get("nightly-import") is not None


def test_a_dry_run_refuses_what_the_run_would(client: holdfast.Client) -> None:
    with client.gate("dot_config", actor="joe", reason="why"):
        for dry_run in (True, False):
            with pytest.raises(holdfast.PolicyDenied, match="was opened by joe for its own work"):
                operator.run(client, "gate.close", {"name": "dot_config"}, dry_run=dry_run, **JANE)
            with pytest.raises(holdfast.NotAcquired, match="is held by joe"):
                operator.run(client, "gate.open", {"name": "dot_config", "seconds": 9}, dry_run=dry_run, **JANE)


WITHOUT: list[dict[str, Any]] = [
    {"actor": ""}, {"reason": ""}, {"reason": "  "}, {"actor": "a\nb"}, {"actor": None}, {"reason": "x" * 1001}
]  # fmt: skip


def test_without_actor_or_reason_nothing_happens(client: holdfast.Client) -> None:
    """Not even on a dry run, and not on an empty database either, where tables would come first."""
    client.lease("nightly-import").acquire()
    for given, dry_run in product(WITHOUT, (True, False)):
        with pytest.raises(ValueError, match=r"^(actor|reason) must"):
            operator.run(client, "lease.release", {"name": "nightly-import"}, dry_run=dry_run, **{**JANE, **given})
    assert client.leases.get("nightly-import") is not None
    assert client.audit.list() == []


@pytest.mark.parametrize(
    ("name", "values", "wanted"),
    [
        ("lease.burn", {}, "there is no command"),
        ("lease.release", {}, "needs 'name'"),
        ("lease.release", {"name": "x", "force": 1}, "has no parameter 'force'"),
        ("lease.release", {"name": None}, "name must be a string, not None"),
        ("lease.release", {"name": ""}, "name must have 1 to 200 characters, not 0"),
        ("lease.release", {"name": "a\nb"}, "name must not contain control characters"),
        ("lock.end", {"pid": "x"}, "pid must be an integer"),
        ("lock.end", {"pid": 7.9}, "pid must be an integer from 1 to 2147483647, not 7.9"),
        ("lock.end", {"pid": True}, "pid must be an integer"),
        ("gate.open", {"name": "x" * 181, "seconds": 60}, "name must have 1 to 180 characters, not 181"),
        ("gate.open", {"name": "x", "seconds": 0.5}, "seconds must be a number from 1 to 86400, not 0.5"),
        ("gate.open", {"name": "x", "seconds": "inf"}, "seconds must be a number"),
        ("leader.resign", {"name": "x", "wait": "nan"}, "wait must be a number from 0 to 86400, not 'nan'"),
        ("slot.release", {"pool": "x", "slot": 0}, "slot must be an integer from 1"),
        ("schema.revert", {"to": -1}, "to must be an integer from 0, not -1"),
    ],
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_wrong_parameters_are_named_before_anything_is_written(
    tmp_path: Path, name: str, values: dict[str, Any], wanted: str, dry_run: bool
) -> None:
    with holdfast.Client(f"sqlite:///{tmp_path / 'app.db'}") as client:
        with pytest.raises(ValueError, match=wanted):
            operator.run(client, name, values, dry_run=dry_run, **JANE)
        assert list(tmp_path.iterdir()) == []


def test_without_a_record_nothing_happens(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with holdfast.Client(either) as other:
        other.lease("nightly-import", ttl=60).acquire()
        monkeypatch.setenv("HOLDFAST_FAILPOINTS", "before:audit_begin=error")
        with holdfast.Client(either) as client:
            with pytest.raises(holdfast.EngineError):
                operator.run(client, "lease.release", {"name": "nightly-import"}, **JANE)
            with pytest.raises(holdfast.EngineError), client.gate("x", **JANE):
                pytest.fail("nothing runs")
        assert [each.name for each in other.leases.list()] == ["nightly-import"]


def test_more_changes_than_the_audit_has_room_for_are_counted(
    client: holdfast.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))

    @operator.command("a.large", gate="large", subject="all", destructive=True)
    def large(window: operator.Window) -> Any:
        """Change much."""
        yield ["\N{GRINNING FACE}" * 450] * 700

    assert len(operator.run(client, "a.large", **JANE).changes) == 700
    [entry] = entries(client, "a.large")
    assert (entry.outcome, len(entry.detail["changes"]), entry.detail["changes"][-1]) == ("done", 501, "and 200 more")


def test_one_operator_at_a_time_and_a_refusal_is_recorded(
    client: holdfast.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.commands.execute._RUNTIME_TIMEOUT", 0.1)
    client.lease("nightly-import").acquire()
    with client.gates.runtime(), pytest.raises(holdfast.NotAcquired):
        operator.run(client, "lease.release", {"name": "nightly-import"}, **JANE)
    with client.gate("leases", actor="joe", reason="x"), pytest.raises(holdfast.NotAcquired):
        operator.run(client, "lease.release", {"name": "nightly-import"}, **JANE)
    with pytest.raises(operator.CommandRefused, match="lease 'other' is not held"):
        operator.run(client, "lease.release", {"name": "other"}, **JANE)
    assert client.leases.get("nightly-import") is not None
    assert [(each.outcome or "").partition(":")[0] for each in entries(client, "lease.release")] == ["refused"] * 3


def test_a_lease_that_passed_on_since_it_was_looked_at_is_left_alone(
    client: holdfast.Client, either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the fence of the plan is released."""
    client.lease("nightly-import", holder="one", reenter="secret").acquire()
    apply = execute._apply

    def apply_late(*arguments: Any) -> None:
        with holdfast.Client(either) as other:  # the same holder once more, with a higher fence
            other.lease("nightly-import", holder="one", reenter="secret", ttl=60, auto_renew=False).acquire()
            apply(*arguments)
            assert other.leases.get("nightly-import") is not None

    monkeypatch.setattr(execute, "_apply", apply_late)
    with pytest.raises(holdfast.LeaseLost, match="list the leases and try again"):
        operator.run(client, "lease.release", {"name": "nightly-import"}, **JANE)
    assert entries(client, "lease.release")[0].outcome.startswith("refused: ")
    assert client.leases.history("nightly-import")[0].outcome != "forced"


def test_break_glass_ends_the_runtime_lease_itself_and_nothing_else(either: str, client: holdfast.Client) -> None:
    """An operator hangs with the runtime lease and the gate: both are ended without them, one after the other."""
    stuck = client.gates.runtime(ttl=300).acquire()
    with pytest.raises(operator.CommandRefused, match="break-glass"):
        operator.run(client, "lease.release", {"name": operator.RUNTIME}, dry_run=True, **JANE)
    for name, values in (("lease.release", {"name": "nightly-import"}), ("schema.migrate", {})):
        with pytest.raises(holdfast.PolicyDenied, match="break-glass is only for"):
            operator.run(client, name, values, break_glass=True, **JANE)
    output = printed(*at(either, "do", "lease.release", operator.RUNTIME, "--break-glass", *BY_JANE))
    assert "is released" in output
    assert client.leases.get(operator.RUNTIME) is None
    window = client.gate("leases", actor="joe", reason="hangs")
    window.__enter__()
    for gate in ("leases", "dot_config"):
        with pytest.raises(operator.CommandRefused, match="break-glass"):
            operator.run(client, "lease.release", {"name": f"@gate:{gate}"}, dry_run=True, **JANE)
    operator.run(client, "lease.release", {"name": "@gate:leases"}, break_glass=True, **JANE)
    client.lease("nightly-import").acquire()
    operator.run(client, "lease.release", {"name": "nightly-import"}, **JANE)
    first, second = reversed(entries(client, "break-glass lease.release"))
    assert (first.subject, first.outcome, second.subject) == (operator.RUNTIME, "done", "@gate:leases")
    assert first.fence > stuck.fence
    assert [each.subject for each in entries(client, "gate.window")].count(operator.BREAK_GLASS) == 2


def test_a_wipe_without_the_guard_with_a_stale_one_and_with_the_real_one(client: holdfast.Client, either: str) -> None:
    with holdfast.Client(either) as other:
        guard = client.guard("key", ttl=600, renew_every=100)
        kept = other.lease("a", ttl=60).acquire()
        other.slots("tuner", 4).claim(owner="s")
        before = [(each.name, each.fence) for each in client.leases.list()]
        for not_held in (None, guard):
            with pytest.raises(holdfast.PolicyDenied, match="needs a guard that is held"):
                client.leases.wipe(not_held)
        stale = client.lease("key").acquire()
        stale.release()
        with pytest.raises(holdfast.LeaseLost, match="nothing is wiped"):
            client.leases.wipe(stale)
        later = other.lease("key").acquire()
        with pytest.raises(holdfast.LeaseLost, match="nothing is wiped"):
            client.leases.wipe(stale)
        with pytest.raises(holdfast.PolicyDenied, match="lease 'key' is not the lease of a guard: nothing is wiped"):
            client.leases.wipe(later)
        later.release()
        assert [(each.name, each.fence) for each in client.leases.list()] == before
        kept.check()
        with guard as grant:
            assert client.leases.wipe(guard, prefix="b") == 0
            assert client.leases.wipe(guard, prefix="a") == 1
            assert client.leases.wipe(guard) == 1
            assert client.leases.wipe(grant) == 0
            assert [each.name for each in client.leases.list()] == ["key"]
            with pytest.raises(holdfast.LeaseLost):
                kept.renew()
        [ended] = client.leases.history("a")
        assert (ended.outcome, ended.actor, ended.reason) == ("forced", grant.holder, "wiped under guard 'key'")


def test_a_wipe_never_takes_other_guards_electors_or_gates(client: holdfast.Client, either: str) -> None:
    with holdfast.Client(either) as other:
        guard = client._guard_lease("key", ttl=600).acquire()
        kept = [other._guard_lease("second guard", ttl=600).acquire()]
        elector = other.lease("elector", ttl=600)
        elector._terms = elector._terms._replace(kind="elector")
        kept += [elector.acquire(), other.gates.open("door", seconds=600, **JANE)]
        other.lease("plain", ttl=600).acquire()
        other.slots("tuner", 4).claim(owner="s")
        assert {each.kind for each in client.leases.list()} == {"guard", "elector", "gate", "slot", "plain"}
        assert client.leases.wipe(guard) == 2
        assert {each.name for each in client.leases.list()} == {"key", *(grant.name for grant in kept)}
        [entry] = [each for each in client.audit.list() if each.action == "lease_wipe"]
        assert (entry.subject, entry.fence, entry.detail) == ("key", guard.fence, {"ended": 2, "prefix": ""})


def test_a_guard_taken_over_in_the_middle_of_a_wipe_is_not_possible(postgres_url: str) -> None:
    """Its row is locked until the wipe is committed, and the wipe waits for protected transactions."""
    with holdfast.Client(postgres_url) as client, closing(psycopg.connect(postgres_url)) as mine:
        guard = client._guard_lease("key", ttl=60).acquire()
        work = client.lease("work", ttl=60).acquire()
        work.protect(mine)
        wiped: list[int] = []
        thread = threading.Thread(target=lambda: wiped.append(client.leases.wipe(guard)))
        thread.start()
        assert client.leases.get("work") is not None
        mine.commit()
        thread.join(PATIENCE)
        assert wiped == [1]


def test_the_wipe_command_needs_a_guard_that_is_held_and_proven(client: holdfast.Client, either: str) -> None:
    """A name that is not held is no guard, and neither is one that another holder has."""
    work = client.lease("a").acquire()
    stale = client.lease("key").acquire()
    stale.release()
    names = ["a", "key"]
    with client.guard("key", ttl=600, renew_every=100) as grant:
        wrong = [("unused", grant.token), ("key", stale.token), ("key", str(uuid4())), ("a", grant.token)]
        for guard, token in [*wrong, ("key", "no token"), ("@gate:x", grant.token)]:
            with pytest.raises(operator.CommandRefused, match="nothing is wiped"):
                operator.run(client, "lease.wipe", {"guard": guard, "token": token}, **JANE)
        with pytest.raises(operator.CommandRefused, match="nothing is wiped"):
            operator.run(client, "lease.wipe", {"guard": "key", "token": stale.token}, dry_run=True, **JANE)
        with pytest.raises(ValueError, match="needs 'token'"):
            operator.run(client, "lease.wipe", {"guard": "key"}, **JANE)
        assert [each.name for each in client.leases.list()] == names
        assert work.renew()
        plan = operator.run(client, "lease.wipe", {"guard": "key", "token": grant.token}, dry_run=True, **JANE)
        assert [line.partition(",")[0] for line in plan.changes] == ["lease 'a'"]
        assert [each.name for each in client.leases.list()] == names
        for words, reason in (((), "HOLDFAST_TOKEN is not set"), (("--token", grant.token), "No such option")):
            done = call(*at(either, "do", "lease.wipe", "key", *words, *BY_JANE))
            assert (done.returncode, reason in done.stderr) == (2, True), "no secret is among the arguments"
        printed(*at(either, "do", "lease.wipe", "key", *BY_JANE), HOLDFAST_TOKEN=grant.token)
        assert [each.name for each in client.leases.list()] == ["key"]
    records = entries(client, "lease.wipe")
    assert [each.outcome.partition(":")[0] for each in records] == ["done", *["refused"] * 6]
    assert {each.detail["parameters"]["token"] for each in records} == {"***"}, "the proof is a secret"


def test_a_guard_lost_between_the_look_and_the_wipe_wipes_nothing(
    client: holdfast.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, guard = client.lease("a").acquire(), client._guard_lease("key").acquire()
    apply = execute._apply

    def apply_late(*arguments: Any) -> None:
        guard.release()
        apply(*arguments)

    monkeypatch.setattr(execute, "_apply", apply_late)
    with pytest.raises(holdfast.LeaseLost, match="nothing is wiped"):
        operator.run(client, "lease.wipe", {"guard": "key", "token": guard.token}, **JANE)
    assert work.renew()
    assert entries(client, "lease.wipe")[0].outcome.startswith("refused: ")


def test_a_slot_is_taken_from_its_owner(client: holdfast.Client) -> None:
    grant = client.slots("tuner", 4).claim(owner="session-1")
    operator.run(client, "slot.release", {"pool": "tuner", "slot": grant.slot}, **JANE)
    assert client.slots("tuner", 4).in_use() == 0
    with pytest.raises(operator.CommandRefused, match="is not held"):
        operator.run(client, "slot.release", {"pool": "tuner", "slot": 3}, **JANE)


def test_a_command_registered_elsewhere_is_a_command_like_any_other(
    client: holdfast.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))

    @operator.command(
        "session.expel", gate="sessions", subject="{id}", destructive=True, id=operator.Parameter("the session")
    )
    def cancel(window: operator.Window, *, id: str) -> Any:
        """Cancel a session."""
        yield [f"session {id} is cancelled"]
        window.client.gates.require("sessions")

    assert operator.run(client, "session.expel", {"id": "s-1"}, **JANE).changes == ["session s-1 is cancelled"]
    assert operator.check()["session.expel"] == []


def test_the_commands_are_listed_with_what_they_declare() -> None:
    declared = valid("commands", ask("commands", "--json"))
    assert {each["name"] for each in declared} >= {
        "lease.release", "lease.wipe", "leader.resign", "lock.end", "gate.open", "gate.close", "slot.release",
        "schema.migrate", "schema.revert", "operation.reset", "operation.replay", "operation.rollback",
        "operation.complete", "wal.verify", "wal.archive",
    }  # fmt: skip
    assert all(each["gate"] and each["summary"] for each in declared)
    listed = printed("commands")
    assert all(each["name"] in listed for each in declared)
    assert json.dumps(declared) == json.dumps(sorted(declared, key=lambda each: each["name"]))


def test_the_command_line_changes_others_work_through_these_commands_alone() -> None:
    """Methods that release, end or wipe are called in holdfast.commands, and nowhere in the command line."""
    governed = {"force_release", "recall", "end_session", "wipe", "open", "close", "up", "down", "migrate", "reset"}
    governed |= {"rollback", "complete", "archive"}
    calls = set()
    for file in (ROOT / "src/holdfast/cli").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in governed:
                owner = ast.unparse(node.value)
                if owner.endswith(("leases", "locks", "gates", "migrations", "operations", "client")):
                    calls.add(f"{file.name}: {owner}.{node.attr}")
    assert calls == {"run.py: client.leases.wipe"}, "except for the guard's own wipe, under its own lease"


def test_nothing_is_left_at_rest(either: str) -> None:
    with holdfast.Client(either) as client:
        operator.run(client, "schema.migrate", **JANE)
    assert rows(either) == NONE
    dot = "_" if either.startswith("sqlite") else "."
    assert query(either, f"select count(*) from holdfast{dot}audit where outcome is null") == [(0,)]
