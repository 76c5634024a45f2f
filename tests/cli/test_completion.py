"""Shell completion in real shells: what a user has typed, TAB, and what the command is then called with."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.app import COMMANDS
from holdfast.cli.shells import SHELLS, split_line
from tests.children import PATIENCE, query
from tests.cli.command import ROOT, SCRIPT, ask, call, environment
from tests.cli.screen import Screen
from tests.conftest import server

PAGE = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8").partition("\n## completion\n")[2]
PATH = f"{Path(SCRIPT).parent}{os.pathsep}{os.environ['PATH']}"
PATIENT = {"HOLDFAST_COMPLETION_TIMEOUT": str(PATIENCE)}
"""So that no verdict depends on the speed of the machine."""
AWKWARD = "it's $HOME:\"5"
INTERACTIVE = {
    "bash": (("--norc", "--noprofile", "-i"), ""),
    "zsh": (("-f", "-i"), "autoload -U compinit && compinit -u -D; "),
}


def find(shell: str) -> str:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed: apt-get install {shell}")
    return program


def completed(line: str, *, cwd: Path | None = None, **more: str) -> dict[str, str]:
    """The values and their descriptions, without a shell. Fails if anything is written to stderr."""
    done = call(_HOLDFAST_COMPLETE="zsh_complete", COMP_LINE=line, cwd=cwd, **{**PATIENT, **more})
    assert (done.returncode, done.stderr) == (0, "")
    return dict(row.split("\t")[1:] for row in done.stdout.splitlines() if row)


@pytest.fixture
def used(either: str) -> Iterator[str]:
    """A database with something of everything that can be completed."""
    with holdfast.Client(either) as client:
        client.lease("old-job").acquire().release()
        for name in ("nightly-import", "nightly report", AWKWARD):
            client.lease(name, holder="web-1", ttl=600).acquire()
        client.lock("billing").acquire()
        client.operation("charge:42").run(lambda: 1)
        client.operation("charge:43").run(lambda: 1)
        key = holdfast.OperationKey(pipeline="etl", task="load", dataset="parcels", operation="upsert")
        client.operation(key).run(lambda: 1)
        client.slots("gpu", 4).claim(owner="session-1")
        client.gates.open("dot_config", seconds=600, actor="jane", reason="new addresses")
        yield either


@pytest.mark.parametrize(("either", "shell"), [("sqlite", "bash"), ("postgres", "zsh")], indirect=["either"])
def test_tab_completes_the_word_that_is_typed_however_it_is_quoted(used: str, shell: str) -> None:
    program, (options, prepare) = find(shell), INTERACTIVE[shell]
    with Screen(program, *options, url=used, PATH=PATH, PS1="ready> ", **PATIENT) as screen:
        screen.sees("ready> ")
        screen.keys(f'{prepare}eval "$(holdfast completion {shell})"\n')
        screen.sees("ready> ")
        for typed, name in (
            ("nightly-", "nightly-import"),
            (r"nightly\ ", "nightly report"),
            ("'nightly r", "nightly report"),
            ("it", AWKWARD),
            (r"it\'s\ \$HOME:", AWKWARD),
            ('"it', AWKWARD),
            ("@slot:", "@slot:gpu:1"),
        ):
            screen.keys(f"true; X=1 holdfast release {typed}\t\n")
            screen.sees(f"lease {name!r} ")  # what holdfast says of its argument
            screen.sees("ready> ")
        screen.keys("holdfast ops show charge:4\t\t")
        screen.sees("success")  # the list has descriptions


@pytest.mark.parametrize("either", ["sqlite"], indirect=True)
def test_fish_completes_words_with_descriptions(used: str) -> None:
    lines = (
        "true; holdfast release nightly-", "holdfast release 'nightly r", "holdfast ops show charge:", "holdfast his"
    )  # fmt: skip
    script = "holdfast completion fish | source\n" + "".join(f"complete -C {line!r}; echo ==\n" for line in lines)
    done = subprocess.run(
        [find("fish"), "--no-config", "-c", script], capture_output=True, text=True, timeout=2 * PATIENCE, check=True,
        env=environment(HOLDFAST_URL=used, PATH=PATH, **PATIENT),
    )  # fmt: skip
    imports, reports, charges, commands, _ = done.stdout.split("==\n")
    assert (imports, reports) == ("nightly-import\theld by web-1\n", "nightly report\theld by web-1\n")
    assert sorted(charges.splitlines()) == ["charge:42\tsuccess", "charge:43\tsuccess"]
    assert commands.startswith("history\t")
    assert done.stderr == ""


def test_what_is_completed_where(used: str) -> None:
    def values(line: str) -> dict[str, str]:
        return completed(f"holdfast {line}", HOLDFAST_URL=used)

    held = {"nightly-import": "held by web-1", "nightly report": "held by web-1", AWKWARD: "held by web-1"}
    own = {"@slot:gpu:1": "held by session-1", "@gate:dot_config": "held by jane"}
    assert values("release ") == values("do lease.release ") == {**held, **own}
    assert list(values("release "))[:3] == sorted(held), "holdfast's own come last"
    for line in ("history ", "run ", f"--url {used} run --skip --url {used} "):
        assert values(line).keys() == {*held, "old-job"}
    assert values("history old")["old-job"].startswith("last held by ")
    assert values("run job ").keys() == {"--"}
    [(digest, label)] = [row for row in values("ops show ").items() if not row[0].startswith("charge:")]
    assert (len(digest), label) == (64, "etl/load parcels upsert, success")
    for line in ("ops reset ", "ops rollback ", "ops replay ", "ops verify ", "ops export ", "do operation.reset "):
        assert values(line).keys() == {digest, "charge:42", "charge:43"}
    assert values("ops ls --dataset ") == values("ops export --dataset ") == {"parcels": ""}
    assert values("do gate.close ") == {"dot_config": "opened by jane"}
    assert values("do slot.release ") == {"gpu": ""}
    assert values("do slot.release gpu ") == {"1": "held by session-1"}
    assert "holds billing" in "; ".join(values("locks end ").values())
    assert values("locks end ") == values("do lock.end ")


def test_reviews_relays_electors_and_sessions_are_completed(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.lease("plain").acquire()
        client.relay("catalogue", _Sink()).step()
        labels = {"state": "ACTIVE"}
        payload = {"state": "ACTIVE", "pool": "gpu", "slot": 2}
        client.objects.put_if("@session", "s-1", payload, holdfast.MustCreate(), labels=labels)
        for number in (1, 2):
            for error in (RuntimeError, holdfast.OperationFailed):  # the second finds no attempts left
                with pytest.raises(error):
                    client.operation(f"publish:{number}", retry=holdfast.Retry(attempts=1)).run(_fail)
        first, second = (review.id for review in client.reviews.list())
        client.reviews.reject(first, actor="jane", reason="no")

    def values(line: str) -> set[str]:
        return {*completed(f"holdfast {line}", HOLDFAST_URL=sqlite_url)}

    assert values("reviews show ") == {str(first), str(second)}
    assert values("reviews approve ") == values("do review.reject ") == {str(second)}
    assert values("relay parked ") == values("ops verify --relay ") == {"catalogue"}
    assert values("do session.cancel ") == {"s-1"}
    assert values("do leader.resign ") == set(), "a lease of no elector"


class _Sink:
    def publish(self, events: object) -> None:
        pass


def _fail() -> None:
    raise RuntimeError("down")


def test_without_a_database_nothing_is_completed_said_or_created(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "holdfast.toml").write_text("url = ")
    with sqlite3.connect(tmp_path / "others.db") as other:
        other.execute("create table parcel (id integer)")
    other.close()
    before = sorted(tmp_path.rglob("*"))
    for url in ("postgresql://127.0.0.1:1/app", "mysql://db1/app", "nonsense", "", "sqlite:///absent.db",
                "sqlite:///others.db"):  # fmt: skip
        assert completed("holdfast release ", cwd=tmp_path, HOLDFAST_URL=url) == {}
    assert completed("holdfast release ", cwd=tmp_path) == {}, "no holdfast.db is created"
    assert completed("holdfast release ", cwd=tmp_path / "broken") == {}
    assert sorted(tmp_path.rglob("*")) == before


def test_tables_that_are_missing_are_not_created(sqlite_url: str) -> None:
    url = server().database()
    assert completed("holdfast release ", HOLDFAST_URL=url) == {}
    assert query(url, "select count(*) from pg_namespace where nspname = 'holdfast'") == [(0,)]
    ask("--url", sqlite_url, "ls")
    ask("--url", sqlite_url, "migrate", "down", "--to", "0", "--yes", "--reason", "not needed")
    assert completed("holdfast release ", HOLDFAST_URL=sqlite_url) == {}
    assert query(sqlite_url, "select count(*) from sqlite_master where name = 'holdfast_lease'") == [(0,)]


def test_a_database_that_never_answers_is_given_up(sqlite_url: str) -> None:
    """The socket accepts and says nothing; and a source that would take ten minutes is ended by its timer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://127.0.0.1:{silent.getsockname()[1]}/app"
        done = call(_HOLDFAST_COMPLETE="bash_complete", COMP_LINE="holdfast release ", HOLDFAST_URL=url)
        assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
    holdfast.Client(sqlite_url).leases.list()
    program = (
        "import time, click; from holdfast.cli import completion; from holdfast.cli.app import app\n"
        "complete = completion._completes(lambda client, context: time.sleep(600))\n"
        "print(complete(click.Context(app), app.params[0], ''))"
    )
    env = environment(HOLDFAST_URL=sqlite_url, HOLDFAST_COMPLETION_TIMEOUT="0.2")
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=True, env=env
    )
    assert (output.stdout, output.stderr) == ("[]\n", "")


def test_a_name_that_would_control_the_terminal_is_not_offered(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.lease("sweep").acquire().release()
        client.lease("other").acquire().release()
    query(sqlite_url, "update holdfast_history set name = %s where name = 'other'", "a\x1b[2Jb")
    query(sqlite_url, "update holdfast_history set holder = %s", "x\x1b[2J\ty")
    assert completed("holdfast history ", HOLDFAST_URL=sqlite_url) == {"sweep": "last held by x?[2J?y"}


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("holdfast ls", (["holdfast"], "ls", "ls", "")),
        ("holdfast  ls ", (["holdfast", "ls"], "", "", "")),
        (r"holdfast a\ b\:", (["holdfast"], "a b:", r"a\ b\:", "")),
        ("holdfast 'a b", (["holdfast"], "a b", "'a b", "'")),
        (r"""holdfast "a\"b'c""", (["holdfast"], "a\"b'c", r"""'a\"b'c""".replace("'", '"', 1), '"')),
        (r"holdfast 'a\' ''", (["holdfast", "a\\"], "", "''", "")),
        ("holdfast '' x", (["holdfast", ""], "x", "x", "")),
    ],
)
def test_a_line_is_split_as_shells_do(line: str, parts: tuple[list[str], str, str, str]) -> None:
    assert split_line(line) == parts


def test_commands_options_and_choices_need_no_database(tmp_path: Path) -> None:
    for line, values in (
        ("op", {"ops"}),
        ("", set(COMMANDS)),
        ("his", {"history"}),
        ("ops re", {"recover", "replay", "reset"}),
        ("do lease.", {"lease.release", "lease.wipe"}),
        ("ops ls --st", {"--status"}),
        ("ops ls --status pa", {"partial"}),
        ("completion ", set(SHELLS)),
    ):
        assert completed(f"holdfast {line}", cwd=tmp_path).keys() == values
    assert "--watch" in completed("holdfast ls --", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_is_valid_and_names_its_line(shell: str) -> None:
    script = ask("completion", shell)
    assert ask(_HOLDFAST_COMPLETE=f"{shell}_source") == script
    line = script.splitlines()[1 if shell == "zsh" else 0].rpartition(": ")[2]
    assert line in ask("completion", "--help")
    assert line in PAGE.replace("\\|", "|")
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, timeout=PATIENCE, check=True)
