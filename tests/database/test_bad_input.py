"""Wrong arguments: errors that name the argument and the value, before anything is written."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast
from holdfast.testing.sync_facade import SyncFacade
from tests.pairs import EACH_URL

Connect = Callable[..., Any]
BAD_NAMES = ["", "x" * 201, "x" * 300, "a\nb", "a\x00b", "a\x7fb", "a\x85b", "\ud800"]
NO_STRINGS = [5, b"import", ["import"], 1.5]
NO_NUMBERS = [True, "30", b"30", [30]]


@pytest.fixture
def untouched(connect: Connect, tmp_path: Path) -> Iterator[Any]:
    """A client of a file that must not even be made."""
    yield connect(f"sqlite:///{tmp_path / 'app.db'}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_or_holder_is_refused(untouched: Any, name: str) -> None:
    with pytest.raises(ValueError, match=r"^name must"):
        untouched.lease(name)
    with pytest.raises(ValueError, match=r"^holder must"):
        untouched.lease("import", holder=name)
    with pytest.raises(ValueError, match=r"^name must"):
        untouched.leases.get(name)
    with pytest.raises(ValueError, match=r"^name must"):
        untouched.leases.history(name)
    with pytest.raises(ValueError, match=r"^name must"):
        untouched.leases.force_release(name, actor="operator", reason="stuck")
    with pytest.raises(ValueError, match=r"^actor must"):
        untouched.leases.force_release("import", actor=name, reason="stuck")


@pytest.mark.parametrize("name", NO_STRINGS)
def test_a_name_or_holder_that_is_no_str_is_refused(untouched: Any, name: object) -> None:
    with pytest.raises(TypeError, match=r"^name must be a str"):
        untouched.lease(name)
    with pytest.raises(TypeError, match=r"^holder must be a str"):
        untouched.lease("import", holder=name)


@pytest.mark.parametrize(
    ("limit", "kind", "told"),
    [("3", TypeError, "an int, not str"), (2.5, TypeError, "an int, not float"), (True, TypeError, "an int, not bool"),
     (None, TypeError, "an int, not NoneType"), (0, ValueError, "a whole number from 1 to 10000, not 0"),
     (10_001, ValueError, "a whole number from 1 to 10000, not 10001")],
)  # fmt: skip
def test_how_many_is_checked_wherever_it_is_asked(untouched: Any, limit: Any, kind: type[Exception], told: str) -> None:
    for ask in (
        untouched.leases.history,
        untouched.audit.list,
        untouched.operations.list,
        untouched.operations.recover,
        lambda limit: untouched.objects.list("box", limit=limit),
    ):
        with pytest.raises(kind, match=f"^limit must be {told}$"):
            ask(limit=limit)


@pytest.mark.parametrize("ttl", [0, -1, 0.049, 86401, math.nan, math.inf, -math.inf])
def test_a_bad_ttl_is_refused(untouched: Any, ttl: float) -> None:
    with pytest.raises(ValueError, match=r"^ttl must be between 0\.05 and 86400 seconds, not "):
        untouched.lease("import", ttl=ttl)


@pytest.mark.parametrize("seconds", [-1, -0.001, math.nan, -math.inf])
def test_bad_durations_are_refused(untouched: Any, seconds: float) -> None:
    with pytest.raises(ValueError, match=r"^timeout must"):
        untouched.lease("import", timeout=seconds)
    with pytest.raises(ValueError, match=r"^timeout must"):
        untouched.lease("import").acquire(timeout=seconds)
    with pytest.raises(ValueError, match=r"^at_least must"):
        untouched.lease("import", at_least=seconds)
    with pytest.raises(ValueError, match=r"^renew_every must"):
        untouched.lease("import", renew_every=seconds)


@pytest.mark.parametrize("seconds", NO_NUMBERS)
@pytest.mark.parametrize("argument", ["ttl", "timeout", "at_least", "renew_every"])
def test_a_duration_that_is_no_number_is_refused(untouched: Any, argument: str, seconds: object) -> None:
    with pytest.raises(TypeError, match=f"^{argument} must be a number of seconds"):
        untouched.lease("import", **{argument: seconds})


def test_a_heartbeat_without_room_for_a_second_try_is_refused(untouched: Any) -> None:
    with pytest.raises(ValueError, match="renew_every must leave room"):
        untouched.lease("import", ttl=3, renew_every=2.1)


@pytest.mark.parametrize("on_lost", ["explode", "", None, 5])
def test_an_unknown_on_lost_is_refused(untouched: Any, on_lost: object) -> None:
    with pytest.raises(ValueError, match=r"^on_lost must be 'flag', 'cancel', 'exit' or a callable"):
        untouched.lease("import", on_lost=on_lost)


def test_options_that_contradict_each_other_are_refused(untouched: Any) -> None:
    with pytest.raises(ValueError, match=r"^failover must be"):
        untouched.lease("import", failover="magic")
    with pytest.raises(ValueError, match=r"^on_lost needs auto_renew=True"):
        untouched.lease("import", auto_renew=False, on_lost="exit")
    with pytest.raises(ValueError, match=r"^failover='session' needs auto_renew=True"):
        untouched.lease("import", auto_renew=False, failover="session")


def test_cancel_is_for_asyncio_alone(untouched: Any) -> None:
    if isinstance(untouched, SyncFacade):
        assert untouched.lease("import", on_lost="cancel").name == "import"
    else:
        with pytest.raises(ValueError, match="'cancel' is for asyncio"):
            untouched.lease("import", on_lost="cancel")


def test_hooks_and_drivers_are_checked_before_they_are_called_in_vain(untouched: Any) -> None:
    """Later nobody would be told but the log, time and again."""

    def generator(id: str) -> Iterator[None]:
        yield

    async def awaited(id: str) -> None: ...

    driver = {"list": list, "get": print, "watch": generator}
    for name in driver:
        with pytest.raises(TypeError, match=rf"^driver must have .* has no {name}\(\)$"):
            untouched.reconciler("box", SimpleNamespace(**{**driver, name: None}))
    bad = [5, generator] if isinstance(untouched, SyncFacade) else [5, generator, awaited]
    for hook in bad:
        told = "must be a function" if hook == 5 else "must be a .*function, not a .*generator function"
        for argument in ("session_present", "on_event"):
            with pytest.raises(TypeError, match=f"^{argument} {told}"):
                untouched.reconciler("box", SimpleNamespace(**driver), **{argument: hook})
        with pytest.raises(TypeError, match=f"^on_new_leader {told}"):
            untouched.elector("work", on_new_leader=hook)
        if hook != 5:
            with pytest.raises(TypeError, match=f"^driver.get {told}"):
                untouched.reconciler("box", SimpleNamespace(**{**driver, "get": hook}))
    if isinstance(untouched, SyncFacade):
        for name in ("list", "get"):
            half = {**driver, "list": awaited, "get": awaited, name: driver[name]}
            with pytest.raises(TypeError, match=f"^driver.{name} must be an async def"):
                untouched.reconciler("box", SimpleNamespace(**half))


def test_a_forced_release_needs_a_reason(untouched: Any) -> None:
    for reason in ("", "x" * 1001):
        with pytest.raises(ValueError, match=r"^reason must"):
            untouched.leases.force_release("import", actor="operator", reason=reason)


@pytest.mark.parametrize(
    "schema", ["", "Holdfast", "a-b", "1a", "pg_mine", "x" * 41, 'a"b', "a;b", "a.b", "a b", "a\n"]
)
@pytest.mark.parametrize("url", ["sqlite:///app.db", "postgresql://localhost/app"])
def test_a_bad_schema_name_is_refused(connect: Connect, url: str, schema: str) -> None:
    with pytest.raises(ValueError, match=r"^schema must be"):
        connect(url, schema=schema)


def test_a_blank_says_neither_who_nor_why(untouched: Any) -> None:
    for call, subject in (
        (untouched.leases.force_release, "import"),
        (untouched.operations.reset, "charge:42"),
        (untouched.operations.rollback, "charge:42"),
        (untouched.reviews.approve, 1),
        (untouched.relays.remove, "catalogue"),
    ):
        with pytest.raises(ValueError, match=r"^actor must not be blank"):
            call(subject, actor=" ", reason="stuck")
        with pytest.raises(ValueError, match=r"^reason must not be blank"):
            call(subject, actor="jane", reason=" \u3000")


def test_what_is_no_text_is_told_with_what_would_be(connect: Connect) -> None:
    with pytest.raises(TypeError, match=r"^url must be a str, as 'sqlite:///app\.db' or .*, not PosixPath$"):
        connect(Path("app.db"))
    with pytest.raises(TypeError, match=r"^schema must be a str, not int$"):
        connect("sqlite:///app.db", schema=5)


def test_an_update_that_forgets_to_return_the_payload_leaves_what_there_is(connect: Connect, tmp_path: Path) -> None:
    objects = connect(f"sqlite:///{tmp_path / 'app.db'}").objects
    objects.put_if("box", "b-1", {"lid": "open"}, holdfast.Unconditional())
    for forgets, told in (
        (lambda record: record.payload.update(lid="shut"), "NoneType"),
        (lambda record: record, "ObjectRecord"),
    ):
        with pytest.raises(TypeError, match=f"^change must return the new payload, not {told}; "):
            objects.update("box", "b-1", forgets)
    assert objects.get("box", "b-1").payload == {"lid": "open"}


@EACH_URL
def test_a_closed_client_says_so(connect: Connect, url: str) -> None:
    client = connect(url)
    grant, lease = client.lease("import").acquire(), client.lease("export")
    client.close()
    for call in (lease.acquire, lease.try_acquire, client.leases.list, client.migrate):
        with pytest.raises(holdfast.EngineError, match="is closed"):
            call()
    with pytest.raises(holdfast.LeaseLost, match="closed"):
        grant.renew()
    assert connect(url).leases.list() == []


def test_an_async_client_used_from_another_loop_names_both(url: str) -> None:
    client = holdfast.AsyncClient(url)

    async def list_leases() -> str:
        await client.leases.list()
        return repr(asyncio.get_running_loop())

    with closing(asyncio.new_event_loop()) as one, closing(asyncio.new_event_loop()) as two:
        owner = one.run_until_complete(list_leases())
        with pytest.raises(RuntimeError) as raised:
            two.run_until_complete(list_leases())
        for loop in (owner.partition(" running")[0], repr(two).partition(" running")[0]):
            assert loop in str(raised.value)
        one.run_until_complete(client.close())


def test_what_cannot_be_pickled_says_what_to_do_instead(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    with holdfast.Client(url) as client:
        lease, lock = client.lease("import").acquire(), client.lock("export").acquire()
        for each in (client, client.lease("import"), lease, lock, holdfast.AsyncClient(url)):
            with pytest.raises(
                TypeError, match=r"make a client of its own there.*client\.lease\(name\)\.adopt\(token\)"
            ):
                pickle.dumps(each)
