"""An object that a user holds shows what the reference documents, and nothing else.

A member that only holdfast uses begins with an underscore. A new public one goes into ``PUBLIC`` and the reference.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import holdfast

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGES = ("python.md", "operations.md")

GRANT = "name holder token fence lost check remaining renew release protect transaction detach"
HANDLE = "name acquire try_acquire or_skip"
PUBLIC = {
    "client Client": "lease lock operation guard gate slots elector reconciler shards relay schedule every schedules "
    "leases locks objects "
    "operations reviews policies gates relays audit migrations migrate read_only release_on_exit doctor close",
    "lease.handle Lease": f"{HANDLE} adopt",
    "lease.grant LeaseGrant": GRANT,
    "lease.admin Leases": "list get history force_release recall raise_fences probe wipe",
    "lock.handle Lock": HANDLE,
    "lock.handle Skip": "",
    "lock.handle LockGrant": "name lost check release",
    "lock.monitor LockMonitor": "list end_session",
    "lock.file_lock FileLock": "path acquire try_acquire or_skip",
    "lock.file_lock FileGrant": "path read_text read_bytes write_text write_bytes check release",
    "objects.objects Objects": "put_if delete_if update get get_by_name list cursor watch",
    "objects.watch ObjectWatch": "begin next cursor close",
    "recipes.elector Elector": "name holder run stop resign status",
    "recipes.elector Term": "name holder fence stopping gained lost check remaining protect transaction grant_for",
    "recipes.guard Guard": "name token",
    "recipes.guard GuardGrant": GRANT,
    "recipes.slots Slots": "pool capacity slot claim adopt release in_use owners reconcile forget "
    "invariant_violation_total",
    "recipes.slots SlotClaim": HANDLE,
    "recipes.slots Slot": f"{GRANT} slot owner",
    "recipes.gate GateLease": f"{HANDLE} adopt",
    "recipes.gate GateWindow": "",
    "recipes.gate Gates": "require list open close runtime",
    "recipes.shards Shards": "name holder members stopping gained held shard_of grant_for stop",
    "recipes.reconciler Reconciler": "run exclusive status",
    "recipes.reconciler_rules ReconcilerRules": "status merge phase orphan",
    "schedules.schedule Schedule": "name run run_due stop",
    "schedules.schedule ScheduleSlot": "name time attempt previous tx stopping grant lost check note",
    "schedules.schedules Schedules": "run list runs pause resume run_now skip remove",
    "lineage.relay Relay": "run step stop status",
    "lineage.relays Relays": "list parked retry remove events verify",
    "governance.audit Audit": "list begin note end",
    "operations.operation Operation": "run",
    "operations.op Op": "key attempt fence status replayed result checkpoints effect_started checkpoint emit done lost "
    "check",
    "operations.operations Operations": "get list run_many register recover complete reset rollback find find_run "
    "match history read replay verify archive expire health",
    "operations.outcome Outcome": "status replayed attempt committed value error result",
    "operations.reviews Reviews": "list get approve reject",
    "governance.policies Policies": "get list changes apply",
    "database.migrate Migrations": "version status scripts text up down governed foundation",
    "lease.records LeaseRecord": "name kind holder fence acquired_at expires_at host pid info remaining waiting",
    "lease.records HistoryRecord": "name holder role host pid fence acquired_at ended_at outcome actor reason",
    "lock.records LockRecord": "pid holder application_name state query_start namespace entity_id name mode granted "
    "held_since duration waiting blocked_by role label as_dict",
    "objects.model ObjectRecord": "type id name payload labels version created_at updated_at",
    "governance.audit_record AuditRecord": "id at actor role action subject reason fence detail outcome ended_at",
    "lineage.records RelayRecord": "name holder told entries lag parked problem since moved_at fence cursor",
    "lineage.records ParkedRecord": "id key event problem tries parked_at again",
    "schedules.records ScheduleRecord": "name every zone paused next_slot overdue running last",
    "schedules.records ScheduleRun": "slot status reason attempt owner started_at ended_at note until count lateness",
    "recipes.elector_terms ElectorStatus": "name holder state leader leading since transitions renewed_ago fence",
}
"""By module and class: the public members. An ``AsyncX`` in ``x_async`` has those of its ``X``."""


def classes_of(entry: str) -> list[type]:
    """The class and, where there is one, its async flavour."""
    module, name = entry.split()
    flavours = [getattr(importlib.import_module(f"holdfast.{module}"), name)]
    if (Path(holdfast.__file__).parent / f"{module.replace('.', '/')}_async.py").exists():
        flavours.append(getattr(importlib.import_module(f"holdfast.{module}_async"), f"Async{name}"))
    return flavours


def members_of(cls: type, package: str = "holdfast.") -> set[str]:
    """The members without an underscore that the package defines: of the class, of its bases, and of ``self``."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith(package):
            names |= vars(base).keys() | inspect.get_annotations(base).keys() | assigned_to_self(base)
    return {name for name in names if not name.startswith("_")}


def assigned_to_self(cls: type) -> set[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def documented() -> set[str]:
    """Every word of the reference that stands in backticks or in a block of code."""
    text = "\n".join((REFERENCE / page).read_text(encoding="utf-8") for page in PAGES)
    blocks = re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return set(re.findall(r"\w+", "\n".join([*blocks, *spans])))


@pytest.mark.parametrize("entry", PUBLIC)
def test_what_a_user_holds_has_the_members_that_are_documented(entry: str) -> None:
    expected = set(PUBLIC[entry].split())
    for cls in classes_of(entry):
        assert members_of(cls) == expected, cls
    assert expected - documented() == set()


class Base:
    in_class = 1
    annotated: int

    def method(self) -> None:
        self.of_self, self._hidden = 1, 2

    @property
    def computed(self) -> int:
        return 1

    def _internal(self) -> None: ...


class Derived(Base):
    def added(self) -> None: ...


def test_a_member_without_an_underscore_is_seen_wherever_it_is_defined() -> None:
    assert members_of(Derived, __name__) == {"in_class", "annotated", "method", "of_self", "computed", "added"}
    assert members_of(Derived) == set(), "not of holdfast"
