"""Ways to have one slot twice, to wipe under a guard that is another's, and to go on after a pause. All are C7:
somebody believes in what another has."""

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack

import holdfast
from holdfast.testing import child_watchdog
from holdfast.testing.history import Recorder, now
from holdfast.testing.server import until
from proof.bugs.implementation import Connection, Grant, Holdfast, answer
from proof.bugs.stage import Stage

Between = Callable[[], object]
SLOT = "@slot:proof:1"
_INSTANCES = 3
"""One that should not go on after its pause may be ended before it has done anything; not all of them."""
_ATTEMPTS = 20
_PROGRAM = "proof.bugs.guarded"


class Recipes(Holdfast):
    """The real implementation: each is one statement, and nothing comes in between."""

    ends_by = "kernel"

    def claim(self, connection: Connection, owner: str, between: Between) -> bool:
        """The one slot there is, or not."""
        between()
        statement = (
            "select fence from holdfast.slot_claim('@slot:proof', 1, %s, 30, gen_random_uuid(), null, true, '{}')"
        )
        [(fence,)] = connection.execute(statement, [owner]).fetchall()
        return fence is not None

    def wipe(self, connection: Connection, guard: Grant, between: Between) -> None:
        between()
        connection.execute("select holdfast.lease_wipe(%s, %s)", [guard.name, guard.token])


class ReadThenWrite(Recipes):
    """Looks which slot is free, and then takes it, without a lock over both."""

    def prepare(self, connection: Connection) -> None:
        connection.execute("create table own_slot (slot int, owner text)")

    def claim(self, connection: Connection, owner: str, between: Between) -> bool:
        free = answer(connection, "select count(*) < 1 from own_slot")
        between()
        if free:
            connection.execute("insert into own_slot values (1, %s)", [owner])
        return free


class ProvenBefore(Recipes):
    """Asks whether the guard is held, and wipes when it was: not in one transaction."""

    def wipe(self, connection: Connection, guard: Grant, between: Between) -> None:
        held = connection.execute("select * from holdfast.lease_status(%s, %s)", [guard.name, guard.token]).fetchall()
        between()
        if held:
            connection.execute(
                "select holdfast.lease_force_release(name, 'a', 'wiped', false) from holdfast.lease where name <> %s",
                [guard.name],
            )


class EndedByAThread(Recipes):
    """A thread of the process ends it when its lease is lost, and not the kernel: after a pause all threads go on."""

    ends_by = "thread"


def claimed_in_between(stage: Stage) -> None:
    """B claims while A is about to."""
    pool = stage.implementation
    assert isinstance(pool, Recipes)
    a, b = stage.worker("a"), stage.worker("b")
    began = now()
    claims = {b: False}

    def meanwhile() -> None:
        claims[b] = pool.claim(b.connection, "b", lambda: None)

    claims[a] = pool.claim(a.connection, "a", meanwhile)
    until(lambda: now() > began + 0.01, what="they have gone on for a moment")
    for worker, granted in claims.items():
        if granted:
            worker.record.info("believe", SLOT, None, **{"from": began, "until": now()})


def wiped_too_late(stage: Stage) -> None:
    """A has the guard, and wipes; but it has passed on to B by then, who works under a lease, which C asks for, too."""
    wiper = stage.implementation
    assert isinstance(wiper, Recipes)
    a, b, c = (stage.worker(name) for name in "abc")
    guard = a.acquire("guard")
    assert guard is not None, "nobody has it"
    works: list[tuple[Grant, float]] = []

    def passed_on() -> None:
        stage.expire("guard")
        assert b.acquire("guard") is not None, "its holder's time is over"
        work = b.acquire("work")
        assert work is not None, "nobody has it"
        works.append((work, now()))

    wiper.wipe(a.connection, guard, passed_on)
    [(work, since)] = works
    taken, began = c.acquire("work"), now()
    until(lambda: now() > began + 0.01, what="they have gone on for a moment")
    b.believe(work, since)
    if taken is not None:
        c.believe(taken, began)


def resumed_after_its_time(stage: Stage) -> None:
    """Processes stand still until their leases are another's, and are then told to go on."""
    recipe = stage.implementation
    assert isinstance(recipe, Recipes)
    with ExitStack() as stack:
        client = stack.enter_context(holdfast.Client(stage.url))

        def start(number: int) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", _PROGRAM, stage.url, str(stage.folder), f"guard {number}", recipe.ends_by]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            return process

        paused = [start(number) for number in range(_INSTANCES)]
        for number in range(_INSTANCES):
            for _ in range(_ATTEMPTS):  # a busy machine may hold it up for longer than its TTL
                if _works(paused[number]):
                    break
                paused[number] = start(number)
            else:
                raise RuntimeError(f"guard {number} was lost before its process worked, {_ATTEMPTS} times")
            child_watchdog.send_signal([paused[number].pid], signal.SIGSTOP)
        successor = stack.enter_context(Recorder(stage.folder, "successor"))
        grants = [client.lease(f"guard {number}", timeout=60).acquire() for number in range(_INSTANCES)]
        since = now()
        child_watchdog.send_signal([each.pid for each in paused], signal.SIGCONT)
        for each in paused:
            each.wait(60)
        for grant in grants:
            successor.info("believe", grant.name, grant.fence, **{"from": since, "until": now()})


def _works(process: "subprocess.Popen[bytes]") -> bool:
    assert process.stdout is not None
    return process.stdout.readline() == b"works\n"
