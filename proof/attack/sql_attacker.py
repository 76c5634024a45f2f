"""A worker's role in SQL, in the schema of a gateway: it acts on leases of others, and calls every function with forged
values. It writes no records of the types that are the gateway's."""

import random
import secrets
from collections.abc import Callable
from typing import Any

import psycopg

import holdfast
from proof.attack.tally import Tally

VICTIMS = ("payroll", "import")
_TEXTS = (
    "", "a", "payroll", "holdfast:runtime", "@gate:x", "@slot:default:1", "gateway:reconciler", "gateway:replica:x",
    "@sandbox", "@agent", "@session",
    "x" * 200, "x" * 201, "x" * 100_000,
    "\x01", "\u202e", "'; drop table holdfast.lease; --", "{}", "[]", '{"a": 1', "null",
    "1e999",
    '{"info": [1]}', '{"host": "' + "h" * 5000 + '"}', "[" * 3000, "\\x00ff", "0" * 64, "success", "NaN",
    "../../etc/passwd", "%s%n",
)  # fmt: skip
_VALUES: dict[str, tuple[Any, ...]] = {
    "text": _TEXTS, "text[]": ([], ["a"], ["x" * 1000] * 100, [""] * 1000),
    "integer": (-1, 0, 1, 2**31 - 1, -(2**31)), "bigint": (-1, 0, 1, 2**63 - 1, -(2**63)),
    "smallint": (-1, 0, 2**15 - 1),
    "double precision": (-1.0, 0.0, 1.0, 1e308, float("nan"), float("inf"), 86400.0), "boolean": (True, False),
    "uuid": ("00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"),
    "jsonb": ("{}", "[]", "null", '{"info": [1]}', '"x"', "1e400", '{"host": 5}', '[{"key": "a"}]'), "bytea": (b"",
    b"\0" * 1000),
    "oid": (0, 1, 2**32 - 1), "xid8": ("0", "18446744073709551615"), "pg_snapshot": ("1:1:",
    "1:9223372036854775807:"),
}  # fmt: skip
_DENIED = (
    "select token from holdfast.lease", "select * from holdfast.beat", "select * from holdfast.object",
    "delete from holdfast.audit",
    "update holdfast.lease set holder = 'me'", "truncate holdfast.object", "drop schema holdfast cascade",
    "create table holdfast.x (a int)",
    "create or replace function holdfast.purge() returns integer language sql as 'select 1'", "set role postgres",
    "set session authorization postgres", "alter function holdfast.purge() owner to current_user",
    "set session_replication_role = replica",
    "copy (select 1) to program 'id'", "select pg_read_file('/etc/passwd')",
    "alter table holdfast.lease disable trigger all",
    "grant execute on all functions in schema holdfast to public",
    "do $$ begin lock table holdfast.lease in access exclusive mode; end $$",
    "select holdfast.lease_force_release('payroll', 'me', 'because')",
    "select holdfast.lease_force_release_if('payroll', 1, 'me', 'because')",
    "select holdfast.lease_recall('payroll', 1, 'me', 'because')", "select holdfast.audit_begin('a', 'b', 'c', 'd')",
    "select holdfast.audit_list()", "select holdfast.gate_open('x', 60, 'me', 'because')",
    "select holdfast.fence_raise(1, 1)", "select holdfast.lease_acquire('gateway:reconciler', 'me', 60)",
    "select holdfast.elector_acquire('gateway:reconciler', 'me', 60)",
    "select holdfast.lease_try('gateway:supervisor:own', 'me', gen_random_uuid(), 60)",
    "select holdfast.object_list('@session')",
    "select holdfast.policy_apply('{}', 'me', 'because')", "select holdfast.review_decide(1, 'approved', 'me', '')",
)  # fmt: skip
_THEFTS = (
    "select status from holdfast.lease_acquire(%(name)s, %(holder)s, 60)",
    "select status from holdfast.lease_acquire(%(name)s, %(holder)s, 60, reenter => %(guess)s)",
    "select status from holdfast.lease_acquire(%(name)s, %(holder)s, 60, token => %(guess)s)",
    "select holdfast.lease_release(%(name)s, %(holder)s, %(guess)s)",
    "select holdfast.lease_renew(%(name)s, %(guess)s)",
    "select holdfast.lease_abandon(%(name)s, %(guess)s)", "select holdfast.lease_protect(%(name)s, %(guess)s)",
    "select holdfast.lease_try(%(name)s, %(holder)s, %(guess)s, 60)", "select holdfast.lease_clear(%(name)s)",
    "select holdfast.lease_protect_proven(%(name)s, %(guess)s, false)",
)  # fmt: skip


class SqlAttacker:
    """``owner_url``: as the role whose leases are to be stolen. ``worker_url``: as the attacker."""

    STRIKES = 60
    """In a round."""

    def __init__(self, owner_url: str, worker_url: str, tally: Tally, random: random.Random) -> None:
        self._tally, self._random = tally, random
        self._owner = holdfast.Client(owner_url)
        self._grants = {name: self._owner.lease(name, ttl=600).acquire() for name in VICTIMS}
        tally.add_secrets(*(grant.token for grant in self._grants.values()))
        self._worker = psycopg.connect(worker_url, autocommit=True)
        self._worker.execute("set statement_timeout = '5s'; set lock_timeout = '1s'")
        self._functions = self._worker.execute(
            "select p.proname, array(select format_type(t, null) from unnest(p.proargtypes) with ordinality as x(t, at)"
            " order by at), p.pronargdefaults"
            " from pg_proc p where p.pronamespace = 'holdfast'::regnamespace and p.prorettype <> 'trigger'::regtype"
            " and has_function_privilege(p.oid, 'execute') order by p.oid"
        ).fetchall()  # fmt: skip
        self.attacks: list[Callable[[], None]] = [self.steal, self.exceed_rights, self.call_with_forged_values]

    def close(self) -> None:
        for name, grant in self._grants.items():
            if not self._owner.leases.get(name) or not grant.renew():
                self._tally.report(f"worker: the lease {name!r} was lost")
        self._owner.close()
        self._worker.close()

    def steal(self) -> None:
        name = self._random.choice(VICTIMS)
        statement = self._random.choice(_THEFTS)
        holder = self._random.choice([self._grants[name].holder, "thief"])
        answer = self._execute("theft", statement, {"name": name, "holder": holder, "guess": secrets.token_hex(16)})
        if answer and answer[0][0] not in (False, None, "held", "busy", "taken", "refused"):
            self._tally.report(f"worker: {statement} on {name!r} was answered with {answer!r:.200}")

    def exceed_rights(self) -> None:
        statement = self._random.choice(_DENIED)
        if self._execute("beyond its rights", statement) is not None:
            self._tally.report(f"worker: {statement} was allowed")

    def call_with_forged_values(self) -> None:
        name, types, defaults = self._random.choice(self._functions)
        given = types[: len(types) - self._random.randrange(defaults + 1)]
        values = [self._value(each) for each in given]
        places = ", ".join(f"%s::{each}" for each in given)
        self._execute("forged values", f"select * from holdfast.{name}({places})", values)

    def _value(self, type: str) -> Any:
        if self._random.random() < 0.1:
            return None
        return self._random.choice(_VALUES.get(type, ("",)))

    def _execute(self, kind: str, statement: str, values: Any = None) -> list[Any] | None:
        """The rows; None when the statement was refused. Errors inside the server are violations."""
        try:
            cursor = self._worker.execute(statement.encode(), values)
            rows = cursor.fetchmany(1000) if cursor.description else []
            answer, text = "answered", repr(rows)
        except psycopg.Error as error:
            rows, answer, text = None, error.sqlstate or type(error).__name__, str(error)
            if (answer[:2] in ("XX", "58", "57") and answer != "57014") or self._worker.closed:
                self._tally.report(f"worker: {statement} with {values!r:.300} failed: {error}")
        self._tally.note(f"worker: {kind}", answer)
        self._tally.check_secrets("worker", statement, text.encode())
        return rows
