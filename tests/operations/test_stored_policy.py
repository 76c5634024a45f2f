"""The policy that is stored in the database: clients that know nothing of it follow it, and what writes the log without
them does not get past it."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import PolicyDenied
from holdfast.governance import Policy
from holdfast.keys import lock_key
from holdfast.operations.log import encode_entry, hash_prefix, link_entries
from tests.children import query
from tests.operations.policies import WAYS, connected, fail, key, runs

RULES: dict[str, dict[str, Any]] = {
    "graves*": {"sovereign": True, "may_reset": ["elder*"]},
    "burials*": {"sensitive": True, "requires": ["checksum", "bucket"]},
    "roads*": {"review": True, "four_eyes": True},
    "flaky*": {"error_budget": 1},
    "50%_*": {"requires": ["version"]},
}
BY_JANE: dict[str, Any] = {"actor": "jane", "reason": "the council agreed"}


def store(url: str, rules: dict[str, dict[str, Any]] = RULES) -> int:
    with holdfast.Client(url) as client:
        return client.policies.apply(rules, **BY_JANE)


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_was_made_without_a_policy_follows_the_stored_one(either: str, way: str) -> None:
    """Also one that is older than the policy, and has run an operation before."""
    with holdfast.Client(either) as client, connected(either) as mine:
        run = runs(way, mine)
        assert run(client, key("burials-0"), int).result == 0
        version = store(either)
        whole: dict[str, Any] = {"checksum": "9f2c", "bucket": "monday"}
        with pytest.raises(PolicyDenied, match="requires bucket: give bucket= of its OperationKey"):
            run(client, key("burials-1", checksum="9f2c"), fail, justification="agreed")
        with pytest.raises(PolicyDenied, match="needs a justification"):
            run(client, key("burials-1", **whole), fail)
        assert run(client, key("burials-1", **whole), int, justification="agreed").result == 0
        with pytest.raises(PolicyDenied, match="the same was done to it under another key"):
            run(client, key("burials-1", "again", **whole), fail, justification="agreed")
        assert run(client, key("50%_off", version="1"), int).result == 0
        assert run(client, key("50xyoff"), int).result == 0, "a pattern has no wildcards but * and ?"

        roads = key("roads-1")
        with pytest.raises(PolicyDenied, match="requires actor"):
            run(client, roads, fail)
        with pytest.raises(PolicyDenied, match="needs an approved review") as told:
            run(client, roads, fail, actor="joe")
        assert told.value.review is not None
        with pytest.raises(PolicyDenied, match="four eyes: 'joe' asked"):
            client.reviews.approve(told.value.review, actor="joe", reason="I want it")
        client.reviews.approve(told.value.review, **BY_JANE)
        with pytest.raises(PolicyDenied, match="needs an approved review") as others:
            run(client, roads, fail, actor="jane")
        client.reviews.approve(others.value.review or 0, actor="elder Mary", reason="another actor")
        with pytest.raises(ValueError, match="broken"):
            run(client, roads, fail, actor="joe")
        with pytest.raises(PolicyDenied, match="needs an approved review"):
            run(client, roads, fail, actor="joe")

        graves = key("graves-1")
        with holdfast.Client(either) as other:
            blocked = []

            def load() -> int:
                with pytest.raises(holdfast.HoldfastError) as refused:
                    other.operation(key("graves-1", "other"), when_locked="fail").run(fail)
                blocked.append(type(refused.value))
                return 7

            if way == "outside":
                assert run(client, graves, load).result == 7
                assert blocked == [holdfast.OperationInProgress], "the dataset is locked as a whole"
            else:
                assert run(client, graves, int).result == 0
        with pytest.raises(PolicyDenied, match=r"by elder\*, not by 'jane'"):
            client.operations.reset(graves, **BY_JANE)
        claims = [each.fields for each in client.operations.history(graves) if each.kind == "claimed"]
        assert [each["policy"] for each in claims] == [version]
        [claim] = [each.fields for each in client.operations.history(roads) if each.kind == "claimed"]
        assert claim["review"] == told.value.review
        assert client.operations.verify().passed


def test_a_key_with_a_given_hash_of_its_parameters_is_governed_and_verified_like_any_other(either: str) -> None:
    store(either)
    parts: dict[str, Any] = {"pipeline": "etl", "task": "load", "dataset": "burials-1", "operation": "upsert"}
    whole = {**parts, "checksum": "9f2c", "bucket": "monday"}
    known = holdfast.OperationKey(**whole, params={"srid": 4326})
    with holdfast.Client(either) as client:
        with pytest.raises(PolicyDenied, match="requires checksum"):
            client.operation(holdfast.OperationKey(**parts, params_hash=known.params_hash)).run(int)
        given = holdfast.OperationKey(**whole, params_hash=known.params_hash)
        assert client.operation(given, justification="agreed").run(lambda: 1).result == 1
        assert client.operation(known, justification="agreed").run(fail).result == 1, "the same operation"
        another = holdfast.OperationKey(**{**whole, "task": "again"}, params_hash=known.params_hash)
        with pytest.raises(PolicyDenied, match="the same was done to it under another key"):
            client.operation(another, justification="agreed").run(fail)
        record = client.operations.get(given)
        assert record is not None
        assert (record.dataset, record.label) == ("burials-1", known.label)
        assert client.operations.verify().problems == ()


def test_a_batch_of_a_client_that_knows_no_policy_follows_the_stored_one(either: str) -> None:
    store(either)
    with holdfast.Client(either) as client:
        burials = [key("burials", str(number)) for number in range(3)]
        outcomes = client.operations.run_many(burials, fail)
        assert [str(each.error) for each in outcomes if "requires checksum, bucket" in str(each.error)] != []
        assert [each.status for each in outcomes] == ["failed"] * 3
        assert client.operations.list() == []
        graves = [key("graves", str(number)) for number in range(3)]
        assert [each.status for each in client.operations.run_many(graves, str)] == ["success"] * 3
        kinds = [each.kind for each in client.operations.history(graves[2])]
        assert "sovereignty" in kinds


@pytest.mark.parametrize(
    ("either", "way"), [("sqlite", "outside"), ("postgres", "outside"), ("postgres", "own")], indirect=["either"]
)
def test_a_policy_that_is_stored_while_an_operation_runs_is_checked_at_its_end(either: str, way: str) -> None:
    """An outside effect has happened: the operation stays partial. In a transaction nothing has, and it begins anew;
    on SQLite no other process writes while that transaction is open."""
    calls: list[int] = []

    def load() -> int:
        if not calls:
            store(either)
        calls.append(1)
        return 7

    with holdfast.Client(either) as client, connected(either) as mine:
        with pytest.raises(PolicyDenied, match=r"requires .*checksum"):
            runs(way, mine)(client, key("burials"), load)
        record = client.operations.get(key("burials"))
        assert record is None if way == "own" else record is not None and record.status == "partial"
        assert len(calls) == 1


def test_the_policy_of_a_client_adds_to_the_stored_one_and_never_weakens_it(either: str) -> None:
    store(either)
    mild = Policy({"burials*": {"sensitive": False}, "graves*": {"requires": ["version"]}})
    with holdfast.Client(either, policy=mild) as client:
        with pytest.raises(PolicyDenied, match="sensitive"):
            client.operation(key("burials", checksum="1", bucket="2")).run(fail)
        with pytest.raises(PolicyDenied, match="requires version"):
            client.operation(key("graves")).run(fail)
        client.operation(key("graves", version="1")).run(int)
        assert "sovereignty" in [each.kind for each in client.operations.history(key("graves", version="1"))]


class Forger:
    """Writes the log as SQL can: the calls of the library, with whatever entries."""

    def __init__(self, client: holdfast.Client, version: int) -> None:
        self._client, self.version = client, version

    def write(
        self, key: holdfast.OperationKey, status: str, *entries: Any, owner: str | None = None, after: str | None = None
    ) -> str:
        """``after``: the pointer that the row has. Returns the one that it has then."""
        number, previous = (0, "") if after is None else (int(after.partition(":")[0]), after.partition(":")[2])
        encoded = [
            encode_entry(number, kind, 1, 0, 1.7e9, detail) for number, (kind, detail) in enumerate(entries, number + 1)
        ]
        last_hash, text = link_entries(hash_prefix(key.digest), previous, encoded)
        pointer = f"{number + len(entries)}:{last_hash}"
        row = {
            "key": key.digest, "label": key.label, "pipeline": key.pipeline, "task": key.task, "dataset": key.dataset,
            "operation": key.operation, "checksum": key.checksum, "params_hash": key.params_hash, "fingerprint": None,
            "rollback": None, "status": status, "attempt": 1, "fence": 0, "effect_started": True, "outbox": None,
            "result": None, "result_hash": None, "error": None, "keep": None, "owner": owner, "token": None,
            "lock": None, "failures": 0, "expected": after, "pointer": pointer, "number": number + 1, "entries": text,
        }  # fmt: skip
        [answer] = self._client._engine.call("operation_write", row)
        assert answer["state"] == "done"
        return pointer

    def claimed(self, **detail: Any) -> tuple[str, Any]:
        return "claimed", {"policy": self.version, **detail}


def test_an_attempt_has_one_claim_and_its_end_has_no_other_actor(either: str) -> None:
    """The claim is what was checked: a later entry that names another actor or another reason would take its place."""
    version = store(either, {"wells": {"requires": ["actor"]}})
    wells = key("wells")
    with holdfast.Client(either) as client:
        forger = Forger(client, version)
        jane, joe = forger.claimed(actor="jane"), forger.claimed(actor="joe")
        with pytest.raises(holdfast.Refused, match="attempt 1 is claimed twice"):
            forger.write(wells, "success", jane, joe, ("success", None))
        claimed = forger.write(wells, "partial", jane)
        for entries in ([joe], [joe, ("success", None)]):
            with pytest.raises(holdfast.Refused, match="attempt 1 is claimed twice"):
                forger.write(wells, "success", *entries, after=claimed)
        with pytest.raises(holdfast.Refused, match="belongs to another operation"):
            forger.write(key("roads", digest=wells.digest), "success", ("success", None), after=claimed)
        forger.write(wells, "success", ("success", None), after=claimed)


def test_nothing_that_writes_the_log_gets_past_the_stored_policy(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forged entries through the calls that SQL has, on SQLite through those that the library has."""
    version = store(either)
    done = ("success", None)
    with holdfast.Client(either) as client, holdfast.Client(either) as other:
        forger = Forger(client, version)
        claimed = forger.claimed
        burials = key("burials", checksum="9f2c")
        denied: list[tuple[holdfast.OperationKey, list[tuple[str, Any]], str]] = [
            (burials, [done], "has no entry"),
            (key("BURI\u00adALS", checksum="9f2c"), [done], "has no entry"),
            (burials, [("claimed", {"justification": "x"}), done], "checked under none"),
            (burials, [("claimed", {"policy": version + 1})], f"checked under version {version + 1}"),
            (burials, [claimed(justification=" "), done], "requires bucket, justification"),
            (key("roads"), [claimed(actor="joe"), done], "needs an approved review"),
            (key("roads"), [claimed(actor="joe", review=77), done], "needs an approved review"),
        ]
        for subject, entries, why in denied:
            with pytest.raises(holdfast.Refused, match=why) as told:
                forger.write(subject, "success", *entries)
            assert told.value.sqlstate == ("HF006" if "checked under" in why else "HF005")
        with pytest.raises(holdfast.Refused, match="has not locked it as a whole"):
            forger.write(key("graves"), "partial", claimed(), owner="@op:of-mine")
        holding = []

        def hold() -> None:
            with pytest.raises(holdfast.Refused, match="is locked by another operation"):
                forger.write(key("graves", "forged"), "success", claimed(), done)
            holding.append(1)

        other.operation(key("graves", "real")).run(hold)
        assert holding
        assert [each.task for each in client.operations.list()] == ["real"]
        forger.write(burials, "success", claimed(justification="agreed", bucket="monday"), done)
        forger.write(key("graves", "rightly"), "success", claimed(), done)
        forger.write(key("open to all"), "success", done)

        with pytest.raises(PolicyDenied) as asked:
            other.operation(key("roads"), actor="joe").run(fail)
        assert asked.value.review is not None
        other.reviews.approve(asked.value.review, **BY_JANE)
        with pytest.raises(ValueError, match="broken"):
            other.operation(key("roads"), actor="joe").run(fail)
        [row] = client._engine.call("review_return", {"id": asked.value.review}) or [{"returned": False}]
        assert not row["returned"], "an approval that an attempt has used is used up"

        monkeypatch.setattr(type(client.policies), "_refresh", lambda _: None)  # a client that does not ask
        with pytest.raises(PolicyDenied, match=r"by elder\*, not by 'jane'"):
            client.operations.reset(key("graves", "real"), **BY_JANE)
        record = client.operations.get(key("graves", "real"))
        assert record is not None
        assert record.status == "success"


WRITE = """
    select holdfast.operation_write(%(key)s, null, '1:x', 1, %(entries)s, %(status)s, 1, 1, null, null, null, null,
        null, true, 0, null, null, null, null, null, 'label', null, null, 'old_graves', 'dig', null, null, %(late)s)"""


@pytest.mark.parametrize("setting", ["standard_conforming_strings = off", "session_replication_role = replica", None])
def test_sql_writes_no_governed_row_without_the_entry_that_says_so(postgres_url: str, setting: str | None) -> None:
    """Whatever the log is given: NULL, no entries, entries of no kind, or an unclaimed success; in a batch, or in a
    transaction. The settings change how a function reads its own patterns, and whether triggers fire."""
    store(postgres_url, {"old_*": {"requires": ["actor"]}})
    unclaimed = '["",[1,"success",1,1,1,"{}",null],"x"]'
    with psycopg.connect(postgres_url, autocommit=True) as mine:
        if setting:
            mine.execute(f"set {setting}".encode())
        for entries in (None, "[]", '["success"]', '[{"1":"claimed"}]', unclaimed):
            for status in ("success", "partial"):
                for late in (False, True):
                    row = {"key": "a" * 64, "entries": entries, "status": status, "late": late}
                    with pytest.raises(psycopg.Error) as refused:
                        mine.execute(WRITE, row)
                    assert refused.value.sqlstate == ("HF005" if entries else "22023")
            end = f"|label|b||1:x|1|{entries or ''}|success|1|1||||||true|0|||||old_graves|dig|||"
            told = end.replace("|", chr(31))
            begun = "extract(epoch from transaction_timestamp())::text || %s"
            with pytest.raises(psycopg.Error) as refused:
                mine.execute(f"select holdfast.operation_end({begun})".encode(), (told,))
            assert refused.value.sqlstate == ("HF005" if entries else "22023")
            lease = "select token from holdfast.operation_acquire('@op:mine', 'me', 30)"
            many = f"""select holdfast.operation_claim_many('k', '1:x', %s, 'l', '', 'p', 't', 'old_graves', 'dig', '',
                       'h', 1, null, '@op:mine', ({lease}), null)"""
            with pytest.raises(psycopg.Error) as refused:
                mine.execute(many.encode(), (entries,))
            assert refused.value.sqlstate == ("HF005" if entries else "22023")
    with holdfast.Client(postgres_url) as client:
        assert client.operations.list() == []


def test_sql_decides_no_review_that_the_stored_policy_keeps_from_it(postgres_url: str) -> None:
    store(postgres_url)
    with holdfast.Client(postgres_url) as client:
        with pytest.raises(PolicyDenied) as told:
            client.operation(key("roads"), actor="joe").run(fail)
        decide = "select holdfast.review_decide(%s, 'approved', %s, 'yes')"
        with psycopg.connect(postgres_url) as mine, pytest.raises(psycopg.Error, match="does not let 'joe'") as error:
            mine.execute(decide, (told.value.review, "joe"))
        assert error.value.sqlstate == "HF005"


def test_the_lock_of_a_dataset_is_the_same_in_the_database_and_here(postgres_url: str) -> None:
    for dataset in ("graves", "größe €", "x" * 200):
        assert query(postgres_url, "select holdfast.dataset_lock(%s)", dataset) == [(lock_key(dataset, ""),)]


def test_a_transaction_older_than_the_policy_does_not_commit_past_it(postgres_url: str) -> None:
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url, autocommit=True) as mine:
        mine.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        calls: list[int] = []

        def load() -> None:
            if not calls:
                store(postgres_url)
            calls.append(1)

        with pytest.raises(PolicyDenied, match="requires checksum, bucket"):
            client.operation(key("burials"), tx=mine).run(load)
        assert len(calls) == 1
        assert client.operations.list() == []


def test_versions_are_kept_and_a_policy_without_rules_leaves_nothing_to_check(either: str) -> None:
    with holdfast.Client(either) as client:
        assert (client.policies.get(), client.policies.list()) == (None, [])
        first = client.policies.apply(RULES, **BY_JANE)
        assert client.policies.changes(RULES) == []
        less = {**RULES, "roads*": {"review": True}}
        del less["flaky*"]
        assert client.policies.changes(less) == [
            "dataset 'flaky*' is governed no more",
            "dataset 'roads*': four_eyes = true, review = true becomes review = true",
        ]
        with pytest.raises(holdfast.Conflict, match="not version 7 any more"):
            client.policies.apply(less, expected=7, **BY_JANE)
        wrong: dict[str, dict[str, Any]] = {"a": {"sovereing": True}, "b[1]": {}, "c": {"requires": ["cheksum"]}}
        with pytest.raises(ValueError, match=r"'a': there is no 'sovereing'.*'c': requires must be a list of actor"):
            client.policies.apply(wrong, **BY_JANE)
        with pytest.raises(ValueError, match=r"'b\[1\]': a stored policy knows \* and \?, and no brackets"):
            client.policies.apply({"b[1]": {}}, **BY_JANE)
        second = client.policies.apply({}, expected=first, actor="joe", reason="over")
        latest, earlier = client.policies.list()
        assert (latest.version, latest.actor, latest.reason, latest.datasets) == (second, "joe", "over", {})
        assert (earlier.version, earlier.datasets) == (first, RULES)
        assert client.policies.get(first) == earlier
        client.operation(key("burials")).run(int)
    if either.startswith("postgres"):
        assert query(either, "select count(*) from pg_trigger where tgname = 'policy_check'") == [(0,)]


@pytest.mark.parametrize(
    "rules",
    ['{"a": {"sovereing": true}}', '{"a": {"sovereign": 1}}', '{"a": []}', "[]", '{"a[b]": {}}', '{"": {}}',
     '{"a": {"requires": ["x"]}}', '{"a": {"may_reset": "x"}}', '{"a": {"h3_properties": [1]}}'],
)  # fmt: skip
def test_sql_stores_no_policy_that_is_wrong(postgres_url: str, rules: str) -> None:
    with psycopg.connect(postgres_url) as mine, pytest.raises(psycopg.errors.InvalidParameterValue):
        mine.execute("select holdfast.policy_apply(%s::jsonb, 'jane', 'agreed')", (rules,))
