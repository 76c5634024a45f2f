"""The programs of docs/howto/recipes.md and docs/howto/kubernetes.md: saved, started, and true to their page, on both
engines."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from holdfast.cli.run_options import parse
from tests.children import NONE, PATIENCE, eventually, is_asleep, query, rows
from tests.cli.command import ROOT, SCRIPT, environment
from tests.project.test_readme import blocks, for_postgres

Save = Callable[[str, str], None]
Start = Callable[..., subprocess.Popen[str]]
RECIPES = (ROOT / "docs/howto/recipes.md").read_text(encoding="utf-8")
KUBERNETES = (ROOT / "docs/howto/kubernetes.md").read_text(encoding="utf-8")
NIGHTLY, WORKER, SHOP, LOAD = blocks("python", RECIPES)
TERMINATED, SERVICE = blocks("python", KUBERNETES)


@pytest.fixture
def database(either: str, tmp_path: Path) -> str:
    """The URL; on SQLite that of the file which the programs name."""
    return f"sqlite:///{tmp_path / 'app.db'}" if either.startswith("sqlite") else either


@pytest.fixture
def save(database: str, tmp_path: Path) -> Save:
    """Save a program, changed for PostgreSQL as the page says."""

    def write(name: str, code: str) -> None:
        changed = code if database.startswith("sqlite") else for_postgres(code, database)
        (tmp_path / name).write_text(changed, encoding="utf-8")

    return write


@pytest.fixture
def start(database: str, tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(*command: str) -> subprocess.Popen[str]:
        env = environment(HOLDFAST_URL=database)
        started.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for each in started:
        each.kill()
        each.communicate()


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def output_of(child: subprocess.Popen[str]) -> str:
    output = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == 0, output
    return output


def test_the_cron_job_runs_under_its_lease(save: Save, start: Start, database: str) -> None:
    save("nightly_import.py", NIGHTLY)
    [command] = re.findall(r"^holdfast (run .*) python nightly_import.py$", RECIPES, re.MULTILINE)
    assert output_of(start(SCRIPT, *shlex.split(command), sys.executable, "nightly_import.py")) == "imported\n"
    assert len(query(database, "select * from imports")) == 1


def test_the_crontab_calls_what_there_is() -> None:
    [command] = re.findall(r"^30 2 \* \* \*  cd \S+ && \S+/holdfast (.*)$", RECIPES, re.MULTILINE)
    values = parse(shlex.split(command))
    assert values is not None
    assert (values["name"], values["skip"], values["ttl"]) == ("nightly-import", True, 60.0)


def test_the_worker_is_replaced_by_a_standby_on_sigterm(save: Save, start: Start, database: str) -> None:
    save("worker.py", WORKER)
    leader = start(sys.executable, "worker.py")
    assert line_of(leader) == "leading\n"
    standby = start(sys.executable, "worker.py")
    eventually(lambda: query(database, "select * from sweeps"), "the leader works")
    leader.send_signal(signal.SIGTERM)
    assert leader.wait(PATIENCE) == 0
    assert line_of(standby) == "leading\n"
    standby.send_signal(signal.SIGTERM)
    assert standby.wait(PATIENCE) == 0
    assert rows(database) == NONE


@contextmanager
def serving(start: Start, module: str, address: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """uvicorn with the application, on a unix socket, and a client of it."""
    child = start(sys.executable, "-m", "uvicorn", f"{module}:app", "--uds", str(address), "--log-level", "warning")
    eventually(address.exists, "the server listens")
    transport = httpx.HTTPTransport(uds=str(address))
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=PATIENCE) as client:
        yield child, client


def test_the_route_charges_once(save: Save, start: Start, tmp_path: Path) -> None:
    save("shop.py", SHOP)
    key = {"Idempotency-Key": '"k-1"'}
    with serving(start, "shop", tmp_path / "socket") as (_, client):
        first, again = (client.post("/charges", json={"amount": 5}, headers=key) for _ in range(2))
        assert (first.status_code, again.status_code) == (201, 201)
        assert first.json() == again.json()
        assert "idempotent-replayed" not in first.headers
        assert again.headers["idempotent-replayed"] == "true"
        assert client.post("/charges", json={"amount": 6}, headers=key).status_code == 422
        assert client.post("/charges", json={"amount": 5}).status_code == 400


def test_the_load_is_done_once(save: Save, start: Start, database: str, tmp_path: Path) -> None:
    save("load.py", LOAD)
    (tmp_path / "parcels.csv").write_text("7,12.5\n8,3.25\n", encoding="utf-8")
    [shown] = re.findall(r"^\$ python load.py\n(.*\n)\$ python load.py\n(.*\n)", RECIPES, re.MULTILINE)
    assert tuple(output_of(start(sys.executable, "load.py")) for _ in range(2)) == shown
    assert len(query(database, "select * from parcels")) == 2
    (tmp_path / "parcels.csv").write_text("9,1\n", encoding="utf-8")
    assert output_of(start(sys.executable, "load.py")) == "loaded: {'rows': 1}\n"


@pytest.mark.parametrize("handled", [True, False])
def test_a_plain_lease_is_released_on_sigterm_only_if_the_client_is_to(
    handled: bool, save: Save, start: Start, database: str
) -> None:
    code = TERMINATED if handled else re.sub(r"^ +client\.release_on_exit.*$", "", TERMINATED, flags=re.MULTILINE)
    save("terminated.py", code)
    child = start(sys.executable, "terminated.py")
    assert line_of(child) == "importing\n"
    eventually(lambda: is_asleep(child.pid), "it works")
    child.send_signal(signal.SIGTERM)
    assert child.wait(PATIENCE) == -signal.SIGTERM
    assert rows(database) == (NONE if handled else {"lease": 1, "beat": 1})


def test_every_replica_of_the_service_is_ready_and_one_leads(save: Save, start: Start, tmp_path: Path) -> None:
    save("service.py", SERVICE)
    with serving(start, "service", tmp_path / "first") as (leader, first):
        eventually(lambda: first.get("/leader").json()["leading"], "the first one leads")
        with serving(start, "service", tmp_path / "second") as (_, second):
            eventually(lambda: second.get("/leader").json()["leader"], "the second one has seen the leader")
            assert second.get("/leader").json() == {**first.get("/leader").json(), "leading": False}
            assert {each.get(path).status_code for each in (first, second) for path in ("/healthz", "/readyz")} == {200}
            leader.send_signal(signal.SIGTERM)
            assert leader.wait(PATIENCE) in (0, -signal.SIGTERM)  # after its shutdown uvicorn raises the signal again
            eventually(lambda: second.get("/leader").json()["leading"], "the second one leads")
