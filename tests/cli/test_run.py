"""holdfast run: what it says and passes on. How its processes end is in the tests beside this one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.cli.run_options import parse
from holdfast.testing import Proxy
from tests.children import NONE, PATIENCE, rows
from tests.cli.command import SCRIPT, call, environment, invoke
from tests.cli.runs import JUMP, Run, command_lines, finish, gone


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -USR1 $$", 128 + 10), ("kill -9 $$", 128 + 9)]
)
def test_the_exit_code_is_the_commands_own(sqlite_url: str, script: str, code: int) -> None:
    done = finish(sqlite_url, "job", "--", "sh", "-c", script)
    assert (done.returncode, done.stderr) == (code, "")
    assert rows(sqlite_url) == NONE


def test_a_command_that_cannot_be_started_is_127_or_126_as_in_a_shell(sqlite_url: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no program")
    (tmp_path / "closed").mkdir(0)  # of a user who is not root, who finds nothing in it
    path = f"{tmp_path / 'closed'}:{os.environ['PATH']}"
    for command, code in ((b"no-such-\xff", 127), (str(tmp_path / "data"), 126), (str(tmp_path), 126), ("", 127)):
        options: dict[str, Any] = {"errors": "surrogateescape"} if isinstance(command, bytes) else {}
        done = finish(sqlite_url, "job", "--", command, more={"PATH": path}, **options)
        assert done.returncode == code
        assert done.stderr.startswith(f"holdfast: cannot run {os.fsdecode(command)}: ")
        assert done.stderr.count("\n") == 1
    assert rows(sqlite_url) == NONE


def test_a_script_without_a_first_line_is_run_by_sh(sqlite_url: str, tmp_path: Path) -> None:
    """In a crontab it was, and adding holdfast must not change that."""
    (tmp_path / "job.sh").write_text("echo $1; exit 4")
    (tmp_path / "job.sh").chmod(0o755)
    done = finish(sqlite_url, "job", "--", "./job.sh", "argument", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (4, "argument\n", "")


def test_of_two_the_second_says_who_holds_it_and_until_when(sqlite_url: str) -> None:
    with Run(sqlite_url) as run:
        family = run.pids()
        done = finish(sqlite_url, "job", "--", "echo", "never")
        assert (done.returncode, done.stdout) == (75, "")
        assert f"lease 'job' is held by {socket.gethostname()}:{run.pid}:" in done.stderr
        assert " UTC" in done.stderr
        assert done.stderr.count("\n") == 1
        skipped = finish(sqlite_url, "--skip", "job", "--", "echo", "never")
        assert (skipped.returncode, skipped.stdout, skipped.stderr) == (0, "", ""), "cron would mail it"
        waits = ("--timeout", "0.2", "job", "--", "echo", "never")
        assert any(finish(sqlite_url, *waits).returncode == 75 for _ in range(5)), "1 when the database took a second"
        run.terminate()
        assert run.wait() == 128 + signal.SIGTERM
        gone(family)
    assert finish(sqlite_url, "job", "--", "echo", "now").stdout == "now\n"


@pytest.mark.parametrize(
    ("engine", "patience"), [("sqlite", ("--wait",)), ("postgres", ("--timeout", "600"))], ids=["sqlite", "postgres"]
)
def test_a_waiting_run_starts_when_the_lease_is_released(
    request: pytest.FixtureRequest, engine: str, patience: tuple[str, ...]
) -> None:
    url = request.getfixturevalue(f"{engine}_url")
    with Run(url) as first:
        family = first.pids()
        with Run(url, *patience, command=("echo", "mine")) as second:
            second.waits()
            first.terminate()
            assert second.line() == "mine"
            assert not any(map(os.path.exists, (f"/proc/{pid}/exe" for pid in family)))
            assert second.wait() == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("job",),
        ("job", "--"),
        ("job", "true"),
        ("job", "true", "--skip"),
        ("--skip", "job", "true", "-c"),
        ("nightly", "import", "--", "true"),
        ("--ttl=5", "nightly", "import", "--", "true"),
        ("--ttl", "soon", "job", "--", "true"),
        ("--ttl", "0.01", "job", "--", "true"),
        ("--ttl", "nan", "job", "--", "true"),
        ("--timeout", "-1", "job", "--", "true"),
        ("--wait", "--skip", "job", "--", "true"),
        ("--skip", "--timeout", "1", "job", "--", "true"),
        ("--no-such-option", "job", "--", "true"),
        ("x" * 201, "--", "true"),
        (b"\xff", "--", "true"),
        ("--url", "mysql://host/name", "job", "--", "true"),
        ("--schema", "no schema", "job", "--", "true"),
    ],
)
def test_a_wrong_call_is_2_and_starts_nothing(sqlite_url: str, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    words = ["run", *(f"touch {tmp_path}/x" if each == "true" else os.fsdecode(each) for each in arguments)]
    in_usual_form = parse(words) is not None  # if not, click reads it
    done = finish(sqlite_url, *words[1:]) if in_usual_form else invoke(*words, HOLDFAST_URL=sqlite_url)
    assert done.returncode == 2
    assert done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_belongs_to_the_command_is_never_taken_for_an_option(sqlite_url: str) -> None:
    """Without -- it cannot be told apart, and is refused with the right form; after it nothing is read."""
    done = finish(sqlite_url, "job", "echo", "--skip")
    assert (done.returncode, done.stdout) == (2, "")
    assert "NAME -- COMMAND" in done.stderr
    done = finish(sqlite_url, "nightly", "import", "--", "echo")
    assert (done.returncode, done.stdout) == (2, "")
    assert "only one NAME may stand before --" in done.stderr
    for options in ((), ("--ttl=500",)):  # the second is click's to read
        done = finish(sqlite_url, *options, "job", "--", "echo", "--skip", "--help", "--", "-h")
        assert (done.returncode, done.stdout, done.stderr) == (0, "--skip --help -- -h\n", "")


def test_the_command_finds_the_locale_that_holdfast_was_given(sqlite_url: str) -> None:
    """Python sets LC_CTYPE for itself when there is none but C, and a child would sort and print by another locale."""
    for given in ([], ["LC_CTYPE=C"], ["LC_CTYPE=C.UTF-8"]):
        bare = ["env", "-i", f"PATH={os.environ['PATH']}", f"HOLDFAST_URL={sqlite_url}", *given]
        done = subprocess.run(
            [*bare, SCRIPT, "run", "job", "--", "env"], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert [each for each in done.stdout.splitlines() if each.startswith("LC_")] == given


def test_a_database_that_is_not_there_is_1_with_one_line_and_no_secret(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{closed.getsockname()[1]}/app"
        for url in (f"sqlite:///{tmp_path}/no/folder.db", f"postgresql://app:s3cret@{place}"):
            done = finish(url, "job", "--", "echo", "never")
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr.startswith("holdfast: ")
            assert "s3cret" not in done.stderr
            assert "Traceback" not in done.stderr


def test_a_password_in_an_argument_is_warned_of(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"postgresql://app:s3cret@127.0.0.1:{closed.getsockname()[1]}/app"
        done = call("--url", url, "run", "job", "--", "true", cwd=tmp_path)
        assert done.returncode == 1
        assert "every user of this machine can see the password in --url" in done.stderr
        assert "s3cret" not in done.stderr


def test_no_secret_reaches_a_process_list_or_a_log(postgres_url: str, tmp_path: Path) -> None:
    """The password and the token: in the environment of the command, and nowhere else."""
    url = postgres_url.replace("postgres@", "postgres:s3cret@")  # which this server does not ask for
    command = ("sh", "-c", "echo $$; echo $HOLDFAST_TOKEN; sleep 1000")
    with Run(url, "--ttl", "601", command=command, own=True) as run:
        run.pids()
        token = run.line()
        lines = command_lines()
        assert "run --ttl 601 job" in lines
        assert "s3cret" not in lines
        assert token not in lines
        run.terminate()
        assert run.wait() == 128 + signal.SIGTERM
    jump = tmp_path / "jump"
    with (
        Proxy(url) as way,
        Run(way.url, "--ttl", "600", command=command, before=JUMP, more={"JUMP": str(jump)}) as run,
    ):
        run.pids()
        token = run.line()
        way.reset()
        jump.touch()
        run.wait()
        errors = run.errors()
        assert "did not answer" in errors or "while this process was paused" in errors, "by the first to notice"
        assert "the command was ended" in errors
        assert "s3cret" not in errors
        assert token not in errors


def test_the_command_finds_the_lease_in_its_environment_wherever_it_goes(tmp_path: Path) -> None:
    """A relative file is made absolute: the command may look from another folder."""
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    (folder := tmp_path / "50% sure?").mkdir()
    done = finish("sqlite:///app.db", "job", "--", sys.executable, "-c", show, cwd=folder, more={"KEPT": "yes"})
    variables = json.loads(done.stdout)
    assert (variables["HOLDFAST_LEASE"], variables["HOLDFAST_SCHEMA"], variables["KEPT"]) == ("job", "holdfast", "yes")
    with holdfast.Client(variables["HOLDFAST_URL"]) as client:
        [ended] = client.leases.history("job")
    assert variables["HOLDFAST_FENCE"] == str(ended.fence)
    assert len(variables["HOLDFAST_TOKEN"]) == 36
    assert [each.name for each in folder.glob("*.db")] == ["app.db"]


def test_arguments_and_environment_arrive_as_they_are(sqlite_url: str) -> None:
    """Spaces, newlines, bytes that are no UTF-8, and more of them than fits into a pipe."""
    given = [b"two words", b"two\nlines", b"\xff\xfe", b"", b"--", b"-x", "ä".encode()]
    show = "import os, sys; print(list(map(os.fsencode, sys.argv[1:])), len(os.environb[b'BIG3']), os.environb[b'RAW'])"
    env = {os.fsencode(name): os.fsencode(value) for name, value in environment(HOLDFAST_URL=sqlite_url).items()}
    env |= {b"RAW": b"\xfe=\n\xff"} | {b"BIG%d" % i: b"x" * 100_000 for i in range(4)}
    command: list[str | bytes] = [SCRIPT, "run", "job", "--", sys.executable, "-c", show, *given]
    done = subprocess.run(command, env=env, capture_output=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().strip() == f"{given} 100000 {env[b'RAW']!r}"


def test_standard_streams_are_the_commands(sqlite_url: str) -> None:
    done = finish(sqlite_url, "job", "--", "sh", "-c", "cat; echo wrong >&2", stdin=None, input="given\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "given\n", "wrong\n")
    closed = "import os\nfor n in 0, 1, 2:\n try: os.fstat(n)\n except OSError: open(%r, 'a').write(str(n))"
    script = f'exec {SCRIPT} run job -- {sys.executable} -c "$0" <&- >&- 2>&-'
    left = Path(sqlite_url.removeprefix("sqlite:///")).with_name("closed")
    ended = subprocess.run(
        ["sh", "-c", script, closed % str(left)],
        timeout=PATIENCE,
        check=False,
        env=environment(HOLDFAST_URL=sqlite_url),
    )
    assert (ended.returncode, left.read_text()) == (0, "012")


def test_what_is_said_to_a_closed_stderr_does_not_end_up_in_a_file_of_ours(sqlite_url: str, tmp_path: Path) -> None:
    with Run(sqlite_url) as run:
        run.pids()
        script = f"exec {SCRIPT} run job -- echo never 2>&-"
        env = environment(HOLDFAST_URL=sqlite_url)
        refused = subprocess.run(["sh", "-c", script], capture_output=True, timeout=PATIENCE, check=False, env=env)
        assert (refused.returncode, refused.stdout) == (75, b"")
        assert not [each for each in tmp_path.iterdir() if b"is held by" in each.read_bytes()]


def test_a_pipe_that_nobody_reads_ends_the_command_as_it_would_without_us(sqlite_url: str) -> None:
    """Python ignores SIGPIPE; a program that inherited that would go on writing into the void."""
    script = f"({SCRIPT} run job -- yes; echo $? >&2) | head -1"
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False,
        env=environment(HOLDFAST_URL=sqlite_url),
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("y\n", f"{128 + signal.SIGPIPE}\n")


def test_run_on_sqlite_imports_no_driver_no_event_loop_and_no_console_library(sqlite_url: str) -> None:
    look = "import sys\nfrom holdfast.cli import main\ntry: main()\nfinally: print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", look, "run", "--wait", "job", "--", "true"], capture_output=True, text=True,
        timeout=PATIENCE, check=True, env=environment(HOLDFAST_URL=sqlite_url),
    )  # fmt: skip
    assert "sqlite3" in (found := set(done.stdout.split()))
    assert not found & {"asyncio", "click", "psycopg", "rich", "subprocess", "tomllib"}


def test_help_and_completion_go_through_click(tmp_path: Path) -> None:
    done = call("run", "--help")
    for word in ("-- COMMAND", "HOLDFAST_TOKEN", "128 + n", "75 ", "Examples", "--skip", "alembic upgrade head"):
        assert word in done.stdout
    completed = call(
        _HOLDFAST_COMPLETE="fish_complete", COMP_LINE="holdfast run --t", HOLDFAST_URL=f"sqlite:///{tmp_path}/a.db"
    ).stdout
    assert [line.split("\t")[1] for line in completed.splitlines()] == ["--ttl", "--timeout"]
    assert not (tmp_path / "a.db").exists()


def test_the_database_may_be_named_before_and_after_the_word_run(sqlite_url: str) -> None:
    for arguments in (("--url", sqlite_url, "run"), ("run", "--url", sqlite_url), ("run", f"--url={sqlite_url}")):
        assert call(*arguments, "job", "--", "true").stderr == ""
