"""A message about a mistake names the option that is wrong, and what to do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from holdfast.cli.app import app
from tests.cli.command import call, invoke
from tests.migrated_file import migrated_file

POLICY = Path(__file__).with_name("policy.toml")
WITH_A_DATABASE = """
run job -- touch started
run --guard --wipe-on-start job -- touch started
ls
history
release job --force --reason x
locks
locks end 1 --reason x
slots
schedules
schedules show report
once report -- true
gates
ops health
ops ls
ops show charge:42
ops recover
ops complete charge:42 --reason x
ops reset charge:42 --reason x
ops rollback charge:42 --reason x
ops replay
ops verify
ops export charge:42
reviews ls
reviews show 1
reviews approve 1 --reason x
reviews reject 1 --reason x
policy apply {policy} --actor jane --reason x
policy show
policy history
relay run catalogue jsonl:lineage.jsonl
relay ls
relay parked catalogue
relay retry catalogue
relay rm catalogue --reason x
migrate
migrate up
migrate status
migrate down --to 0 --reason x --yes
doctor
dashboard --port 0
explain job
check
do lease.release job --reason x
audit
"""
WITHOUT = {
    "commands", "commands check", "completion", "driver", "driver create", "driver log", "driver ls", "driver rm",
    "migrate print", "serve", "top", "version",
}  # fmt: skip
"""Commands that use no database of the user; `serve`, which has a default file; `top`, which refuses a pipe first."""
MISTAKES = [
    (["do", "gate.open", "g", "--for", "-1", "--reason", "x"], 2, "--for must be a number from 1 to 86400, not -1.0"),
    (["migrate", "down", "--to", "0", "--reason", "x"], 1, "nothing was removed: not confirmed (--yes skips the"),
    (["history", "--limit", "x"], 2, "'--limit': 'x' is not a valid integer.\n"),
    (["locks", "--every", "x"], 2, "'--every': 'x' is not a valid number.\n"),
    (["ops", "shwo"], 2, "No such command 'shwo'. Did you mean 'show'?"),
    (["ls", "--wach"], 2, "No such option '--wach'. Did you mean '--watch'?"),
    (["do", "lease.relase", "x"], 2, "No such command 'lease.relase'. Did you mean 'lease.release'?"),
    (["do", "zzz"], 2, "No such command 'zzz'.\n"),
    (["relay", "parked", "gone"], 0, "relay 'gone' has no parked events"),
    (["relay", "retry", "gone", "e1"], 1, "relay 'gone' has no parked event 'e1'"),
    (["ops", "export", "charge:42"], 1, "the log has no entries of operation 'charge:42'"),
    (["ops", "export", "--dataset", "parcels"], 1, "the log has no entries of dataset 'parcels'"),
    (["serve", "--pools", "gpu"], 2, "a pool is NAME=SLOTS, its name of letters, digits, '.', '_', '-', not 'gpu'"),
    (["--url", "mysql://db1/app", "serve", "--port", "x"], 2, "unknown URL scheme 'mysql'"),
    (["--schema", "A b", "serve"], 2, "schema must be 1 to 40 lower-case letters"),
    (["locks", "--watch", "--every", "nan"], 2, "'--every': nan is not a number"),
    (["driver", "rm", "sb-1", "--wait", "inf"], 2, "'--wait': inf is not in the range 0<=x<=3600"),
    (["lss"], 2, "No such command 'lss'. Did you mean 'ls'?"),
    (["histroy"], 2, "No such command 'histroy'. Did you mean 'history'?"),
    (["zzz"], 2, "No such command 'zzz'.\n"),
    (["driver", "ls"], 1, "No such file or directory. Is it running? 'holdfast driver' starts one"),
    (["--url", "postgresql://h/x?flavour=1", "ls"], 2, "after '?' libpq's own alone, as in ?sslmode=require"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    MISTAKES,
    ids=lambda value: " ".join(value)[:24] if isinstance(value, list) else "",
)
def test_a_mistake_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    migrated_file(tmp_path / "app.db")
    result = CliRunner().invoke(
        app, ["--url", "sqlite:///app.db", *arguments] if arguments[0] != "--url" else arguments
    )
    assert (result.exit_code, message in result.output or message in str(result.exception)) == (code, True), (
        result.output
    )


@pytest.mark.parametrize("line", WITH_A_DATABASE.strip().splitlines())
def test_without_a_database_a_command_refuses_and_creates_no_file(tmp_path: Path, line: str) -> None:
    done = (call if line.startswith("run") else invoke)(*shlex.split(line.format(policy=POLICY)), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no database is configured: set HOLDFAST_URL=postgresql://host/name" in done.stderr
    assert not list(tmp_path.iterdir())


CREATING = ("doctor", "migrate", "run", "once", "do")
"""Those that may name a file that does not exist: `doctor` says so, and the others write, and create it."""


@pytest.mark.parametrize(
    "line",
    [line for line in WITH_A_DATABASE.strip().splitlines() if line.split()[0] not in CREATING] + ["migrate status"],
)
def test_a_misspelt_file_is_named_and_not_created(tmp_path: Path, line: str) -> None:
    words = shlex.split(line.format(policy=POLICY))
    done = invoke(*words, cwd=tmp_path, HOLDFAST_URL="sqlite:///mispelt%20name.db")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"there is no SQLite file '{tmp_path}/mispelt name.db': check its name" in done.stderr
    assert not list(tmp_path.iterdir())


def test_migrate_creates_a_file_and_doctor_warns_of_none(tmp_path: Path) -> None:
    for words in (("migrate",), ("migrate", "up"), ("do", "schema.migrate", "--reason", "x")):
        url = f"sqlite:///{tmp_path / '-'.join(words).replace('-reason-x', '')}.db"
        done = invoke("doctor", "--strict", HOLDFAST_URL=url)
        assert (done.returncode, "there is no such file" in done.stdout) == (1, True)
        assert not list(tmp_path.glob(f"{words[-1]}*.db"))
        assert invoke(*words, HOLDFAST_URL=url).returncode == 0
        assert invoke("ls", "--json", HOLDFAST_URL=url).stdout == "[]\n"


def test_every_command_either_refuses_without_a_database_or_uses_none() -> None:
    paths = set(_paths(app, ()))
    refusing = {path for path in paths for line in WITH_A_DATABASE.splitlines() if f"{line} ".startswith(f"{path} ")}
    assert refusing | WITHOUT | {"do"} >= {path for path in paths if not path.startswith("do ")}
    assert "do lease.release" in refusing
    assert refusing.isdisjoint(WITHOUT)


def _paths(group: click.Group, above: tuple[str, ...]) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield " ".join((*above, name))
        if isinstance(command, click.Group):
            yield from _paths(command, (*above, name))


def options(command: click.Command, *path: str) -> Iterator[tuple[str, str]]:
    """Each option of a command and of those below it."""
    context = click.Context(command)
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        below = command.get_command(context, name)  # type: ignore[attr-defined]
        assert below is not None
        yield from options(below, *path, name)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield from ((" ".join(path), option) for option in parameter.opts)


def test_no_option_takes_a_secret_but_in_a_file() -> None:
    """Every user of the machine reads the arguments of a process."""
    secret = re.compile("token|secret|password|key|reenter")
    found = {each for each in options(app) if secret.search(each[1])}
    assert found == {
        ("serve", "--tokens-file"), ("serve", "--key-file"), ("serve", "--webhook-secret-file"),
        ("dashboard", "--webhook-secret-file"), ("driver", "--token-file"),
    }  # fmt: skip
