"""What every command has in common: where its database is, and how it reads on narrow terminals, in pipes, in ASCII."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
from rich.cells import cell_len

import holdfast
from holdfast.cli.app import COMMANDS, GROUPS, app
from holdfast.cli.output import clean, distribute, format_duration, shorten
from tests.children import PATIENCE, query
from tests.cli.command import (
    IMPORTED,
    PROGRAM,
    ROOT,
    SCHEMAS,
    SCRIPT,
    ask,
    at,
    call,
    columns_of,
    environment,
    invoke,
    on_terminal,
    printed,
    valid,
)
from tests.fork_server import Forked, finish
from tests.migrated_file import migrated_file

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LONG = "a lease with a rather long name, as people give them " * 3
UNREACHABLE = "postgresql://jane:hunter2@127.0.0.1:1/app"


@pytest.fixture
def busy(sqlite_url: str) -> str:
    """A database with a history whose words do not fit into a narrow line."""
    with holdfast.Client(sqlite_url) as client:
        client.lease(LONG, holder="worker number one on the first machine").acquire()
        client.leases.force_release(LONG, actor="jane", reason="the machine is being replaced " * 5)
    return sqlite_url


@pytest.mark.parametrize(
    ("command", "way", "columns"),
    [
        (("ls",), "terminal", 40), (("ls",), "COLUMNS", 30), (("history",), "COLUMNS", 40),
        (("history",), "COLUMNS", 30), (("check",), "COLUMNS", 30), (("doctor", "--timeout", "60"), "COLUMNS", 30),
        (("version",), "COLUMNS", 30),
    ],
)  # fmt: skip
def test_nothing_is_wider_than_a_narrow_terminal(busy: str, command: tuple[str, ...], way: str, columns: int) -> None:
    with holdfast.Client(busy) as client:
        client.lease(LONG, holder="worker number two on the second machine").acquire()
        if way == "terminal":
            text = COLOUR.sub("", on_terminal(*at(busy, *command), columns=columns))
        else:
            text = printed(*at(busy, *command), COLUMNS=str(columns))
    assert max(map(len, text.splitlines())) <= columns
    if command[0] in ("ls", "history"):
        assert len(text.splitlines()) == 2, "a row is one line"


@pytest.mark.parametrize("way", ["terminal", "COLUMNS"])
def test_wide_shows_all_of_a_row_in_one_line_on_any_terminal(busy: str, way: str) -> None:
    whole = printed(*at(busy, "history"))
    assert LONG in whole
    if way == "terminal":
        assert COLOUR.sub("", on_terminal(*at(busy, "history", "--wide"), columns=40)) == whole
    else:
        done = invoke(*at(busy, "history", "--wide"), COLUMNS="40")
        assert (done.stdout, done.stderr) == (whole, "")
        narrow = invoke(*at(busy, "history"), COLUMNS="40")
        assert narrow.stderr == "hidden: ended (UTC), held for, by, reason, fence; see --wide\n"


def test_every_listing_has_wide_beside_json_and_a_watch_has_both() -> None:
    listings = set()
    with click.Context(app) as context:
        for name in app.list_commands(context):
            command = app.get_command(context, name)
            assert command is not None
            members = command.commands if isinstance(command, click.Group) else {}
            for path, each in {name: command, **{f"{name} {word}": member for word, member in members.items()}}.items():
                options = {spelling for option in each.params for spelling in option.opts}
                if "--wide" in options:
                    assert "--json" in options
                    listings.add(path)
                assert "--watch" not in options or path in listings
    assert listings == {
        "ls", "history", "locks", "slots", "gates", "audit", "commands", "ops ls", "ops show", "ops recover",
        "ops replay", "reviews ls", "policy history", "relay ls", "relay parked", "driver ls", "schedules",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("room", "shown"),
    [
        (100, [30, 5, 40, 8]),  # all that they need
        (89, [30, 5, 40, 8]),
        (79, [30, 5, 30, 8]),  # what is too wide shares what is left
        (62, [22, 5, 21, 8]),
        (43, [12, 5, 12, 8]),  # the least of all
        (42, [17, 5, 16]),  # one is hidden
        (33, [12, 5, 12]),
        (20, [13, 5]),
        (13, [13]),
        (5, [5]),  # narrower than the least, because one is always shown
        (1, [1]),
    ],
)
def test_columns_share_the_line_and_the_rightmost_are_hidden(room: int, shown: list[int]) -> None:
    assert distribute([30, 5, 40, 8], [12, 5, 12, 8], room) == shown
    assert sum(shown) + 2 * (len(shown) - 1) <= room


def test_short_columns_keep_their_width_and_no_column_is_wider_than_its_content() -> None:
    for room in range(1, 120):
        widths = distribute([3, 60, 19, 9, 40], [3, 14, 19, 9, 24], room)
        assert all(width in (3, room) for width in widths[:1])
        assert widths[2:4] == [19, 9][: max(0, len(widths) - 2)]
        assert sum(widths) + 2 * (len(widths) - 1) == min(room, 139) or len(widths) < 5


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("nightly-import", 13, "nightl…import"), ("nightly-import", 8, "nigh…ort"), ("nightly-import", 3, "n…t"),
        ("nightly-import", 2, "n…"), ("nightly-import", 1, "…"),
        ("日本語の名前です", 9, "日本…です"), ("日本語の名前です", 8, "日本…す"), ("日本語の名前です", 2, "…"),
        ("e\u0301" * 9, 5, "e\u0301e\u0301…e\u0301e\u0301"),  # a mark stays with its letter
        ("ab\x1b[31mcdef\x1b", 9, "ab…ef\\x1b"),  # an escape is whole or not there
        ("[red]alert[/red]", 9, "[red…red]"),
    ],
)  # fmt: skip
def test_what_is_too_wide_is_shortened_in_the_middle(text: str, width: int, shown: str) -> None:
    assert shorten(text, width) == shown
    assert cell_len(shown) <= width


def test_a_terminal_that_knows_only_ascii_is_not_exceeded_either(sqlite_url: str) -> None:
    assert shorten("größe der Flächen", 12, ascii_only=True) == "gr...chen"
    with holdfast.Client(sqlite_url) as client:
        client.lease("größe " * 20).acquire()
        text = ask(*at(sqlite_url, "ls"), PYTHONIOENCODING="ascii", COLUMNS="60")
    assert max(map(len, text.splitlines())) <= 60
    assert "..." in text


def coloured(text: str) -> set[tuple[str, str]]:
    """The words that have a colour or are dim, with its code."""
    return {(code, word) for code, word in re.findall(r"\x1b\[(2|31|33)m([^\x1b]+)\x1b\[0m", text)}


def test_states_that_need_attention_stand_out_on_a_terminal(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.lease("partial", holder="failure").acquire().release()
        client.lease("sweep").acquire()
        client.leases.force_release("sweep", actor="jane", reason="forced")
        client.slots("gpu", 1).claim(owner="full")
        with pytest.raises(ZeroDivisionError):
            client.operation("charge:42").run(lambda: 1 // 0)
        with pytest.raises(KeyboardInterrupt):
            client.operation("publish:7").run(interrupt)
        asks = holdfast.governance.Review("who has seen the plan?")
        with holdfast.Client(sqlite_url, policy=lambda _: asks) as asked, pytest.raises(holdfast.PolicyDenied):
            asked.operation("bury:1").run(int)
        expected = {
            ("history",): {("31", "forced"), ("2", "released")},
            ("ops", "ls"): {("31", "failure"), ("33", "partial")},
            ("ops", "show", "publish:7"): {("33", "partial")},
            ("reviews", "ls"): {("33", "open")},
            ("reviews", "show", "1"): {("33", "open")},
            ("slots",): {("33", "1 of 1")},
        }
        for command, words in expected.items():
            more: dict[str, Any] = {"HOLDFAST_POOLS": "gpu=1"}
            assert coloured(on_terminal(*at(sqlite_url, *command), columns=120, **more)) == words, command
            plain = on_terminal(*at(sqlite_url, *command), columns=120, NO_COLOR="1", **more)
            assert set(re.findall(r"\x1b\[([0-9;]*)m", plain)) <= {"0", "1", "2"}
            assert "\x1b" not in printed(*at(sqlite_url, *command), COLUMNS="120", **more)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", [("ops", "show"), ("reviews", "show")])
def test_the_fields_of_one_record_are_wrapped_and_whole(sqlite_url: str, command: tuple[str, str]) -> None:
    key = holdfast.OperationKey(pipeline="etl", task="load", dataset="parcels " * 20, operation="upsert")
    asks = holdfast.governance.Review("who has seen the plan? " * 10)
    with holdfast.Client(sqlite_url) as client:
        client.operation(key).run(lambda: 7)
    with holdfast.Client(sqlite_url, policy=lambda _: asks) as client, pytest.raises(holdfast.PolicyDenied):
        client.operation("bury:1").run(int)
    which, wanted = (key.digest, "parcels " * 20) if command[0] == "ops" else ("1", "who has seen the plan? " * 10)
    text = printed(*at(sqlite_url, *command, which), COLUMNS="40")
    assert max(map(len, text.splitlines())) <= 40
    assert " ".join(wanted.split()) in " ".join(text.split())


def test_of_a_key_a_terminal_shows_the_beginning_and_a_pipe_everything(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.operation("charge:42").run(lambda: 7)
        [record] = client.operations.list()
    [row] = columns_of(printed(*at(sqlite_url, "ops", "ls"), COLUMNS="200"))
    assert row["key"] == record.key[:12]
    for more in ((), ("--wide",)):
        columns: dict[str, Any] = {"COLUMNS": "60"} if more else {}
        assert columns_of(printed(*at(sqlite_url, "ops", "ls", *more), **columns))[0]["key"] == record.key


def test_a_wide_terminal_shows_columns_with_colours_unless_told_otherwise(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.lease("sweep").acquire()
        coloured = on_terminal(*at(sqlite_url, "ls"), columns=120)
        plain = on_terminal(*at(sqlite_url, "ls"), columns=120, NO_COLOR="1")
        checked = on_terminal(*at(sqlite_url, "check"), columns=120, NO_COLOR="1")
    assert "\x1b[1m" in coloured
    assert len(coloured.splitlines()) == 2
    colours = {code for text in (plain, checked) for code in re.findall(r"\x1b\[([0-9;]*)m", text)}
    assert colours <= {"0", "1"}, "bold is no colour"
    assert "\x1b[32m" in on_terminal(*at(sqlite_url, "check"), columns=120)


def test_in_a_pipe_a_row_is_one_whole_line_without_escapes(busy: str) -> None:
    lines = ask(*at(busy, "history")).splitlines()
    assert len(lines) == 2
    assert LONG in lines[1]
    assert "the machine is being replaced " * 4 in lines[1]
    assert lines[1].rstrip() == lines[1]
    assert "\x1b" not in lines[1]


def test_names_with_markup_are_printed_as_they_are(sqlite_url: str) -> None:
    names = sorted(["[red]alert[/red]", "[/]", ":smile:", "[link=file:///x]y[/link]", "a\\[b", "日本語 é"])
    with holdfast.Client(sqlite_url) as client:
        for name in names:
            client.lease(name, holder=f"by {name}").acquire()
        piped, fitted = printed(*at(sqlite_url, "ls")), printed(*at(sqlite_url, "ls"), COLUMNS="200")
        assert {each["name"] for each in valid("ls", printed(*at(sqlite_url, "ls", "--json")))} == set(names)
        output = printed(*at(sqlite_url, "release", "[/]", "--force", "--reason", "[b]why", "--actor", "[i]me"))
        assert all(text in output for text in ("'[/]'", "by [/]", "[b]why", "[i]me"))
        for name in names:
            assert (piped.count(f"by {name} "), piped.count(name)) == (1, 2)
            assert fitted.count(name) == 2
        past = printed(*at(sqlite_url, "history", "[/]"))
        assert all(text in past for text in ("by [/]", "[b]why", "[i]me"))


def test_control_bytes_that_got_into_the_tables_are_escaped(sqlite_url: str) -> None:
    """Not through holdfast, which refuses them; but whoever reads a listing must not have a terminal taken over."""
    with holdfast.Client(sqlite_url) as client:
        client.lease("sweep").acquire().release()
    query(sqlite_url, "update holdfast_history set holder = %s, reason = %s", "a\x1b[2Jb\x9b\u202ec", "two\nlines\ttab")
    text = printed(*at(sqlite_url, "history"))
    assert "a\\x1b[2Jb\\x9b\\u202ec" in text
    assert "two\\nlines\\ttab" in text
    assert len(text.splitlines()) == 2
    [grant] = valid("history", printed(*at(sqlite_url, "history", "--json")))
    assert grant["reason"] == "two\nlines\ttab"


def test_an_encoding_that_lacks_a_character_is_no_error(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.lease("größe 日", ttl=600).acquire()
        assert "gr\\xf6\\xdfe \\u65e5" in ask(*at(sqlite_url, "ls"), PYTHONIOENCODING="ascii")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0 s"), (0.04, "0.0 s"), (9.94, "9.9 s"), (10, "10 s"), (59.4, "59 s"), (59.6, "1 m 00 s"),
     (61, "1 m 01 s"), (3599.7, "1 h 00 m"), (7325, "2 h 02 m"), (86400, "1 d 00 h"), (1e6, "11 d 13 h")],
)  # fmt: skip
def test_lengths_of_time_are_readable(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_what_is_not_there_is_a_dash() -> None:
    assert [clean(value) for value in (None, "", 0, "x")] == ["-", "-", "0", "x"]


@pytest.mark.parametrize(
    "command", [("ls",), ("ls", "--watch"), ("ls", "--json"), ("history",), ("check",), ("migrate", "status"),
                ("release", "x", "--force", "--reason", "y")],
)  # fmt: skip
def test_an_unreachable_database_is_one_line_without_the_password(command: tuple[str, ...]) -> None:
    done = call(*command, HOLDFAST_URL=UNREACHABLE)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "127.0.0.1:1" in done.stderr
    assert "hunter2" not in done.stderr


def test_url_goes_before_environment_before_file(tmp_path: Path) -> None:
    places = {name: f"sqlite:///{tmp_path / name}.db" for name in ("option", "environment", "file")}
    clients = [holdfast.Client(url) for url in places.values()]
    try:
        for name, client in zip(places, clients, strict=True):
            client.lease(name).acquire()

        def found(*arguments: str, **more: str) -> str:
            [lease] = json.loads(ask(*arguments, "ls", "--json", cwd=tmp_path, **more))
            return str(lease["name"])

        (tmp_path / "holdfast.toml").write_text(f'url = "{places["file"]}"\n')
        assert found() == "file"
        assert found(HOLDFAST_URL=places["environment"]) == "environment"
        assert found("--url", places["option"], HOLDFAST_URL=places["environment"]) == "option"
    finally:
        for client in clients:
            client.close()


def test_a_file_of_settings_that_others_may_have_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text(f'url = "{migrated_file(tmp_path / "x.db")}"\n')
    file.chmod(0o666)
    done = call("ls", cwd=tmp_path)
    assert (done.returncode, "use chmod o-w" in done.stderr) == (2, True), done.stderr
    file.chmod(0o644)
    assert call("ls", cwd=tmp_path).returncode == 0
    if os.geteuid() == 0:  # root alone may give files away
        os.chown(file, 65534, 65534)
        done = call("ls", cwd=tmp_path)
        assert (done.returncode, "belongs to the user with id 65534" in done.stderr) == (2, True), done.stderr


def test_a_file_of_secrets_that_all_can_read_is_reported(tmp_path: Path) -> None:
    for mode, is_reported in ((0o644, True), (0o640, False)):
        (tmp_path / "tokens").write_text("short")
        (tmp_path / "tokens").chmod(mode)
        for command in (("serve", "--tokens-file"), ("serve", "--key-file"), ("driver", "--port", "0", "--token-file")):
            done = call(*command, str(tmp_path / "tokens"), cwd=tmp_path, HOLDFAST_URL=f"sqlite:///{tmp_path}/x.db")
            assert done.returncode == 2
            assert ("every user of this machine can read the secrets" in done.stderr) is is_reported, done.stderr


def test_an_empty_setting_is_a_mistake_and_none_falls_back_to_the_next(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "holdfast.toml").write_text('url = ""')
    for arguments, more, where in (
        (("--url", "", "ls"), {"HOLDFAST_URL": f"sqlite:///{tmp_path}/x.db"}, tmp_path),
        (("ls",), {"HOLDFAST_URL": ""}, tmp_path),
        (("run", "job", "--", "true"), {"HOLDFAST_URL": ""}, tmp_path),
        (("run", "--url", "", "job", "--", "true"), {}, tmp_path),
        (("run", "--url=", "job", "--", "true"), {}, tmp_path),
        (("ls",), {"HOLDFAST_URL": f"sqlite:///{tmp_path}/x.db", "HOLDFAST_SCHEMA": ""}, tmp_path),
        (("ls",), {}, tmp_path / "empty"),
    ):
        done = call(*arguments, cwd=where, **more)
        assert (done.returncode, done.stdout) == (2, ""), "set and empty is a mistake"
        assert " is empty: " in done.stderr
    (tmp_path / "empty" / "holdfast.toml").unlink()
    (tmp_path / "empty" / "holdfast.toml").symlink_to("nowhere")
    done = call("run", "job", "--", "true", cwd=tmp_path / "empty")
    assert (done.returncode, done.stderr) == (2, "holdfast: holdfast.toml cannot be read: No such file or directory\n")
    assert not list(tmp_path.rglob("*.db"))
    assert call("ls", "--json", cwd=tmp_path, HOLDFAST_URL=migrated_file(tmp_path / "holdfast.db")).stderr == ""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b"url = ", "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
        (b"url = 5", "url in holdfast.toml must be a string"),
        (b'url = ["postgresql://jane:hunter2@db/app"]', "url in holdfast.toml must be a string"),
        (b'url = "mysql://jane:hunter2@db/app"', "unknown URL scheme"),
        (b'url = "postgresql://jane:hunter2@db:x/app"', "not a valid PostgreSQL URL"),
        (b'url = "sqlite:///app.db"\nschema = "No Such"', "schema must be"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_holdfast_toml_is_told_without_a_traceback_or_a_password(
    tmp_path: Path, text: bytes | None, wanted: str
) -> None:
    file = tmp_path / "holdfast.toml"
    if text is None:
        file.mkdir()
    else:
        file.write_bytes(text)
    migrated_file(tmp_path / "app.db")
    done = invoke("ls", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert wanted in done.stderr
    assert "hunter2" not in done.stderr


@pytest.mark.parametrize("arguments", [("nonsense",), ("ls", "--nonsense"), ("history", "--limit", "0"), ("ls", "a"),
                                       ("ls", "--every", "0"), ("history", "a\nb")])  # fmt: skip
def test_wrong_arguments_are_explained_with_exit_code_2(sqlite_url: str, arguments: tuple[str, ...]) -> None:
    done = invoke(*at(sqlite_url, *arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert "Error: " in done.stderr


def test_a_reader_that_goes_away_early_is_no_traceback(busy: str) -> None:
    process = subprocess.Popen(
        [SCRIPT, *at(busy, "history")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, problems = process.communicate(timeout=60)
    assert (process.returncode, problems) == (1, b"")


PRINTING = [("ls",), ("history", "--json"), ("migrate", "print"), ("--help",), ("driver",),
            ("do", "gate.open", "x", "--for", "5", "--reason", "y")]  # fmt: skip


@pytest.mark.parametrize("command", PRINTING, ids=" ".join)
def test_a_full_disk_under_stdout_is_one_line_and_exit_code_1(
    busy: str, tmp_path: Path, command: tuple[str, ...]
) -> None:
    with (
        holdfast.Client(busy) as client,
        Path("/dev/full").open("w") as full,
        Path("/dev/null").open() as nothing,
        (tmp_path / "errors").open("w") as errors,
    ):
        client.lease("sweep").acquire()
        words, streams = [SCRIPT, *at(busy, *command)], (nothing.fileno(), full.fileno(), errors.fileno())
        options: dict[str, Any] = {"buffered": True, "also": IMPORTED, "cwd": tmp_path, "env": environment()}
        code = Forked(PROGRAM, *words, streams=streams, **options).wait(PATIENCE)
    text = (tmp_path / "errors").read_text()
    assert (code, text) == (1, "holdfast: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("command", ["history", "check"])
def test_a_width_that_is_none_is_as_if_nobody_had_asked_for_one(busy: str, command: str) -> None:
    plain = printed(*at(busy, command))
    assert [printed(*at(busy, command), COLUMNS=columns) for columns in ("0", "²")] == [plain, plain]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--url", "sqlite:///a.db", "ls"), "cannot open sqlite:///a.db: the working folder is gone"),
        (("--url", "sqlite:///a.db", "run", "x", "--", "true"), "cannot open sqlite:///a.db: the working folder is"),
        (("driver", "ls"), "the working folder was removed: change to one that exists"),
    ],
)  # fmt: skip
def test_a_working_folder_that_is_gone_is_told(tmp_path: Path, arguments: tuple[str, ...], wanted: str) -> None:
    (tmp_path / "gone").mkdir()
    program = f"import os; os.rmdir(os.getcwd())\n{PROGRAM}"
    done = finish(
        program, SCRIPT, *arguments, timeout=PATIENCE, cwd=tmp_path / "gone", env=environment(), also=IMPORTED
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"holdfast: {wanted}")
    assert len(done.stderr.splitlines()) == 1


def test_it_also_runs_as_a_module(sqlite_url: str) -> None:
    command = [sys.executable, "-m", "holdfast", *at(sqlite_url, "check")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment())
    assert (done.returncode, done.stderr) == (0, "")
    assert "7/7" in done.stdout


def test_the_state_of_the_tables_as_json_is_as_its_schema_says(sqlite_url: str) -> None:
    printed(*at(sqlite_url, "ls"))
    assert all(
        row["applied_at"] for row in valid("migrate-status", printed(*at(sqlite_url, "migrate", "status", "--json")))
    )
    printed(*at(sqlite_url, "migrate", "down", "--to", "0", "--yes", "--reason", "not needed"))
    done = invoke(*at(sqlite_url, "migrate", "status", "--json"))
    assert done.returncode == 1
    assert not any(row["applied_at"] for row in valid("migrate-status", done.stdout))


def test_every_schema_is_one_and_refuses_what_it_does_not_know() -> None:
    for path in sorted(SCHEMAS.glob("*.schema.json")):
        schema = json.loads(path.read_text(encoding="utf-8"))
        jsonschema.Draft202012Validator.check_schema(schema)
        wrongs: tuple[Any, ...] = ([{}], {}, "x")
        for wrong in wrongs:
            assert not jsonschema.Draft202012Validator(schema).is_valid(wrong), path.name


def test_every_command_and_option_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")}
    with click.Context(app) as context:
        for name in app.list_commands(context):
            command = app.get_command(context, name)
            assert command is not None
            group = command.commands.values() if isinstance(command, click.Group) else [command]
            for option in (parameter for each in group for parameter in each.params):
                for spelling in option.opts if isinstance(option, click.Option) else []:
                    assert spelling in sections[name], f"{name} {spelling}"


def test_every_command_is_in_the_list() -> None:
    """In groups, with what most people need first."""
    listed = ask("--help").partition("Run work:")[2]
    assert [line.split()[0] for line in listed.splitlines() if line.startswith("  ")] == list(COMMANDS)
    assert next(iter(COMMANDS)) == "run"
    titles = [line.rstrip(":") for line in listed.splitlines() if line and not line.startswith(" ")]
    assert ["Run work", *titles] == list(GROUPS)


@pytest.mark.parametrize(
    "command", [(), *((name,) for name in COMMANDS), *(("migrate", each) for each in ("up", "down", "status", "print"))]
)
def test_every_help_is_whole_and_has_an_example(command: tuple[str, ...]) -> None:
    text = printed(*command, "--help")
    assert "Usage: holdfast" in text
    listed = text.partition("Run work:" if not command else "Commands:")[2]
    assert "..." not in listed, "each fits a line in the list"
    assert not re.search(r"^ {3,}", listed, re.MULTILINE), "none is continued on a second line"
    examples = text.partition("Example")[2]
    assert re.search(rf"^ +holdfast .*\b{' '.join(command)}", examples, re.MULTILINE)
