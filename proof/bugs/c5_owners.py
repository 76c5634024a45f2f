"""C5: looks for the owner of an operation that call one dead which lives, because its session was lost for a moment."""

import threading

import holdfast
from proof.bugs.c5_effects import KEY, LIMIT, do, record_run
from proof.bugs.implementation import Connection, Holdfast
from proof.bugs.testbed import Testbed

TTL = 600.0
"""No heartbeat comes in between."""
OWNER_KEY = 7846 << 48 | 1
_LOOK = "select holdfast.beat_look(b.id) from holdfast.beat b where b.session_key = %s"


class WrongLook(Holdfast):
    """The function of a look with one line changed."""

    def __init__(self, line: str, wrong: str) -> None:
        self._line, self._wrong = line, wrong

    def prepare(self, connection: Connection) -> None:
        row = connection.execute("select pg_get_functiondef('holdfast.beat_look'::regproc)").fetchone()
        assert row is not None
        definition = row[0]
        assert self._line in definition
        connection.execute(definition.replace(self._line, self._wrong))


def free_once() -> Holdfast:
    """Takes over when the key is free once."""
    return WrongLook("seconds is not null", "true")


def old_note_kept() -> Holdfast:
    """Keeps the note that the key was free, although the owner holds it again."""
    return WrongLook("set unseen_at = null", "set unseen_at = unseen_at")


def lost_twice(testbed: Testbed) -> None:
    """A pauses in its effect. Its session is lost twice, a second apart. Each time one look finds the key free, and the
    next one finds it held. Then B runs. The scenario holds the key in A's place, so that its moments are known."""
    begun, go_on = threading.Event(), threading.Event()

    def effect() -> str:
        do(testbed.admin, "a")
        begun.set()
        assert go_on.wait(LIMIT)
        return "a"

    def own() -> str:
        with holdfast.Client(testbed.url) as client:
            return str(client.operation(KEY, ttl=TTL).run(effect).result)

    def retry() -> str:
        with holdfast.Client(testbed.url) as client:
            return str(client.operation(KEY, when_locked="fail").run(str).result)

    first = testbed.submit(lambda: record_run(testbed, "a", own))
    assert begun.wait(LIMIT)
    with testbed.connect() as owner:
        owner.execute("select pg_advisory_lock_shared(%s)", [OWNER_KEY])
        testbed.admin.execute("update holdfast.beat set session_key = %s", [OWNER_KEY])
        for _ in range(2):
            owner.execute("select pg_advisory_unlock_shared(%s)", [OWNER_KEY])
            testbed.admin.execute(_LOOK.encode(), [OWNER_KEY])
            owner.execute("select pg_advisory_lock_shared(%s)", [OWNER_KEY])
            testbed.admin.execute("update holdfast.beat set unseen_at = unseen_at - interval '1 s'")
            testbed.admin.execute(_LOOK.encode(), [OWNER_KEY])
        record_run(testbed, "b", retry)
    go_on.set()
    first.result(LIMIT)
