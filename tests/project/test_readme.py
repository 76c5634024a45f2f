"""The README is run, block by block, on both engines: what it says works, works."""

from __future__ import annotations

import ast
import fcntl
import importlib
import inspect
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

import holdfast
from holdfast import lineage
from holdfast.cli.app import app
from holdfast.testing import available
from tests.children import PATIENCE, query
from tests.conftest import NEWEST, server

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BESIDE = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "spec/README.md")]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def for_postgres(code: str, url: str) -> str:
    """What a reader changes to go there: the URL, and the driver of the connection that is theirs."""
    code = code.replace('create_engine("sqlite:///app.db")', f'create_engine("{url.replace("://", "+psycopg://")}")')
    code = re.sub(r"\?(?=[,)])", "%s", code).replace("date('now')", "current_date")
    code = code.replace('sqlite3.connect("app.db")', f'psycopg.connect("{url}", autocommit=True)')
    return code.replace("import sqlite3", "import psycopg").replace("sqlite:///app.db", url)


def run(code: str, known: dict[str, Any]) -> None:
    exec(compile(ast.parse(code), "README.md", "exec"), known)


@pytest.fixture
def known() -> Iterator[dict[str, Any]]:
    """The names that the blocks have made so far; connections are closed at the end."""
    names: dict[str, Any] = {}
    yield names
    for name in ("client", "conn"):
        if name in names:
            names[name].close()
    if "engine" in names:
        names["engine"].dispose()


def test_the_first_block_has_eight_lines() -> None:
    assert len([line for line in blocks("python")[0].splitlines() if line]) <= 8


def text_of(name: str) -> str:
    return (ROOT / f"{name}.md").read_text(encoding="utf-8")


CONTINUED = {"README": 2, "docs/howto/leases": 2, "docs/howto/objects": None}
"""Pages whose blocks continue each other, and how many rows of ``imports`` they leave."""


@pytest.mark.parametrize("name", CONTINUED)
def test_every_python_block_runs_on_sqlite(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    for code in blocks("python", text_of(name)):
        run(code, known)
    assert imports(known) == CONTINUED[name]


@pytest.mark.parametrize("name", CONTINUED)
def test_every_python_block_runs_on_postgresql(name: str, postgres_url: str, known: dict[str, Any]) -> None:
    for code in blocks("python", text_of(name)):
        run(for_postgres(code, postgres_url), known)
    assert imports(known) == CONTINUED[name]


def imports(known: dict[str, Any]) -> int | None:
    return len(known["conn"].execute("select * from imports").fetchall()) if "conn" in known else None


@pytest.mark.parametrize("name", ["docs/howto/leases", "docs/reference/sql"])
def test_every_sql_block_runs_in_psql(name: str, postgres_url: str) -> None:
    psql = [str(available()[NEWEST] / "psql"), postgres_url, "-v", "ON_ERROR_STOP=1", "-qAt"]
    text = "".join(blocks("sql", text_of(name)))
    done = subprocess.run(psql, input=text, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "f\n" not in done.stdout  # renew and release say t


def test_the_page_on_testing_is_a_test_module_and_passes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "testing.md").read_text(encoding="utf-8")
    (tmp_path / "test_page.py").write_text("\n".join(blocks("python", page)), encoding="utf-8")
    chosen = ["-k", "not MyEngine or a_grant_says_what_it_is"]  # the contract is run elsewhere
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout or "5 passed, 1 skipped" in done.stdout, done.stdout


def test_the_page_on_governance_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "howto" / "governance.md").read_text(encoding="utf-8")
    [declared] = blocks("toml", page)
    (tmp_path / "holdfast.toml").write_text(declared, encoding="utf-8")
    (tmp_path / "parcels.csv").write_text("1", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {"slo": SimpleNamespace(budget_spent=lambda: False)}
    for code in blocks("python", page):
        run(code, known)
    assert [each.status for each in known["client"].operations.list()] == ["success"] * 3
    assert [each["properties"] for each in known["masked"]["features"]] == [{"kind": "barrow", "h3": "851e15b7fffffff"}]
    with pytest.raises(holdfast.PolicyDenied, match=r"properties\.lat is not among the properties"):
        known["client"].operation(replace(known["key"], task="again"), payload=known["exact"]).run(int)
    known["client"].close()


def test_the_pages_on_operations_slots_and_files_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parcels.csv").write_text("1", encoding="utf-8")
    published: list[str] = []
    api = SimpleNamespace(create_draft=lambda: "draft", publish=published.append, delete=published.remove)
    order = {"id": 42}
    with (
        holdfast.Client("sqlite:///app.db") as client,
        closing(sqlite3.connect("app.db", isolation_level=None)) as conn,
    ):
        known: dict[str, Any] = {
            "holdfast": holdfast, "json": json, "client": client, "conn": conn, "api": api, "order": order,
            "orders": [{"id": 43}], "charge": lambda *_: {"charged": True}, "load": lambda: {"rows": 1},
            "publish": lambda: None, "unpublish": lambda op: None, "is_published": lambda op: False,
            "file_is_complete": lambda: True, "rows_add_up": lambda: True,
        }  # fmt: skip
        for name in ("operations", "slots", "rows-and-files"):
            page = (ROOT / "docs" / "howto" / f"{name}.md").read_text(encoding="utf-8")
            for code in blocks("python", page):
                if "great_expectations" in code or code.startswith("# load"):  # which have tests of their own
                    continue
                run(code, known)
        assert {each.label for each in client.operations.list()} >= {"charge:42", "charge:43"}
        assert known["slots"].owners() == {1: "session-3"}
        known["client"].close()
    assert json.loads((tmp_path / "settings.json").read_text(encoding="utf-8")) == {"port": 8080}


@pytest.mark.parametrize("name", ["load.py", "load_orm.py"])
def test_the_programs_on_operations_load_exactly_once(name: str, postgres_url: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "operations.md").read_text(encoding="utf-8")
    [program] = [code for code in blocks("python", page) if code.startswith(f"# {name} ")]
    (tmp_path / name).write_text(program.replace("postgresql://localhost/app", postgres_url), encoding="utf-8")
    [rows] = re.findall(r"`printf '(.*)' > parcels.csv`", page)
    (tmp_path / "parcels.csv").write_text(rows.replace("\\n", "\n"), encoding="utf-8")
    output = ""
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        output += f"$ python load.py\n{done.stdout}"
    assert output in blocks("", page)
    table = {"load.py": "parcels", "load_orm.py": "plots"}[name]
    assert query(postgres_url, f"select id, area from {table} order by id") == [(1, 20.5), (2, 31.0)]


BEGIN = """
import sqlite3, subprocess, sys, holdfast
url = "sqlite:///app.db"
client = holdfast.Client(url)
conn = sqlite3.connect("app.db", isolation_level=None)
"""
PLAYED = {
    "explanation/lock": (BEGIN, "", {}),
    "howto/guard": (BEGIN, "", {}),
    "howto/operate": (
        BEGIN + "apply = remove = look = lambda *_: 7\nclient.lease('nightly-import').acquire()",
        "commands.run(client, 'cache.drop', {'name': 'x'}, actor='jane', reason='a test')",
        {},
    ),
    "howto/lineage": (
        BEGIN + "conn.execute('create table parcels (id)')",
        "assert 'parcels.loaded' in open('lineage.jsonl').read()",
        {".run(signals=True)": ".step()", ".run()": ".step()", "https://marquez.example": "ol.jsonl"},
    ),
    "howto/flask": (
        "import os, holdfast as library\nos.environ['HOLDFAST_URL'] = 'sqlite:///app.db'\nclient = library.Client()",
        """
app = create_app()
with client.lock(("agent", 7)):
    assert sweep(app, [7, 8]) == [8]
    assert app.test_client().get("/locks").status_code == 200
assert app.test_client().post("/agents/7/stop").json == {"stopped": 7}
holdfast.close(app)
""",
        {},
    ),
    "howto/telemetry": (
        BEGIN + "grant = client.lease('measured').acquire()",
        "assert telemetry.readings()['leases_held'] >= 1",
        {"start_http_server(9464)": "start_http_server(0)"},
    ),
    "howto/dashboard": (
        "import holdfast",
        """
from starlette.testclient import TestClient
with client.lease("nightly-import"):
    with TestClient(app) as browser:
        assert "nightly-import" in browser.get("/holdfast/leases").text
        assert "acting as <b>jane" in browser.get("/holdfast/", headers={"x-authenticated-user": "jane"}).text
""",
        {},
    ),
    "howto/schedules": (
        "",
        "assert {run.status for run in client.schedules.runs('bill')} == {'success'}",
        {"@client.every(300,": "@client.every(0.1,", "@client.every(60,": "@client.every(0.1,"},
    ),
    "tutorials/nightly-job": (
        "import os\nos.environ['HOLDFAST_URL'] = 'sqlite:///app.db'",
        "assert report.run_due(report).note == '30 parts written'",
        {'if __name__ == "__main__":\n    report.run(signals=True)': "", "time.sleep(1)": "time.sleep(0)"},
    ),
    "howto/reconcile": (
        BEGIN,
        """
import asyncio, os, signal, threading

def stop_when_it_is_removed():
    with holdfast.Client(url) as client, client.objects.watch("sandbox", since=since) as watch:
        while watch.next(timeout=200).kind != "deleted":
            pass
    os.kill(os.getpid(), signal.SIGTERM)

since = client.objects.cursor()
threading.Thread(target=stop_when_it_is_removed, daemon=True).start()
asyncio.run(main())
""",
        {'if __name__ == "__main__":\n    asyncio.run(main())': "", "sweep_every=5": "sweep_every=0.2"},
    ),
}


@pytest.mark.parametrize("name", PLAYED)
def test_a_page_runs_as_a_program_from_its_first_block_to_its_last(name: str, tmp_path: Path) -> None:
    """In a process of its own: these pages end programs, register commands or measure all that happens."""
    begin, end, exchanged = PLAYED[name]
    body = "\n".join(blocks("python", (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")))
    for old, new in exchanged.items():
        assert old in body, old
        body = body.replace(old, new)
    (tmp_path / "page.py").write_text(f"{begin}\n{body}\n{end}\nclient.close()", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_tutorial_is_true_to_its_last_step(tmp_path: Path) -> None:
    """The job as it is printed, but that its work ends when it is told to. Its TTL is over when we say so: what is
    waited for in real time would also pass while the machine stands still."""
    page = (ROOT / "docs" / "tutorials" / "first-lease.md").read_text(encoding="utf-8")
    [job] = blocks("python", page)
    (tmp_path / "job.py").write_text(job.replace("time.sleep(20)", "input()").replace("ttl=5", "ttl=600"), "utf-8")
    environment = {**os.environ, "HOLDFAST_URL": "sqlite:///app.db"}
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "job.py"]
        child = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        started.append(child)
        return child

    def first_of(child: subprocess.Popen[str]) -> str:
        assert child.stdout is not None
        return child.stdout.readline()

    def import_after_the_ttl() -> subprocess.Popen[str]:
        query(f"sqlite:///{tmp_path / 'app.db'}", "update holdfast_beat set expires_at = 0 where dead = 0")
        child = start()
        assert first_of(child).startswith("importing, with fence")
        return child

    def pause(child: subprocess.Popen[str]) -> None:
        """In the middle of a write it would keep all others out, as the page on guarantees says."""
        with (tmp_path / "app.db.holdfast-turn").open("rb") as turn:
            while True:
                child.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, child.pid, os.WSTOPPED)
                with suppress(BlockingIOError):
                    return fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                child.send_signal(signal.SIGCONT)

    try:
        killed = start()
        assert first_of(killed).startswith("importing, with fence")
        assert first_of(start()) == "another process is importing\n"
        killed.kill()
        paused = import_after_the_ttl()
        pause(paused)
        after = import_after_the_ttl()
        paused.send_signal(signal.SIGCONT)
        assert "holdfast.FencedOut: lease 'nightly-import' has passed on" in paused.communicate("\n", PATIENCE)[1]
        assert after.communicate("\n", PATIENCE) == ("done\n", "")
        with holdfast.Client(f"sqlite:///{tmp_path / 'app.db'}") as client:
            assert [each.outcome for each in client.leases.history()] == ["released", "expired", "expired"]
    finally:
        for child in started:
            child.kill()
            child.communicate()


def test_the_tutorial_goes_to_postgresql_as_it_says(postgres_url: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorials" / "first-lease.md").read_text(encoding="utf-8")
    [job] = blocks("python", page)
    job = for_postgres(job.replace("time.sleep(20)", "time.sleep(0)"), postgres_url)
    environment = {**os.environ, "HOLDFAST_URL": postgres_url}
    command = [sys.executable, "-c", job]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.endswith("done\n"), done.stderr


def test_the_page_on_the_driver_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "process-driver.md").read_text(encoding="utf-8")
    command = [sys.executable, "-m", "holdfast", "driver", "--folder", str(tmp_path / "d")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        try:
            assert driver.stdout is not None
            assert f"listening on unix:{tmp_path}/d/driver.sock; 0 sandboxes, 0 running" in driver.stdout.readline()
            known: dict[str, Any] = {"holdfast": holdfast}
            code = blocks("python", page)[0].replace("/var/lib/holdfast", f"{tmp_path}/d")
            run(code.replace('"python", "agent.py"', '"sleep", "60"'), known)
            assert known["driver"].list() == []
        finally:
            driver.terminate()


def calls_in(page: str) -> list[ast.FunctionDef]:
    """The calls that its plain blocks show, read as the head of a function."""
    shown = re.findall(r"^(?:client\.)?(\w+\((?:[^()]|\n)*\))$", "\n".join(blocks("", page)), re.MULTILINE)
    return [found for each in shown if isinstance(found := ast.parse(f"def {each}: ...").body[0], ast.FunctionDef)]


def test_the_page_on_python_has_every_name_and_every_default() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    operations = (ROOT / "docs" / "reference" / "operations.md").read_text(encoding="utf-8")
    shown = {call.name: call.args for call in calls_in(page)}
    for name, made in inspect.getmembers(holdfast.Client, inspect.isfunction):
        known = list(inspect.signature(made).parameters.values())[1:]
        if name == "operation":
            assert [each.name for each in known if f"`{each.name}" not in operations] == []
        elif name == "__init__" or (not name.startswith("_") and any(each.kind == each.KEYWORD_ONLY for each in known)):
            told = shown["Client" if name == "__init__" else name]
            defaults = [*told.defaults, *(each for each in told.kw_defaults if each is not None)]
            passed_on = [each.name for each in known if each.kind != each.VAR_KEYWORD]
            assert [each.arg for each in (*told.args, *told.kwonlyargs)] == passed_on, name
            assert [ast.literal_eval(each) for each in defaults] == [
                each.default for each in known if each.default is not each.empty
            ], name
        elif not name.startswith("_"):
            assert f"`client.{name}(" in page, name


@pytest.mark.parametrize("module", ["", "governance", "lineage", "geo", "reconciler"])
def test_the_page_on_python_has_every_public_name_once(module: str) -> None:
    """In the first column of a table, and nothing that is not public."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    sections = {
        title: text for title, _, text in (each.partition("\n") for each in re.split(r"^#+ ", page, flags=re.MULTILINE))
    }
    tables = sections[f"holdfast.{module}"] if module else sections["Types and functions"] + sections["Errors"]
    cells = re.findall(r"^\| (`.*?) \| ", tables, re.MULTILINE)
    shown = [name for cell in cells for name in re.findall(r"`(\w+)(?:\([^`]*\))?`", cell)]
    public = importlib.import_module(f"holdfast.{module}".rstrip(".")).__all__
    assert sorted(shown) == sorted(set(public) - {"governance", "lineage", "geo", "reconciler"})
    assert all(f"holdfast.{name}" in sections for name in ("governance", "lineage", "geo", "reconciler"))


COLLECTIONS = (
    "leases",
    "locks",
    "objects",
    "gates",
    "relays",
    "audit",
    "migrations",
    "operations",
    "reviews",
    "policies",
    "schedules",
)


def told_truly(call: str, made: Callable[..., object]) -> None:
    """The names of its arguments, which of them are by name alone, and what they are unless given."""
    known = list(inspect.signature(made).parameters.values())[1:]
    known = [each for each in known if (each.name, each.kind) != ("entry", each.KEYWORD_ONLY)]  # for commands alone
    told = ast.parse(f"def f{call}: ...").body[0]
    assert isinstance(told, ast.FunctionDef)
    named = [each.name for each in known if each.kind == each.KEYWORD_ONLY]
    assert [each.arg for each in (*told.args.args, *told.args.kwonlyargs)] == [each.name for each in known], call
    assert [each.arg for each in told.args.kwonlyargs] == named, call
    defaults = [*told.args.defaults, *(each for each in told.args.kw_defaults if each is not None)]
    for default, each in zip(defaults, [each for each in known if each.default is not each.empty], strict=True):
        assert ast.literal_eval(default) in (each.default, ...), f"{call}: {each}"


def test_the_reference_has_every_method_of_every_collection_with_its_defaults() -> None:
    pages = [
        (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8") for name in ("python", "operations")
    ]
    calls = "\n".join(block.replace("…", "...") for page in pages for block in blocks("", page))
    shown = dict(re.findall(r"^client\.(\w+\.\w+)(\(.*\))$", calls, re.MULTILINE))
    shown |= {"operation": re.findall(r"^client\.operation(\(.*?\))$", calls, re.MULTILINE | re.DOTALL)[0]}
    with holdfast.Client("sqlite:///never-opened.db") as client:
        for name in COLLECTIONS:
            for method, made in inspect.getmembers(type(getattr(client, name)), inspect.isfunction):
                if method.startswith("_"):
                    continue
                told_truly(shown.pop(f"{name}.{method}"), made)
    told_truly(shown.pop("operation"), holdfast.Client.operation)
    assert shown == {}, "nothing that is not there"


def test_the_reference_has_the_groups_of_an_operation_with_their_defaults() -> None:
    page = (ROOT / "docs" / "reference" / "operations.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^holdfast\.([\w.]+)(\(.*\))$", "\n".join(blocks("", page)), re.MULTILINE))
    groups: dict[str, Any] = {
        "Retry": holdfast.Retry, "Checks": holdfast.Checks, "OperationOptions": holdfast.OperationOptions,
        "lineage.Lineage": lineage.Lineage, "lineage.Contract": lineage.Contract,
    }  # fmt: skip
    assert shown.keys() == groups.keys()
    for name, group in groups.items():
        told_truly(shown[name], group.__init__)


def test_the_door_shows_what_is_behind_it_before_any_of_it_is_imported() -> None:
    look = "import holdfast; assert set(holdfast.__all__) < set(dir(holdfast)), dir(holdfast)"
    subprocess.run([sys.executable, "-c", look], check=True, timeout=240)


@pytest.mark.parametrize("name", ["", ".geo", ".governance", ".lineage", ".reconciler"])
def test_a_module_has_and_lists_its_public_names(name: str) -> None:
    module = importlib.import_module(f"holdfast{name}")
    assert set(module.__all__) <= set(dir(module))
    assert [each for each in module.__all__ if getattr(module, each) is None] == []
    with pytest.raises(AttributeError, match=f"module 'holdfast{name}' has no attribute 'Nothing'"):
        module.Nothing  # noqa: B018


def anchors_of(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, *BESIDE], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]*))?\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            found = document.parent / target if target else document
            assert found.exists(), target
            assert not anchor or anchor in anchors_of(found), f"{target}#{anchor}"


def test_every_page_and_schema_is_reached_from_the_readme() -> None:
    seen, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop().resolve()
        if page not in seen and page.suffix in (".md", ".json"):
            seen.add(page)
            links = re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", page.read_text(encoding="utf-8"))
            ahead += [page.parent / each for each in links if "://" not in each]
    assert {each for each in (ROOT / "docs").rglob("*.*") if each.suffix in (".md", ".json")} - seen == set()


def options_of(command: click.Command, path: str = "holdfast") -> Iterator[tuple[str, str]]:
    """Every command, with each name that an option of it has."""
    context = click.Context(command)
    for each in command.params:
        yield from ((path, name) for name in each.opts if isinstance(each, click.Option))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield path, name
            yield from options_of(below, f"{path} {name}")


def test_every_command_and_option_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert [each for each in options_of(app) if not re.search(rf"(?<![\w-]){re.escape(each[1])}(?![\w-])", page)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_in_documents_is_valid(document: Path) -> None:
    for code in blocks("python", document.read_text(encoding="utf-8")):
        ast.parse(code)


def test_the_command_that_the_readme_names_migrates() -> None:
    url = server().database()
    command = [sys.executable, "-c", "from holdfast.cli import main; main()", "--url", url, "migrate"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    with holdfast.Client(url) as client, client.lease("x", ttl=30):
        pass
