"""holdfast check: seven of seven on a database that is right, fewer on one that is not, and nothing stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

import holdfast
from tests.children import query
from tests.cli.command import ask, at, invoke, printed, valid
from tests.conftest import server


def break_release(url: str, language: str, body: str) -> None:
    [(arguments,)] = query(url, "select pg_get_function_arguments('holdfast.lease_release'::regproc)")
    head = f"create or replace function holdfast.lease_release({arguments}) returns boolean"
    query(url, f"{head} language {language} as $${body}$$")


def everything(url: str) -> dict[str, Any]:
    """All rows of all tables, but for heartbeats, which go on."""
    dot = "_" if url.startswith("sqlite") else "."
    return {
        table: sorted(query(url, f"select {columns} from holdfast{dot}{table}"), key=str)
        for table, columns in (("lease", "*"), ("beat", "id, ttl, dead, generation"), ("history", "*"))
    }


def test_it_passes_and_nothing_stays(either: str) -> None:
    with holdfast.Client(either) as client:
        client.lease("before", ttl=60).acquire().release()
        grant = client.lease("held", ttl=60).acquire()
        before = everything(either)
        lines = ask(*at(either, "check")).splitlines()
        assert [line[:9] for line in lines[:7]] == [f"{number}  ok    " for number in range(1, 8)]
        assert lines[7] == "7/7  the lease contract holds"
        assert len(lines) == 8
        assert everything(either) == before
        grant.check()
        assert client.lease("after", ttl=60).acquire().fence > grant.fence


def test_as_json_it_is_as_its_schema_says(either: str) -> None:
    document = valid("check", printed(*at(either, "check", "--json")))
    assert (document["ok"], document["passed"]) == (True, 7)
    assert [case["number"] for case in document["cases"]] == list(range(1, 8))
    assert document["cases"][6]["found"].startswith("taken_over with fence ")


def test_both_flavours_have_the_probe(connect: Callable[..., Any], either: str) -> None:
    assert [verdict.ok for verdict in connect(either).leases.probe()] == [True] * 7


def test_a_role_that_may_only_hold_leases_may_check(postgres_url: str) -> None:
    role, name = f"worker_{uuid4().hex}", postgres_url.rpartition("/")[2]
    try:
        query(postgres_url, f"create role {role} login")
        query(postgres_url, f"grant usage on schema holdfast to {role}")
        query(postgres_url, f"grant execute on all functions in schema holdfast to {role}")
        assert "7/7" in printed(*at(postgres_url.replace("postgres@", f"{role}@"), "check"))
    finally:
        server().execute(f"drop owned by {role}", dbname=name)
        server().execute(f"drop role {role}")


def test_a_release_that_takes_any_token_is_found_out(postgres_url: str) -> None:
    break_release(postgres_url, "sql", "select true")
    before = everything(postgres_url)
    done = invoke(*at(postgres_url, "check"))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "4  FAIL  release with a wrong token: false" in lines
    assert lines[lines.index("4  FAIL  release with a wrong token: false") + 1].strip() == "answered: true, then true"
    assert [line[0] for line in lines if "FAIL" in line] == ["4", "5", "6", "7"]
    assert lines[-1] == "3/7  do not trust leases in this database"
    assert everything(postgres_url) == before
    failed = invoke(*at(postgres_url, "check", "--json"))
    assert (failed.returncode, valid("check", failed.stdout)["ok"]) == (1, False)


def test_an_error_half_way_is_told_and_the_rest_is_not_asked(postgres_url: str) -> None:
    break_release(postgres_url, "plpgsql", "begin raise exception '[bold]broken'; end")
    before = everything(postgres_url)
    done = invoke(*at(postgres_url, "check", "--json"))
    document = valid("check", done.stdout)
    assert (done.returncode, document["passed"]) == (1, 3)
    assert "[bold]broken" in document["cases"][3]["found"]
    assert [case["found"] for case in document["cases"][4:]] == ["not asked"] * 3
    assert everything(postgres_url) == before
    assert "[bold]broken" in invoke(*at(postgres_url, "check")).stdout


@pytest.mark.parametrize(
    ("sabotage", "case"),
    [
        ("before insert on holdfast_lease begin select raise(abort, 'no'); end", 1),
        ("before delete on holdfast_lease begin select raise(ignore); end", 5),
        ("after insert on holdfast_beat when new.ttl < 1 begin update holdfast_beat set dead = 1; end", 6),
        ("before update of expires_at on holdfast_beat begin select raise(ignore); end", 7),
    ],
)  # fmt: skip
def test_an_sqlite_file_with_wrong_ways_is_found_out_and_nothing_stays(
    sqlite_url: str, sabotage: str, case: int
) -> None:
    printed(*at(sqlite_url, "ls"))
    query(sqlite_url, f"create trigger sabotage {sabotage}")
    before = everything(sqlite_url)
    done = invoke(*at(sqlite_url, "check", "--json"))
    assert done.returncode == 1
    assert next(each["number"] for each in valid("check", done.stdout)["cases"] if not each["ok"]) == case
    assert everything(sqlite_url) == before


def test_a_database_without_the_tables_says_what_to_run() -> None:
    done = invoke(*at(server().database(), "check"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "holdfast migrate up" in done.stderr
