"""C7: implementations of slots and guards with which two workers trust the same lease."""

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack

import holdfast
from holdfast.testing import child_watchdog
from holdfast.testing.history import Recorder, now
from holdfast.testing.server import until
from proof.bugs.implementation import Connection, Grant, Holdfast, fetch_bool
from proof.bugs.testbed import Testbed

Between = Callable[[], object]
SLOT = "@slot:proof:1"
_INSTANCES = 3
"""Processes with the bug: the kernel may end one before it runs after its pause, but not all of them."""
_ATTEMPTS = 20
_PROGRAM = "proof.bugs.guarded_process"


class Recipes(Holdfast):
    """The real implementation: each step is one statement, and ``between`` runs before it."""

    ends_by = "kernel"

    def claim(self, connection: Connection, owner: str, between: Between) -> bool:
        """Claim the only slot. Returns whether it was granted."""
        between()
        statement = "select fence from holdfast.slot_claim('proof', 1, %s, 30, gen_random_uuid(), null, true, '{}')"
        [(fence,)] = connection.execute(statement, [owner]).fetchall()
        return fence is not None

    def acquire(self, connection: Connection, name: str, holder: str, ttl: float) -> Grant | None:
        """A wipe needs the lease of a guard."""
        grant = super().acquire(connection, name, holder, ttl)
        if name == "guard":
            connection.execute("update holdfast.lease set kind = 'guard' where name = 'guard'")
        return grant

    def wipe(self, connection: Connection, guard: Grant, between: Between) -> None:
        between()
        connection.execute("select holdfast.lease_wipe(%s, %s)", [guard.name, guard.token])


class ReadThenWrite(Recipes):
    """Reads which slot is free, and then writes its claim, without a lock over both."""

    def prepare(self, connection: Connection) -> None:
        connection.execute("create table own_slot (slot int, owner text)")

    def claim(self, connection: Connection, owner: str, between: Between) -> bool:
        free = fetch_bool(connection, "select count(*) < 1 from own_slot")
        between()
        if free:
            connection.execute("insert into own_slot values (1, %s)", [owner])
        return free


class ProvenBefore(Recipes):
    """Checks the guard, and wipes in another transaction."""

    def wipe(self, connection: Connection, guard: Grant, between: Between) -> None:
        held = connection.execute("select * from holdfast.lease_status(%s, %s)", [guard.name, guard.token]).fetchall()
        between()
        if held:
            connection.execute(
                "select holdfast.lease_force_release(name, 'a', 'wiped', false) from holdfast.lease where name <> %s",
                [guard.name],
            )


class EndedByAThread(Recipes):
    """A thread ends the process when its lease is lost, not a kernel timer: after a pause other threads run, too."""

    ends_by = "thread"


def claimed_in_between(testbed: Testbed) -> None:
    """B claims between two steps of A."""
    pool = testbed.implementation
    assert isinstance(pool, Recipes)
    a, b = testbed.worker("a"), testbed.worker("b")
    began = now()
    claims = {b: False}

    def claim_b() -> None:
        claims[b] = pool.claim(b.connection, "b", lambda: None)

    claims[a] = pool.claim(a.connection, "a", claim_b)
    until(lambda: now() > began + 0.01, what="both have worked for a moment")
    for worker, granted in claims.items():
        if granted:
            worker.record.info("believe", SLOT, None, **{"from": began, "until": now()})


def wiped_too_late(testbed: Testbed) -> None:
    """A wipes after its guard has passed on to B. B holds a lease, which C acquires, too."""
    wiper = testbed.implementation
    assert isinstance(wiper, Recipes)
    a, b, c = (testbed.worker(name) for name in "abc")
    guard = a.acquire("guard")
    assert guard is not None, "it is free"
    grants: list[tuple[Grant, float]] = []

    def pass_on() -> None:
        testbed.expire("guard")
        assert b.acquire("guard") is not None, "it has expired"
        work = b.acquire("work")
        assert work is not None, "it is free"
        grants.append((work, now()))

    wiper.wipe(a.connection, guard, pass_on)
    [(work, since)] = grants
    taken, began = c.acquire("work"), now()
    until(lambda: now() > began + 0.01, what="both have worked for a moment")
    b.believe(work, since)
    if taken is not None:
        c.believe(taken, began)


def resumed_after_its_time(testbed: Testbed) -> None:
    """Processes are paused until another worker holds their leases, and then resumed."""
    recipe = testbed.implementation
    assert isinstance(recipe, Recipes)
    with ExitStack() as stack:
        client = stack.enter_context(holdfast.Client(testbed.url))

        def start(number: int) -> subprocess.Popen[bytes]:
            command = [
                sys.executable,
                "-m",
                _PROGRAM,
                testbed.url,
                str(testbed.folder),
                f"guard {number}",
                recipe.ends_by,
            ]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            return process

        paused = [start(number) for number in range(_INSTANCES)]
        for number in range(_INSTANCES):
            for _ in range(_ATTEMPTS):  # a busy machine may delay it for longer than its TTL
                if _works(paused[number]):
                    break
                paused[number] = start(number)
            else:
                raise RuntimeError(f"guard {number} was lost before its process worked, {_ATTEMPTS} times")
            child_watchdog.send_signal([paused[number].pid], signal.SIGSTOP)
        successor = stack.enter_context(Recorder(testbed.folder, "successor"))
        grants = [client.lease(f"guard {number}", timeout=60).acquire() for number in range(_INSTANCES)]
        since = now()
        child_watchdog.send_signal([process.pid for process in paused], signal.SIGCONT)
        for process in paused:
            process.wait(60)
        for grant in grants:
            successor.info("believe", grant.name, grant.fence, **{"from": since, "until": now()})


def _works(process: "subprocess.Popen[bytes]") -> bool:
    assert process.stdout is not None
    return process.stdout.readline() == b"works\n"
