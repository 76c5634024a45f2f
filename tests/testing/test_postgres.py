"""The PostgreSQL harness, on every PostgreSQL of the machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from holdfast.testing import Postgres, available, binaries, child_watchdog, server_folder
from holdfast.testing.server_user import server_user

pytestmark = pytest.mark.skipif(not available(), reason="there is no PostgreSQL on this machine")

_OWNER = """
import sys, time
from holdfast.testing import Postgres
postgres = Postgres.create()
{then}
print(postgres.pid, postgres.folder, flush=True)
{end}
"""


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    """One for all that leave it running; closed while it stands still, which must not hold that up."""
    with Postgres.create() as server:
        yield server
        server.pause()


def eventually(condition: Callable[[], bool], *, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def lives(pid: int) -> bool:
    """Whether a process is there and has not ended; one that was orphaned may wait for ever to be reaped."""
    return any(pid == other and state not in "ZX" for other, _, state in child_watchdog.list_processes())


def spawn_owner(then: str = "", end: str = "sys.stdin.read()") -> tuple[subprocess.Popen[str], int, Path]:
    """A process that has a server of its own, the pid of that server and its folder."""
    program = _OWNER.format(then=then, end=end)
    owner = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid, folder = owner.stdout.readline().split()
    return owner, int(pid), Path(folder)


@pytest.mark.parametrize("major", available())
def test_starts_each_version_of_the_machine(major: int) -> None:
    with Postgres.create(major=major) as server:
        assert server.execute("select current_setting('server_version_num')::int / 10000") == [(major,)]
        assert server.is_primary
        assert server.execute("show fsync") == [("off",)]
        folder, pid = server.folder, server.pid
    assert not folder.exists()
    assert not lives(pid)


def test_takes_a_folder_of_programs_and_settings_and_keeps_a_given_folder(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    programs = available()[max(available())]
    if server_user().uid != os.geteuid():
        pytest.skip("the server's account cannot enter this test's folder")
    with Postgres.create(folder, bin=programs, durable=True, settings={"work_mem": "7MB"}) as server:
        assert server.execute("show fsync") == [("on",)]
        assert server.execute("show work_mem") == [("7MB",)]
        assert server.data.parent == folder
    assert (folder / "data" / "PG_VERSION").exists()


def test_says_what_it_cannot_find(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match=r"no PostgreSQL 7 on this machine \(found: .*holdfast\[testing\]"):
        Postgres.create(major=7)
    with pytest.raises(ValueError, match=r"bin='.*': there is no PostgreSQL server in this folder"):
        Postgres.create(bin=tmp_path)


def test_shows_the_log_of_a_server_that_does_not_start() -> None:
    with pytest.raises(RuntimeError, match="no_such_setting"):
        Postgres.create(settings={"no_such_setting": 1})


def test_no_server_runs_as_root_also_where_there_are_no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then root becomes another user, who may not be able to read the Python that it was begun with."""
    monkeypatch.setattr("holdfast.testing.server_user._NAMESPACE", ("no-such-program",))
    user = server_user.__wrapped__()
    completed = subprocess.run([*user.prefix, "id", "-u"], cwd="/", capture_output=True, text=True, check=True)
    assert int(completed.stdout) == user.uid != 0


def test_two_servers_are_strangers(postgres: Postgres) -> None:
    with Postgres.create() as other:
        assert other.port != postgres.port
        other.execute("create table here (a int)")
        assert postgres.execute("select to_regclass('here')") == [(None,)]


def test_databases_are_fresh_and_separate(postgres: Postgres) -> None:
    first, second = postgres.database(), postgres.database('odd "name"/%')
    with psycopg.connect(first, autocommit=True) as connection:
        connection.execute("create table here (a int)")
        postgres.drop(second)
        assert connection.execute("select count(*) from here").fetchone() == (0,)
    third = postgres.database('odd "name"/%')
    with psycopg.connect(third) as connection:
        assert connection.execute("select current_database(), to_regclass('here')").fetchone() == (
            'odd "name"/%',
            None,
        )


def test_execute_takes_parameters_and_a_database(postgres: Postgres) -> None:
    assert postgres.execute("select %s::int + 1, current_database()", 41, dbname="template1") == [(42, "template1")]


def test_stop_and_start_keep_the_data_and_the_port(postgres: Postgres) -> None:
    postgres.execute("create table stopped as select 1 as a")
    url, pid = postgres.url, postgres.pid
    postgres.stop()
    assert not postgres.running
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", postgres.port), timeout=60)
    postgres.stop()
    postgres.start()
    assert postgres.url == url
    assert postgres.pid != pid
    postgres.restart()
    assert postgres.execute("select a from stopped") == [(1,)]
    assert "database system is ready" in postgres.log()


def shared_memory(server: Postgres) -> list[str]:
    """The System V segments of a server, which the kernel would keep for ever; their key is the data folder's inode."""
    table = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    inode = server.data.stat().st_ino & 0xFFFFFFFF
    return [row for row in table if int(row.split()[0]) & 0xFFFFFFFF == inode]


def test_a_killed_server_leaves_nothing_and_recovers(postgres: Postgres) -> None:
    postgres.execute("create table killed as select 1 as a")
    assert shared_memory(postgres)
    with psycopg.connect(postgres.url) as busy:
        backend = busy.info.backend_pid
        postgres.kill()
        assert not lives(backend)
        with pytest.raises(psycopg.OperationalError):
            busy.execute("select 1")
    assert not shared_memory(postgres)
    postgres.start()
    assert postgres.execute("select a from killed") == [(1,)]
    assert "not properly shut down" in postgres.log()


def test_a_paused_server_takes_connections_and_does_not_answer(postgres: Postgres) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        postgres.pause()
        assert postgres.running
        with socket.create_connection(("127.0.0.1", postgres.port), timeout=60) as silent:
            silent.settimeout(0.3)
            silent.sendall(b"\x00\x00\x00\x08\x04\xd2\x16\x2f")  # SSLRequest
            with pytest.raises(TimeoutError):
                silent.recv(1)
            postgres.resume()
            silent.settimeout(60)
            assert silent.recv(1) == b"N"
        assert connection.execute("select 1").fetchone() == (1,)


def test_failover_with_a_synchronous_standby_and_back() -> None:
    """On the oldest version; on the newest it is the fault `failover` of test_faults.py."""
    major = min(available())
    waiting = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"
    with Postgres.create(major=major) as primary:
        standby = primary.standby(synchronous=True)
        assert not standby.is_primary
        primary.execute("create table kept as select 1 as a")
        standby.pause()
        with ThreadPoolExecutor() as threads:
            commit = threads.submit(primary.execute, "insert into kept values (2)")
            eventually(lambda: primary.execute(waiting) == [(1,)])
            assert not commit.done()
            standby.resume()
        primary.kill()

        standby.promote()
        assert standby.is_primary
        standby.execute("insert into kept values (3)")

        primary.rewind(standby, synchronous=True)
        assert not primary.is_primary
        standby.execute("insert into kept values (4)")
        eventually(lambda: (4,) in primary.execute("select a from kept"))
        assert primary.execute("select a from kept order by a") == [(1,), (2,), (3,), (4,)]
    assert not standby.running


def test_a_divergent_primary_is_wound_back() -> None:
    with Postgres.create() as primary:
        standby = primary.standby()
        standby.stop()
        primary.execute("create table lost as select 1 as a")
        primary.kill()
        standby.start()
        standby.promote()
        standby.execute("create table kept as select 1 as a")
        with pytest.raises(RuntimeError, match="running"):
            standby.rewind(primary)
        primary.rewind(standby)
        eventually(lambda: primary.execute("select to_regclass('kept')") == [("kept",)])
        assert primary.execute("select to_regclass('lost')") == [(None,)]


def test_a_killed_owner_leaves_no_server() -> None:
    """Although it stands still, and would not follow any order to end."""
    owner, pid, folder = spawn_owner("postgres.pause()")
    with owner:
        assert lives(pid)
        owner.kill()
    eventually(lambda: not lives(pid))
    eventually(lambda: not folder.exists())


def test_what_a_killed_owner_had_to_leave_is_removed_by_the_next_one() -> None:
    owner, _, folder = spawn_owner(end="postgres.kill(); print(flush=True); sys.stdin.read()")
    with owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        owner.kill()
    with Postgres.create() as server:
        assert not folder.exists()
        assert server.folder.exists()


def test_an_owner_that_ends_leaves_no_server() -> None:
    owner, pid, folder = spawn_owner(end="")
    with owner:
        assert owner.wait(timeout=60) == 0
    assert not lives(pid)
    assert not folder.exists()


def test_a_killed_watcher_leaves_no_server() -> None:
    if "--pdeathsig" not in server_user().prefix:
        pytest.skip("setpriv of this machine cannot tie a process to its parent")
    with Postgres.create() as server:
        pid = server.pid
        assert server._watchdog is not None
        server._watchdog.send_signal(signal.SIGKILL)
        eventually(lambda: not lives(pid))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_does_not_close_its_parents_server(postgres: Postgres) -> None:
    child = os.fork()
    if child == 0:
        postgres.close()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert postgres.execute("select 1") == [(1,)]


def test_a_server_given_up_while_it_starts_ends_at_once() -> None:
    """Ctrl-C may come before the watcher has even begun the server: then there is nothing to kill yet."""
    postgres = Postgres(binaries.find(), None)
    server_folder.create_data(postgres.binaries, postgres.data)
    postgres._launch()
    postgres.close()
    assert not postgres.running
    assert not postgres.folder.exists()
