"""holdfast top in a real terminal: sections, keys, a release, a lost database, and the terminal afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import holdfast
from tests.children import Child, eventually, query
from tests.cli.command import SCRIPT, at, call, environment
from tests.cli.tmux import Tmux, needs_tmux
from tests.conftest import fresh, server

LONG: dict[str, Any] = {"ttl": 86400.0}
POOLS = "gpu=2,idle=4"
TOP = "holdfast top  at "
"""The beginning of the view; the command line in the shell has only the first two words."""
LEADER = """
    import sys, holdfast
    holdfast.Client(sys.argv[1]).elector("scheduler", ttl=3600).run(lambda term: term.stopping.wait())
"""
WAITER = """
    import sys, holdfast
    client = holdfast.Client(sys.argv[1])
    {handle}.acquire(timeout=None)
"""
HELD = "scheduler", "sweep", "reindex", "(agent, 7)", "gpu", "publish:7", "backup"
pytestmark = needs_tmux


def die() -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def crowded() -> Iterator[str]:
    """A database with rows in every section, a standby, and waiters of a lease and of a lock."""
    url = fresh()
    with holdfast.Client(url) as client, ExitStack() as stack:
        client.lease("sweep", holder="worker-2").acquire().release()
        client.lease("sweep", holder="worker-3", **LONG).acquire()
        client.lease("reindex", holder="indexer", **LONG).acquire()
        for number in (1, 2):
            client.slots("gpu", 2, **LONG).claim(owner=f"session-{number}")
        query(url, "update holdfast.lease set holder = e'\\x1b[2Jhostile' where name = 'reindex'")
        client.lock(("agent", 7)).acquire()
        with pytest.raises(KeyboardInterrupt):
            client.operation("publish:7").run(die)
        client.schedule("backup", 3600).run_due(lambda _: None)
        for program in (
            LEADER, LEADER, WAITER.format(handle="client.lease('sweep')"),
            WAITER.format(handle="client.lock(('agent', 7))"),
        ):  # fmt: skip
            stack.enter_context(Child(program, url))
        eventually(
            lambda: (
                all(getattr(client.leases.get(name), "waiting", 0) == 1 for name in ("scheduler", "sweep"))
                and any(lock.blocked_by for lock in client.locks.list())
            ),
            "all of them wait",
        )
        yield url


def top(terminal: Tmux, *options: str) -> str:
    terminal.run(SCRIPT, "top", *options)
    return terminal.sees(TOP)


def lines_of(screen: str) -> list[str]:
    return [line.strip() for line in screen.splitlines() if line.strip()]


def row(screen: str, name: str) -> str:
    """The line of a row; fails unless there is one."""
    [line] = [line for line in screen.splitlines() if line.lstrip("> ").startswith(name)]
    return line


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_it_shows_all_sections_a_row_a_line_at_any_width(crowded: str, tmp_path: Path, columns: int) -> None:
    with Tmux(tmp_path, columns=columns, lines=45, HOLDFAST_URL=crowded, HOLDFAST_POOLS=POOLS) as terminal:
        screen = top(terminal)
        for title in ("Leaders 1", "Leases 2", "Locks 2", "Slots 3", "Operations 1", "Schedules 1"):
            assert title in screen
        for name in HELD:
            assert any(name in line for line in lines_of(screen)), name
        assert "vm" in row(screen, "scheduler") or columns < 80
        assert row(screen, "└ (agent, 7)").split()[4] == "waits"
        assert "\\x1b[2" in row(screen, "reindex"), "what could move the cursor is escaped"
        if columns >= 120:
            assert "2 of 2" in screen
            assert "0 of 4" in row(screen, "idle")
            assert "partial" in row(screen, "publish:7")
        assert "> scheduler" in screen, "the first row is selected"


def test_it_follows_the_size_of_its_terminal(crowded: str, tmp_path: Path) -> None:
    with Tmux(tmp_path, columns=60, lines=12, HOLDFAST_URL=crowded) as terminal:
        assert "fence" not in top(terminal)
        terminal.resize(200, 45)
        assert "Schedules" in terminal.sees("fence", "> scheduler", "backup")
        terminal.resize(40, 12)
        terminal.keys("End")
        terminal.sees("> backup")


def test_keys_select_sort_filter_and_open_a_row(crowded: str, tmp_path: Path) -> None:
    with Tmux(tmp_path, columns=120, lines=45, HOLDFAST_URL=crowded) as terminal:
        top(terminal)
        terminal.keys("?")
        terminal.sees("sort the section of the selected row")
        terminal.keys("Escape", "2")
        screen = terminal.sees("> reindex")
        assert "scheduler" not in screen
        assert screen.index("reindex") < screen.index("sweep")
        terminal.keys("s", "r")
        screen = terminal.sees("lease ▼")
        assert screen.index("sweep") < screen.index("reindex")
        terminal.keys("0", "/", "AGENT waits", "Enter")  # a filter has every word, in any case
        terminal.misses("sweep")
        assert "└ (agent, 7)" in terminal.sees("filter AGENT waits")
        terminal.keys("/", "C-u", "nothing of the kind", "Enter")
        terminal.sees("no row has 'nothing of the kind'")
        terminal.keys("Escape")
        terminal.sees("sweep")
        terminal.keys("2", "/", "sweep", "Enter")
        terminal.misses("reindex")
        terminal.keys("Enter")
        screen = terminal.sees("lease sweep", "Earlier holders")
        assert "released" in screen
        assert "worker-2" in screen
        terminal.keys("Escape")
        terminal.sees("> sweep")


def test_a_long_list_scrolls_and_what_is_selected_is_seen(sqlite_url: str, tmp_path: Path) -> None:
    with holdfast.Client(sqlite_url) as client, Tmux(tmp_path, lines=20, HOLDFAST_URL=sqlite_url) as terminal:
        for number in range(300):
            client.lease(f"lease-{number:03}", **LONG).acquire()
        assert "lease-030" not in top(terminal)
        terminal.keys("End")
        assert "lease-200" not in terminal.sees("> lease-299", "  lease  ")
        terminal.keys("PPage", "PPage")
        terminal.misses("lease-299")
        terminal.keys("Home")
        terminal.sees("> lease-000", "Leases  300 leases")
        terminal.keys("Down", "j", "Up")
        terminal.sees("> lease-001")
        terminal.keys("s", "r")
        terminal.sees("lease ▼", "> lease-001")
        terminal.keys("Home")
        terminal.sees("> lease-299")


@pytest.mark.parametrize(
    ("section", "texts"),
    [
        ("1", ("lease scheduler", "waiters", "Earlier holders")),
        ("3", ("lock (agent, 7)", "This lock, and all of its session", "waits")),
        ("4", ("lease @slot:gpu:1", "session-1")),
        ("5", ("operation publish:7", "effect_started")),
        ("6", ("schedule backup", "Runs, the latest first", "success")),
    ],
    ids=["leaders", "locks", "slots", "operations", "schedules"],
)
def test_enter_opens_a_row_of_each_section(crowded: str, tmp_path: Path, section: str, texts: tuple[str, ...]) -> None:
    with Tmux(tmp_path, columns=120, lines=45, HOLDFAST_URL=crowded) as terminal:
        top(terminal)
        terminal.keys(section, "Enter")
        terminal.sees(*texts)


def test_a_lease_is_released_with_a_reason_where_the_view_may_operate(postgres_url: str, tmp_path: Path) -> None:
    with holdfast.Client(postgres_url) as client:
        client.lease("sweep", holder="worker-3", **LONG).acquire()
        with Tmux(tmp_path, HOLDFAST_URL=postgres_url) as terminal:
            top(terminal)
            terminal.keys("x")
            terminal.sees("this one only watches")
            terminal.keys("q")
            terminal.misses(TOP)
            top(terminal, "--operate", "--actor", "jane")
            terminal.keys("x", "Enter")
            terminal.sees("a release needs a reason")
            terminal.keys("x", "q is a key, and here it is a letter", "Escape")
            terminal.misses("Reason:")
            assert client.leases.get("sweep") is not None
            terminal.keys("x", "host is gone", "Enter")
            terminal.sees("released lease 'sweep', held by worker-3; recorded: jane: host is gone", "no lease is held")
        [grant] = client.leases.history("sweep")
        assert (grant.outcome, grant.actor, grant.reason) == ("forced", "jane", "host is gone")
        [entry] = [entry for entry in client.audit.list() if entry.action == "lease.release"]
        assert (entry.actor, entry.reason, entry.outcome) == ("jane", "host is gone", "done")


def test_a_lease_that_has_changed_hands_is_not_released(postgres_url: str, tmp_path: Path) -> None:
    with holdfast.Client(postgres_url) as client:
        first = client.lease("sweep", holder="worker-3", **LONG).acquire()
        with Tmux(tmp_path, HOLDFAST_URL=postgres_url) as terminal:
            top(terminal, "--operate", "--every", "3600")  # it does not see the next holder
            terminal.keys("x", "host is gone")
            first.release()
            client.lease("sweep", holder="worker-4", **LONG).acquire()
            terminal.keys("Enter")
            terminal.sees("nothing was released: 'sweep' has changed hands, worker-4 holds it")
        assert client.leases.get("sweep") is not None


FAILS = """
    import holdfast.cli
    from holdfast.cli.top_view import TopView

    def fail(self, key):
        raise RuntimeError("in the midst of a key")

    TopView._press = fail
    holdfast.cli.main()
"""


@pytest.mark.parametrize(
    ("way", "code"), [("q", 0), ("C-c", 0), ("SIGTERM", 143), ("an error", 1)], ids=["q", "ctrl-c", "term", "error"]
)
def test_the_terminal_is_as_it_was_however_it_ends(sqlite_url: str, tmp_path: Path, way: str, code: int) -> None:
    script = tmp_path / "fails.py"
    script.write_text(dedent(FAILS), encoding="utf-8")
    program = f"{sys.executable} {script}" if way == "an error" else SCRIPT
    with Tmux(tmp_path, HOLDFAST_URL=sqlite_url) as terminal:
        terminal.keys(f"stty -g > {tmp_path}/before; {program} top; echo code $?; stty -g > {tmp_path}/after", "Enter")
        terminal.sees(TOP)
        assert terminal.shows("alternate_on") == "1"
        if way == "SIGTERM":
            os.kill(terminal.pid("top"), signal.SIGTERM)
        else:
            terminal.keys("j" if way == "an error" else way)
        screen = terminal.sees(f"code {code}")
        assert ("RuntimeError: in the midst of a key" in screen) == (way == "an error")
        assert (terminal.shows("alternate_on"), terminal.shows("cursor_flag")) == ("0", "1")
        after = tmp_path / "after"
        eventually(lambda: after.exists() and after.read_text(encoding="ascii"), "stty has ended")
        assert after.read_text(encoding="ascii") == (tmp_path / "before").read_text(encoding="ascii")


def test_it_ends_with_its_terminal(sqlite_url: str, tmp_path: Path) -> None:
    with Tmux(tmp_path, HOLDFAST_URL=sqlite_url) as terminal:
        top(terminal)
        pid = terminal.pid("top")
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "it has ended")


def test_a_reason_that_is_too_long_is_reported(sqlite_url: str, tmp_path: Path) -> None:
    with holdfast.Client(sqlite_url) as client, client.lease("sweep"):
        with Tmux(tmp_path, HOLDFAST_URL=sqlite_url) as terminal:
            top(terminal, "--operate")
            terminal.keys("x", "because " * 130, "Enter")
            terminal.sees("reason must have 1 to 1000 characters", "> sweep")
        assert client.leases.get("sweep") is not None


def test_a_shell_stops_and_resumes_it(sqlite_url: str, tmp_path: Path) -> None:
    with Tmux(tmp_path, HOLDFAST_URL=sqlite_url) as terminal:
        top(terminal)
        terminal.keys("C-z")
        terminal.misses(TOP)
        assert (terminal.shows("alternate_on"), terminal.shows("cursor_flag")) == ("0", "1")
        terminal.keys("echo shell $((1 + 1)); fg", "Enter")
        terminal.sees(TOP)
        terminal.keys("q")
        terminal.sees("shell 2")


def test_a_lost_database_is_reported_and_the_view_goes_on_when_it_is_back(postgres_url: str, tmp_path: Path) -> None:
    name = postgres_url.rpartition("/")[2]
    with Tmux(tmp_path, HOLDFAST_URL=postgres_url) as terminal:
        top(terminal, "--every", "0.1")
        try:
            server().execute(f"alter database {name} allow_connections false")
            server().execute(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'")
            terminal.sees("lost  ")
            terminal.keys("?")
            terminal.sees("quit; also Ctrl-C")
            terminal.keys("Escape")
        finally:
            server().execute(f"alter database {name} allow_connections true")
        terminal.misses("lost  ")
        with holdfast.Client(postgres_url) as client, client.lease("sweep"):
            terminal.sees("sweep")


def test_a_database_that_does_not_answer_is_reported_and_the_view_can_be_left(
    tmp_path: Path, postgres_url: str
) -> None:
    with Tmux(tmp_path, HOLDFAST_URL=postgres_url) as terminal:
        top(terminal, "--every", "0.1")
        server().pause()
        try:
            terminal.sees("the database has not answered for")
            terminal.keys("q")
            terminal.misses(TOP)
        finally:
            server().resume()


def test_a_role_that_may_not_read_a_section_sees_the_others(postgres_url: str, tmp_path: Path) -> None:
    with holdfast.Client(postgres_url) as client, client.lease("sweep"):
        query(postgres_url, "alter function holdfast.schedule_look rename to schedule_looked")
        with Tmux(tmp_path, HOLDFAST_URL=postgres_url) as terminal:
            assert "is not complete: run 'holdfast" in top(terminal)
            terminal.sees("> sweep")


@pytest.mark.parametrize("how", ["pipe", "no input", "dumb"])
def test_without_a_terminal_it_refuses_and_says_what_to_use(sqlite_url: str, tmp_path: Path, how: str) -> None:
    if how == "pipe":
        assert "top needs a terminal" in call("top").stderr, "before it looks for a database"
        done = call(*at(sqlite_url, "top"))
        assert (done.returncode, done.stdout) == (2, "")
        assert "top needs a terminal" in done.stderr
        assert "holdfast ls --watch" in done.stderr
        return
    with Tmux(tmp_path, HOLDFAST_URL=sqlite_url) as terminal:
        terminal.keys(f"{SCRIPT} top < /dev/null" if how == "no input" else f"TERM=dumb {SCRIPT} top", "Enter")
        terminal.keys("echo code $?", "Enter")
        terminal.sees("top needs a terminal", "code 2")


def test_other_commands_do_not_import_it() -> None:
    """Nor does completion, which imports the module of the command to know its options."""
    code = (
        "import sys, click, holdfast.cli.leases, holdfast.cli.top;"
        "print([name for name in sys.modules if name.startswith(('rich', 'holdfast.cli.top_', 'holdfast.cli.full'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment())
    assert done.stdout == "[]\n"
