"""``client.release_on_exit()``: a signal that ends the process releases its leases first, and still ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

import holdfast
from holdfast.testing import Proxy
from tests.children import HANG, PATIENCE, Child, eventually

LONG: dict[str, Any] = {"ttl": 600.0}
"""Nobody gets the lease within a test unless it is released."""

START = """
import asyncio, logging, os, signal, sqlite3, sys, threading, time
import holdfast
from holdfast.database import exit_release
exit_release.BUDGET = 600  # however slow the machine is
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
url = sys.argv[1]
"""
HELD = (
    START
    + """
client = holdfast.Client(url)
client.release_on_exit()
"""
)
SYNC = (
    HELD
    + """
with client.lease("import", ttl=600), client.lease("solo", ttl=600, auto_renew=False), client.lock("a"):
    print("held", flush=True)
    time.sleep(600)
print("never", flush=True)
"""
)
ASYNC = (
    START
    + """
async def main():
    async with holdfast.AsyncClient(url) as client:
        client.release_on_exit(signals=(signal.SIGTERM, signal.SIGHUP))
        async with client.lease("import", ttl=600), client.lease("solo", ttl=600, auto_renew=False), client.lock("a"):
            print("held", flush=True)
            await asyncio.sleep(600)
    print("never", flush=True)
asyncio.run(main())
"""
)


def free(client: Any, *names: str) -> None:
    """All of them can be had now."""
    for name in names:
        client.lease(name, **LONG, timeout=PATIENCE).acquire().release()


@pytest.mark.parametrize(
    ("program", "number"), [(SYNC, signal.SIGTERM), (ASYNC, signal.SIGTERM), (ASYNC, signal.SIGHUP)]
)
def test_the_leases_are_free_at_once_and_the_signal_still_ends_the_process(
    either: str, program: str, number: signal.Signals
) -> None:
    with holdfast.Client(either) as client, Child(program, either) as child:
        child.expect("held")
        assert len(client.leases.list()) == 2
        child.signal(number)
        child.expect("<end>")
        assert child.wait() == -number
        assert client.leases.list() == []
        assert {each.outcome for each in client.leases.history()} == {"released"}
        free(client, "import", "solo")
        client.lock("a", timeout=PATIENCE).acquire().release()


def test_without_it_the_lease_waits_for_its_ttl(sqlite_url: str) -> None:
    with (
        holdfast.Client(sqlite_url) as client,
        Child(SYNC.replace("client.release_on_exit()", ""), sqlite_url) as child,
    ):
        child.expect("held")
        child.signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
        assert len(client.leases.list()) == 2


def test_ctrl_c_is_still_a_keyboard_interrupt(either: str) -> None:
    program = (
        HELD
        + """
try:
    with client.lease("import", ttl=600) as grant:
        print("held", flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    print(grant.lost, client.leases.list(), flush=True)
    try:
        grant.check()
    except holdfast.LeaseLost as error:
        print(error, flush=True)
    with client.lease("import", ttl=600) as again:
        print(again.fence > grant.fence, again.lost, flush=True)
    raise
"""
    )
    with Child(program, either) as child:
        child.expect("held")
        child.signal(signal.SIGINT)
        child.expect("True []", "lease 'import' was released because a signal ends this process", "True False", "<end>")
        assert child.wait() == -signal.SIGINT


def test_a_handler_that_was_there_before_is_called_after_the_release(either: str) -> None:
    program = (
        START
        + """
def handle(number, frame):
    print("handled", number, client.leases.list(), flush=True)
signal.signal(signal.SIGTERM, handle)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
client = holdfast.Client(url)
client.release_on_exit(signals=(signal.SIGTERM, signal.SIGHUP))
client.release_on_exit()
grant = client.lease("import", ttl=600, on_lost=print).acquire()
os.kill(os.getpid(), signal.SIGHUP)
print(grant.lost, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print(grant.lost, grant.release(), flush=True)
with client.lease("import", ttl=600):
    os.kill(os.getpid(), signal.SIGTERM)
client.close()
print(signal.getsignal(signal.SIGTERM) is handle, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    )
    with Child(program, either) as child:
        child.expect("False", "handled 15 []", "True False", "handled 15 []", "True True", "<end>")
        assert child.wait() == 0


def test_a_handler_that_is_installed_later_decides_whether_it_is_called(either: str) -> None:
    program = (
        HELD
        + """
before = signal.getsignal(signal.SIGTERM)
def handle(number, frame):
    print("handled", len(client.leases.list()), flush=True)
    if len(sys.argv) > 2:
        before(number, frame)
signal.signal(signal.SIGTERM, handle)
with client.lease("import", ttl=600):
    os.kill(os.getpid(), signal.SIGTERM)
    print("alive", flush=True)
"""
    )
    with Child(program, either) as child:
        child.expect("handled 1", "alive", "<end>")
        assert child.wait() == 0
    with Child(program, either, "chain") as child:
        child.expect("handled 1", "<end>")
        assert child.wait() == -signal.SIGTERM
    with holdfast.Client(either) as client:
        assert client.leases.list() == []


def test_the_transaction_that_a_lease_protects_does_not_hold_it_up(postgres_url: str) -> None:
    """It is rolled back with the process; until then nobody can take the lease over."""
    program = (
        HELD
        + """
import psycopg
connection = psycopg.connect(url)
with client.lease("import", ttl=600) as grant, grant.transaction(connection):
    connection.execute("create table half (done int)")
    print("held", flush=True)
    time.sleep(600)
"""
    )
    with holdfast.Client(postgres_url) as client, Child(program, postgres_url) as child:
        child.expect("held")
        child.signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
        free(client, "import")


def test_each_client_decides_for_itself(postgres_url: str, sqlite_url: str) -> None:
    program = (
        START
        + """
clients = [holdfast.Client(each) for each in (url, url, url, sys.argv[2])]
for client in (clients[0], clients[1], clients[3]):
    client.release_on_exit()
for number, client in enumerate(clients):
    client.lease(f"lease-{number}", ttl=600).acquire()
print("held", flush=True)
threading.Event().wait()
"""
    )
    with Child(program, postgres_url, sqlite_url) as child:
        child.expect("held")
        child.signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
    with holdfast.Client(postgres_url) as client, holdfast.Client(sqlite_url) as other:
        assert [each.name for each in client.leases.list()] == ["lease-2"]
        assert other.leases.list() == []


def test_leases_of_threads_are_released_as_well(either: str) -> None:
    program = (
        HELD
        + """
def work(number):
    with client.lease(f"lease-{number}", ttl=600):
        os.write(1, b"held\\n")
        time.sleep(600)
threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    )
    with holdfast.Client(either) as client, Child(program, either) as child:
        child.expect("held", "held", "held")
        child.signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
        assert client.leases.list() == []


def test_a_forked_child_that_is_ended_leaves_its_parents_leases(either: str) -> None:
    program = (
        HELD
        + """
with client.lease("import", ttl=600) as grant:
    child = os.fork()
    if child == 0:
        print("forked", flush=True)
        time.sleep(600)
    input()
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), grant.lost, grant.renew(), flush=True)
"""
    )
    with Child(program, either) as child:
        child.expect("forked")
        child.say("go on")
        child.expect("-15 False True", "<end>")
        assert child.wait() == 0


@pytest.mark.parametrize(
    "lock",
    [
        "background.lock",
        "client._engine._dispatcher._mutex",
        "client._engine._dispatcher._channels[0].lock",
        "threading._active_limbo_lock",
        "logging._lock",
    ],
)
def test_a_signal_that_interrupts_code_with_a_lock_ends_the_process_all_the_same(either: str, lock: str) -> None:
    """The handler runs between any two instructions of the main thread."""
    program = (
        HELD
        + f"""
from holdfast.database.background import background_of
client.lease("import", ttl=600).acquire()
background = background_of(client._database)
with {lock}:
    os.kill(os.getpid(), signal.SIGTERM)
"""
    )
    with holdfast.Client(either) as client, Child(program, either) as child:
        child.expect("<end>")
        assert child.wait() == -signal.SIGTERM
        assert client.leases.list() == []


def test_wherever_the_signal_comes_in_no_lease_is_left(either: str) -> None:
    program = (
        HELD
        + """
print("ready", flush=True)
while True:
    with client.lease("a", ttl=600), client.lease("b", ttl=600):
        pass
"""
    )
    with holdfast.Client(either) as client:
        for _ in range(8):
            with Child(program, either) as child:
                child.expect("ready")
                eventually(lambda: client.leases.list(), "it is at work")
                child.signal_anywhere(signal.SIGTERM)
                assert child.wait() == -signal.SIGTERM
            eventually(lambda: client.leases.list() == [], "its leases are free")


def test_a_database_that_does_not_answer_does_not_keep_the_signal_from_its_effect(postgres_url: str) -> None:
    program = SYNC.replace("exit_release.BUDGET = 600", "")
    with Proxy(postgres_url) as proxy, Child(program, proxy.url) as child:
        child.expect("held")
        proxy.stall()
        child.signal(signal.SIGTERM)
        assert child.line().startswith("WARNING leases on postgresql://")
        child.expect("<end>")
        assert child.wait() == -signal.SIGTERM


def test_a_second_signal_does_not_wait_for_the_release(postgres_url: str) -> None:
    with Proxy(postgres_url) as proxy, Child(SYNC, proxy.url) as child:
        child.expect("held")
        proxy.stall()
        child.signal(signal.SIGTERM)
        eventually(lambda: _send_again(child), "the second one ends it")
        assert child.wait() == -signal.SIGTERM


def _send_again(child: Child) -> bool:
    child.signal_anywhere(signal.SIGTERM)
    return child.process.poll() is not None


def test_a_guard_keeps_its_lease_until_its_block_has_ended(either: str) -> None:
    for order in ("first", "last"):
        program = (
            START
            + f"""
client = holdfast.Client(url)
if {order == "first"}: client.release_on_exit()
with client.lease("other", ttl=600), client.guard("only", ttl=600, renew_every=200):
    if {order == "last"}: client.release_on_exit()
    try:
        print("held", flush=True)
        time.sleep(600)
    finally:
        print([each.name for each in client.leases.list() if each.name == "only"], flush=True)
"""
        )
        with holdfast.Client(either) as client, Child(program, either) as child:
            child.expect("held")
            child.signal(signal.SIGTERM)
            child.expect("['only']", "<end>")
            assert child.wait() == 128 + signal.SIGTERM
            assert client.leases.list() == []


def test_an_elector_that_handles_signals_stops_its_work_first(either: str) -> None:
    for order in ("before", "within"):
        program = (
            START
            + f"""
client = holdfast.Client(url)
if {order == "before"}: client.release_on_exit()
async def main():
    async with holdfast.AsyncClient(url) as leader:
        async def work(term):
            if {order == "within"}: leader.release_on_exit()
            print("leads", flush=True)
            await term.wait() if hasattr(term, "wait") else await asyncio.sleep(600)
        await leader.elector("x", ttl=600).run(work, signals=True)
        print("stopped", flush=True)
asyncio.run(main())
with client.lease("after", ttl=600):
    client.release_on_exit()
    os.kill(os.getpid(), signal.SIGTERM)
"""
        )
        with holdfast.Client(either) as client, Child(program, either) as child:
            child.expect("leads")
            child.signal(signal.SIGTERM)
            child.expect("stopped", "<end>")
            assert child.wait() == -signal.SIGTERM
            assert client.leases.list() == []


def test_wrong_use_is_refused_and_installs_nothing(sqlite_url: str) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    errors: list[str] = []

    def outside() -> None:
        try:
            client.release_on_exit()
        except ValueError as error:
            errors.append(str(error))

    with holdfast.Client(sqlite_url) as client:
        for wrong in (signal.SIGKILL, signal.SIGCHLD, 0):
            with pytest.raises(ValueError, match="signals must be of SIGTERM, SIGINT, SIGHUP, SIGQUIT"):
                client.release_on_exit(signals=(signal.SIGTERM, wrong))
        thread = threading.Thread(target=outside)
        thread.start()
        thread.join()
        assert ["main thread" in error for error in errors] == [True]
        assert {number: signal.getsignal(number) for number in before} == before
    with pytest.raises(holdfast.EngineError, match="is closed"):
        client.release_on_exit()
    assert {number: signal.getsignal(number) for number in before} == before


def test_the_first_process_of_a_container_ends_as_well(sqlite_url: str) -> None:
    """There Linux ignores a signal without a handler."""
    contained = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*contained, "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare is not installed: apt-get install util-linux")
    program = (
        HELD
        + """
assert os.getpid() == 1
client.lease("import", ttl=600).acquire()
os.kill(1, signal.SIGTERM)
"""
    )
    done = subprocess.run([*contained, sys.executable, "-c", program, sqlite_url], timeout=HANG, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    with holdfast.Client(sqlite_url) as client:
        assert client.leases.list() == []
