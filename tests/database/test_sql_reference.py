"""The page on SQL lists arguments, answers, SQLSTATEs and version of the functions, and who may call them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.database.postgres_engine import SQL_VERSION
from holdfast.database.privileges import FOR_OPERATORS
from tests.conftest import for_one_test

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/sql.md").read_text(encoding="utf-8")
SIGNATURES = re.findall(r"^(\w+)\((.*?)\) → (.+)$", PAGE, re.MULTILINE)
WHO = {
    name: row[3]
    for row in re.findall(r"^\| ((`\w+`(, )?)+) \| .* \| (\w+) \|$", PAGE, re.MULTILINE)
    for name in re.findall(r"\w+", row[0])
} | {"sql_version": "worker"}
DECLARED = """
    select proargnames, proargmodes::text[], coalesce(proallargtypes, proargtypes::oid[])::regtype[]::text[],
           pronargdefaults, prorettype::regtype::text,
           array(select attname || ' ' || atttypid::regtype from pg_attribute
                  where attrelid = (select typrelid from pg_type where oid = prorettype) and attnum > 0)
      from pg_proc where pronamespace = 'holdfast'::regnamespace and proname = %s"""


@pytest.fixture
def database() -> Any:
    with psycopg.connect(for_one_test(), autocommit=True) as connection:
        yield connection


def test_every_function_on_the_page_has_these_arguments_and_answers(database: Any) -> None:
    assert len(SIGNATURES) > 15
    for name, given, answer in SIGNATURES:
        [(names, modes, types, defaults, returned, fields)] = database.execute(DECLARED, [name]).fetchall()
        declared = [f"{each} {kind}" for each, kind in zip(names or [], types, strict=True)]
        modes = modes or ["i"] * len(declared)
        inputs = [each for each, mode in zip(declared, modes, strict=True) if mode in "ib"]
        columns = {*fields, *(each for each, mode in zip(declared, modes, strict=True) if mode in "obt")}
        asked = [each.partition(" = ") for each in given.split(", ") if each]
        required = len(inputs) - defaults
        assert inputs[: len(asked)] == [argument for argument, _, _ in asked], name
        assert [not default for _, _, default in asked] == [number < required for number in range(len(asked))], name
        assert required <= len(asked), f"{name}: what the page does not list has a default"
        if answer.startswith("("):
            assert set(answer[1:-1].split(", ")) <= columns, name
        else:
            assert answer == returned, name
        assert WHO[name] == ("operator" if name in FOR_OPERATORS else "worker"), name
    assert WHO.keys() == {name for name, _, _ in SIGNATURES}


def test_every_sqlstate_of_our_class_is_on_the_page() -> None:
    scripts = "".join(
        path.read_text(encoding="utf-8") for path in ROOT.glob("src/holdfast/database/migrations/postgres/*")
    )
    raised = set(re.findall(r"errcode = '(HF\d\d\d)'", scripts)) - {"HF000"}  # which no caller sees
    assert set(re.findall(r"^\| `(HF\d\d\d)` \|", PAGE, re.MULTILINE)) == raised


def test_a_client_refuses_another_version_of_the_functions(database: Any) -> None:
    assert f"**{SQL_VERSION}**" in PAGE
    url = f"postgresql://{database.info.user}@{database.info.host}:{database.info.port}/{database.info.dbname}"
    database.execute(
        "create or replace function holdfast.sql_version() returns integer language sql immutable parallel safe"
        " set search_path = pg_catalog, pg_temp as 'select 2'"
    )
    with (
        holdfast.Client(url) as client,
        pytest.raises(holdfast.SchemaMismatch, match="has version 2 of the SQL functions"),
    ):
        client.lease("import").acquire()
