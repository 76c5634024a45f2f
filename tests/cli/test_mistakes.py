"""A message about a mistake names the option that is wrong, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.cli.app import app

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
    result = CliRunner().invoke(
        app, ["--url", "sqlite:///app.db", *arguments] if arguments[0] != "--url" else arguments
    )
    assert (result.exit_code, message in result.output or message in str(result.exception)) == (code, True), (
        result.output
    )
