"""A lease knows its kind, and a name of holdfast's own is taken by nothing but the function of its kind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.errors import InvalidParameterValue

import holdfast
from tests.conftest import migrated
from tests.lineage.recording_sink import RecordingSink
from tests.pairs import EACH_ONCE
from tests.raw_session import Raw, acquisition

Connect = Callable[..., Any]
RESERVED = ["@gate:door", "@slot:gpu:1", "@op:1f", "@relay:r", "@", "@other", "holdfast:runtime", "holdfast:x"]
OWN = {
    "gate": ["@gate:door", "holdfast:runtime"], "operation": ["@op:1f"], "relay": ["@relay:r"],
}  # fmt: skip


@EACH_ONCE
def test_a_listed_lease_has_the_kind_of_what_took_it(connect: Connect, either: str) -> None:
    kinds: dict[str, str] = {}
    client, sink = connect(either), RecordingSink()
    with holdfast.Client(either) as observer:

        def look(*_: Any) -> None:
            kinds.update({record.name.partition(":")[0]: record.kind for record in observer.leases.list()})

        async def look_async(*_: Any) -> None:
            look()

        client.lease("import").acquire()
        client.slots("gpu", 1).claim()
        client.gates.open("door", seconds=60, actor="jane", reason="why")
        client.elector("leader").run(look if isinstance(client, holdfast.Client) else look_async)
        client.operation("charge").run(look)
        with client.gates.runtime():
            look()
        sink.after = look
        client.relay("catalogue", sink).step()
        with observer.guard("guard"):  # for the main thread only
            look()
    assert kinds == {
        "import": "plain", "@slot": "slot", "@gate": "gate", "leader": "elector", "@op": "operation",
        "holdfast": "gate", "@relay": "relay", "guard": "guard",
    }  # fmt: skip


def test_a_reserved_name_is_refused_to_every_other_kind(either: str) -> None:
    """Past the client, which refuses it before it asks the database."""
    with closing(Raw(migrated(either))) as raw:
        for kind in ("lease", "guard", "elector"):
            for name in RESERVED:
                with pytest.raises(holdfast.Refused, match="name must not begin with '@' or 'holdfast:'") as refused:
                    raw.call(f"{kind}_acquire", **acquisition(name))
                assert (name in str(refused.value), refused.value.sqlstate) == (True, "22023")
        for kind, own in OWN.items():
            for name in {"import", "holdfast", *RESERVED}.difference(own):
                with pytest.raises(holdfast.Refused, match=f"a lease of kind {kind} cannot have the name '{name}'"):
                    raw.call(f"{kind}_acquire", **acquisition(name))
        assert (raw.rows("lease"), raw.rows("beat")) == ([], [])
        for pool in ("import", "@gate:door", "holdfast:runtime"):
            assert raw.call("slot_claim", pool=pool, capacity=1, **acquisition(""))[0]["name"] == f"@slot:{pool}:1"
        if either.startswith("postgres"):  # a window needs an entry
            raw.call("audit_begin", action="gate.window", subject="door", actor="jane", reason="a test", detail=None)
        for kind, own in OWN.items():
            for name in own:
                assert raw.call(f"{kind}_acquire", **acquisition(name))[0]["status"] == "acquired"


def test_the_claim_of_an_operation_takes_no_other_name(postgres_url: str) -> None:
    claim = "k\x1f1\x1flock_acquired\x1e{}\x1f\x1ffalse\x1f\x1fk" + 6 * "\x1f"
    statement = "select * from holdfast.operation_claim(%s, %s, 'me', 30, %s, null, 0, true, null, null)"
    with psycopg.connect(postgres_url, autocommit=True) as mine:
        for name in ("import", "@gate:door", "@relay:r", "holdfast:runtime"):
            with pytest.raises(InvalidParameterValue, match=f"a lease of kind operation cannot have the name '{name}'"):
                mine.execute(statement, [claim, name, uuid4()])
        assert mine.execute("select from holdfast.lease union all select from holdfast.idempotency_log").rowcount == 0
