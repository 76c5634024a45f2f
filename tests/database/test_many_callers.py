"""Random calls by several callers of one client, with refusals, cancellations, timeouts and broken connections, against
what the database says has happened.

Triggers write a line into a table, ``witness``, for every change of a lease, an object and an operation, and refuse
changes of rows whose name begins with "refused". After each round the answers are compared with these lines:

- What was acknowledged has happened, exactly once. What was refused, or failed for certain, has not.
- A call without an answer (cancelled, or its connection was lost) has happened at most once.
- A call is refused for its own reasons alone: a neighbour's refusal is its own.
- No lease stays behind but those whose grants the callers have.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from hashlib import sha256
from itertools import groupby, pairwise
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import MatchVersion, MustCreate, Unconditional
from holdfast.testing import Proxy
from holdfast.testing.sync_facade import EventLoopThread
from tests.children import PATIENCE, eventually, query
from tests.conftest import migrated
from tests.raw_session import trials

CALLERS = 10
LONG = 600.0
REFUSAL = "refused by the test"
STALE = 10**9

_POSTGRES = """
create table witness (place bigserial, kind text, name text, mark text, version bigint, change text);
create function witness() returns trigger language plpgsql as $$
declare
    kind text := tg_argv[0];
    line jsonb := to_jsonb(case tg_op when 'DELETE' then old else new end);
begin
    if tg_op <> 'DELETE' and line ->> tg_argv[1] like 'refused%' then
        raise exception 'refused by the test';
    end if;
    if tg_op = 'UPDATE' and old.xmin = new.xmin then  -- a new object got a higher number in the call that created it
        delete from public.witness where witness.kind = tg_argv[0] and name = line ->> tg_argv[1]
            and mark = line ->> tg_argv[2] and version = (to_jsonb(old) ->> tg_argv[3])::bigint;
    end if;
    insert into public.witness (kind, name, mark, version, change)
        values (kind, line ->> tg_argv[1], line ->> tg_argv[2], (line ->> tg_argv[3])::bigint, lower(tg_op));
    return null;
end $$;
create trigger witness after insert or update or delete on holdfast.lease
    for each row execute function witness('lease', 'name', 'token', 'fence');
create trigger witness after insert or update or delete on holdfast.object
    for each row execute function witness('object', 'id', 'body', 'version');
create trigger witness after insert or update or delete on holdfast.idempotency_log
    for each row execute function witness('operation', 'pipeline_id', 'status', 'attempt');
"""
_SQLITE = """
create trigger witness_{table}_{change} after {change} on holdfast_{table} begin
    select raise(abort, 'refused by the test') where '{change}' <> 'delete' and {row}.{name} like 'refused%';
    insert into witness (kind, name, mark, version, change)
        values ('{kind}', {row}.{name}, {row}.{mark}, {row}.{version}, '{change}');
end
"""
_TABLES = (
    ("lease", "lease", "name", "token", "fence"),
    ("object", "object", "id", "body", "version"),
    ("idempotency_log", "operation", "pipeline_id", "status", "attempt"),
)


def watched(url: str) -> str:
    """That database with the triggers."""
    if not url.startswith("sqlite"):
        query(url, _POSTGRES)
        return url
    query(url, "create table witness (place integer primary key, kind, name, mark, version, change)")
    for table, kind, name, mark, version in _TABLES:
        for change, row in (("insert", "new"), ("update", "new"), ("delete", "old")):
            query(
                url,
                _SQLITE.format(table=table, change=change, row=row, kind=kind, name=name, mark=mark, version=version),
            )
    return url


# What hypothesis chooses


class Call(NamedTuple):
    kind: str
    key: int
    """Which of the names of its kind; REFUSED is one that the database refuses."""
    way: int
    cancelled: bool


class Round(NamedTuple):
    calls: list[Call]
    """By callers of their own, at once."""
    fault: str


REFUSED = 3
calls = st.builds(
    Call,
    kind=st.sampled_from(["lease", "lease", "release", "put", "put", "operation"]),
    key=st.integers(0, REFUSED),
    way=st.integers(0, 3),
    cancelled=st.booleans(),
)
FAULTS = {
    "none": "",
    "late": "the first answer arrives when all calls are made",
    "answers lost": "the connection breaks after the database has answered",
    "requests lost": "the connection breaks before a request has arrived",
    "down": "the connection breaks, and there is no other until all calls have ended",
    "timeout": "nothing arrives until the calls with a timeout have ended",
    "no session": "the same, and the connection broke before the calls were made",
}
GENTLE = ("none", "late")
"""No call fails."""
TIMED = ("timeout", "no session")


def scripts(faults: tuple[str, ...]) -> st.SearchStrategy[list[Round]]:
    often = sorted(faults) + [each for each in faults if each in ("late", "answers lost")]
    rounds = st.builds(Round, calls=st.lists(calls, min_size=2, max_size=CALLERS), fault=st.sampled_from(often))
    return st.lists(rounds, min_size=1, max_size=4)


# Callers


class Attempt:
    """One call, and what became of it."""

    def __init__(self, call: Call, name: str, mark: str, function: Callable[[], Any]) -> None:
        self.call, self.name, self.mark, self.function = call, name, mark, function
        self.begun, self.ended = threading.Event(), threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self.expected: int | None = None
        """The version of its condition."""

    @property
    def done(self) -> bool:
        return self.error is None

    @property
    def unknown(self) -> bool:
        """Whether it may or may not have happened."""
        return isinstance(self.error, asyncio.CancelledError) or not getattr(self.error, "certain", True)

    def __repr__(self) -> str:
        return f"<{self.call.kind} {self.name} {self.mark}: {self.error or self.value!r}>"


class Tasks:
    """Callers of an AsyncClient."""

    def __init__(self, url: str) -> None:
        self._thread = EventLoopThread()
        self.client: Any = self.result(lambda: _constructed(url))
        self._running: dict[Attempt, asyncio.Task[None]] = {}

    def result(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return await function()

        return asyncio.run_coroutine_threadsafe(run(), self._thread.loop).result(PATIENCE)

    def start(self, attempts: list[Attempt]) -> None:
        """In their order, and all of them before any is answered."""

        async def start() -> None:
            for attempt in attempts:
                self._running[attempt] = asyncio.create_task(self._run(attempt))
            await asyncio.sleep(0)

        self.result(start)

    async def _run(self, attempt: Attempt) -> None:
        attempt.begun.set()
        try:
            attempt.value = await attempt.function()
        except BaseException as error:
            attempt.error = error
        finally:
            attempt.ended.set()

    def cancel(self, attempts: list[Attempt]) -> None:
        async def cancel() -> None:
            for attempt in attempts:
                self._running[attempt].cancel()

        self.result(cancel)

    def close(self) -> None:
        self.result(self.client.close)
        self._thread.close()


async def _constructed(url: str) -> holdfast.AsyncClient:
    return holdfast.AsyncClient(url)


class Threads:
    """Callers of a Client. A thread cannot be cancelled."""

    def __init__(self, url: str) -> None:
        self.client: Any = holdfast.Client(url)
        self._pool = ThreadPoolExecutor(CALLERS)

    def result(self, function: Callable[[], Any]) -> Any:
        return function()

    def start(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            self._pool.submit(self._run, attempt)
        for attempt in attempts:
            assert attempt.begun.wait(PATIENCE)

    def _run(self, attempt: Attempt) -> None:
        attempt.begun.set()
        try:
            attempt.value = attempt.function()
        except BaseException as error:
            attempt.error = error
        finally:
            attempt.ended.set()

    def cancel(self, attempts: list[Attempt]) -> None: ...

    def close(self) -> None:
        self.client.close()
        self._pool.shutdown()


# Faults


class Network:
    """The way to a PostgreSQL server."""

    faults = tuple(FAULTS)

    def __init__(self, url: str) -> None:
        self._proxy = Proxy(url)
        self.url = self._proxy.url

    @contextmanager
    def fault(self, name: str, attempts: list[Attempt]) -> Iterator[None]:
        """In the block the calls are made; after it, it is as the fault says."""
        proxy = self._proxy
        before = proxy.messages + proxy.connections
        if name == "no session":
            proxy.cut()
        if name != "none":
            direction: Any = {"requests lost": "to_server", "timeout": None, "no session": None}.get(name, "to_client")
            proxy.stall(direction)
        yield
        if name != "none":
            eventually(lambda: proxy.messages + proxy.connections > before or _ended(attempts), "a request was sent")
        if name in ("answers lost", "requests lost"):
            proxy.cut()
        elif name == "down":
            proxy.reset()
            _await(attempts)
        elif name in TIMED:
            _await([each for each in attempts if each.call.kind == "lease"])
        proxy.heal()

    def close(self) -> None:
        self._proxy.close()


class File:
    """A SQLite file, which another connection may hold."""

    faults = GENTLE

    def __init__(self, url: str) -> None:
        self.url = url

    @contextmanager
    def fault(self, name: str, attempts: list[Attempt]) -> Iterator[None]:
        if name == "none":
            yield
            return
        with closing(
            sqlite3.connect(self.url.removeprefix("sqlite:///"), isolation_level=None, timeout=PATIENCE)
        ) as it:
            it.execute("begin immediate")
            yield
            it.execute("rollback")

    def close(self) -> None: ...


def _ended(attempts: list[Attempt]) -> bool:
    return all(each.ended.is_set() for each in attempts)


def _await(attempts: list[Attempt]) -> None:
    for each in attempts:
        assert each.ended.wait(PATIENCE), f"{each} hangs"


# The model


class Model:
    """One example: its names, what its callers hold, and what was acknowledged before."""

    def __init__(self, number: int, url: str, callers: Tasks | Threads, way: Network | File) -> None:
        self.url, self.callers, self.way, self.number = url, callers, way, number
        self.client = callers.client
        self.grants: dict[str, Any] = {}
        self.effects: list[tuple[str, str, str]] = []
        """What the functions of operations did: effect or rollback, the key, the mark of the call."""
        self.attempts: list[Attempt] = []
        self._marks = 0

    def play(self, script: list[Round]) -> None:
        for each in script:
            free = {name for name in map(self.lease_name, range(REFUSED)) if name not in self.grants}
            attempts = [self.attempt(call, each.fault) for call in each.calls]
            self.callers.result(self.client.leases.list)  # its session is open
            with self.way.fault(each.fault, attempts):
                self.callers.start(attempts)
                self.callers.cancel([attempt for attempt in attempts if attempt.call.cancelled])
            _await(attempts)
            self.attempts += attempts
            self.take_over_grants(attempts)
            self.check_reasons(attempts, each.fault)
            self.check_leases(attempts, each.fault, free)
            self.check_objects()
            self.check_operations()
        for name in list(self.grants):
            assert self.callers.result(self.grants.pop(name).release) is True
        self.check_leases([], "none", set())

    # Calls

    def lease_name(self, key: int) -> str:
        return f"{'refused-' if key == REFUSED else ''}lease-{self.number}-{key}"

    def attempt(self, call: Call, fault: str) -> Attempt:
        self._marks += 1
        mark = f"{self.number}-{self._marks}"
        if call.kind in ("lease", "release"):
            name = self.lease_name(call.key)
            if call.kind == "release" and name in self.grants:
                return Attempt(call, name, mark, self.grants.pop(name).release)
            lease, timeout = self.client.lease(name, ttl=LONG), 0.1 + call.way / 10 if fault in TIMED else 0.0
            return Attempt(call._replace(kind="lease"), name, mark, lambda: lease.acquire(timeout=timeout))
        if call.kind == "put":
            name = f"{'refused-' if call.key == REFUSED else ''}object-{self.number}-{call.key}"
            versions = [version for _, version, _ in self.witness("object", name)]
            condition = self.condition(call, versions)
            attempt = Attempt(call, name, mark, lambda: self.client.objects.put_if("box", name, mark, condition))
            attempt.expected = condition.version if isinstance(condition, MatchVersion) else None
            return attempt
        name = f"{'refused-' if call.key == REFUSED else ''}pipeline-{self.number}-{call.key}"
        key = holdfast.OperationKey(pipeline=name, task="t", dataset=name, operation="o")
        operation = self.client.operation(
            key, timeout=PATIENCE, ttl=LONG, rollback=lambda op: self.effects.append(("rollback", name, mark)),
            retry=holdfast.Retry(attempts=1000),
        )  # fmt: skip

        def effect() -> str:
            self.effects.append(("effect", name, mark))
            return mark

        return Attempt(call, name, mark, lambda: operation.run(effect))

    @staticmethod
    def condition(call: Call, versions: list[int]) -> Any:
        """Of a write of an object that had these versions: true or false before this round."""
        if call.key == REFUSED or call.way == 0:
            return MustCreate()
        if call.way == 1:
            return Unconditional()
        if call.way == 2:
            return MatchVersion(STALE)
        return MatchVersion(versions[-1]) if versions else MustCreate()

    def take_over_grants(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            if attempt.call.kind == "lease" and attempt.done:
                assert attempt.name not in self.grants, f"{attempt} while another caller has it"
                self.grants[attempt.name] = attempt.value

    # Checks

    def witness(self, kind: str, name: str) -> list[tuple[str, int, str]]:
        """The lines about it, in their order: mark, version, kind of change."""
        lines = query(
            self.url,
            "select mark, version, change from witness where kind = %s and name = %s order by place",
            kind,
            name,
        )
        return [(mark, int(version), change) for mark, version, change in lines]

    def check_reasons(self, attempts: list[Attempt], fault: str) -> None:
        """Only calls of refused names are refused, and without a fault no other call fails."""
        reasons: Any
        for each in attempts:
            was_refused = REFUSAL in str(each.error)
            if each.call.key == REFUSED and each.call.kind != "release":
                assert not each.done, f"{each} was acknowledged, and the database has refused it"
                # The one before it may be about to be refused, and have the name until then.
                reasons = (asyncio.CancelledError, *((holdfast.NotAcquired,) if each.call.kind == "lease" else ()))
                assert was_refused or isinstance(each.error, reasons) or fault not in GENTLE, repr(each)
            elif was_refused:
                raise AssertionError(f"{each} was refused for the sake of a neighbour")
            elif fault in GENTLE and not each.call.cancelled:
                expected = {"lease": holdfast.NotAcquired, "put": (holdfast.Conflict, holdfast.AlreadyExists)}
                reasons = expected.get(each.call.kind, ())
                assert each.done or isinstance(each.error, reasons), repr(each.error)
            elif not isinstance(each.error, holdfast.HoldfastError | asyncio.CancelledError | None):
                raise each.error

    def check_leases(self, attempts: list[Attempt], fault: str, free: set[str]) -> None:
        for each in attempts:
            if each.call.kind == "release" and not each.done:  # unknown: once more, without a fault
                with suppress(holdfast.LeaseLost):
                    self.callers.result(each.function)
        names = {each.name for each in attempts if each.call.kind in ("lease", "release")}
        held = {name: (self.stored(grant.token), grant.fence) for name, grant in self.grants.items()}
        eventually(lambda: self.held() == held, f"{self.held()} are held, and the callers have {held}")
        for name in names:
            written = [(mark, version, change == "delete") for mark, version, change in self.witness("lease", name)]
            tenures = [
                line[:2] for line, _ in groupby(written) if not line[2]
            ]  # a repeated acquire writes its row again
            fences = [fence for _, fence in tenures]
            assert fences == sorted(set(fences)), f"fences of {name}: {fences}"
            all_here = [each for each in self.attempts if (each.name, each.call.kind) == (name, "lease")]
            granted = Counter(token for token, _ in tenures)
            acknowledged = {self.stored(each.value.token) for each in all_here if each.done}
            assert all(granted[token] == 1 for token in acknowledged), (
                f"{granted} of {name}, {acknowledged} acknowledged"
            )
            unknown = sum(each.unknown for each in all_here)
            assert len(granted.keys() - acknowledged) <= unknown, f"{granted} of {name}, {all_here}"
            mine = [each for each in attempts if (each.name, each.call.kind) == (name, "lease")]
            if name in free and fault in GENTLE and mine and not any(each.unknown for each in mine):
                assert any(each.done for each in mine), f"{name} is free, and was granted to none of {mine}"

    def held(self) -> dict[str, tuple[str, int]]:
        prefix = "holdfast_" if self.url.startswith("sqlite") else "holdfast."
        rows = query(self.url, f"select name, token, fence from {prefix}lease")
        others = re.compile(rf"lease-(?!{self.number}-)")  # an example that fails leaves its leases
        return {
            name: (token if isinstance(token, str) else f"\\x{token.hex()}", int(fence))
            for name, token, fence in rows
            if not others.match(name)
        }

    def stored(self, token: str) -> str:
        """The hash of the token, as a trigger sees it."""
        if self.url.startswith("sqlite"):
            return sha256(token.encode()).hexdigest()
        return f"\\x{sha256(UUID(token).bytes).hexdigest()}"

    def check_objects(self) -> None:
        puts = [each for each in self.attempts if each.call.kind == "put"]
        for name in {each.name for each in puts}:
            lines = self.witness("object", name)
            versions = {mark.strip('"'): version for mark, version, _ in lines}
            order = [version for _, version, _ in lines]
            assert order == sorted(set(order)), f"versions of {name}: {order}"
            assert len(versions) == len(lines), f"a write of {name} happened twice: {lines}"
            for each in [each for each in puts if each.name == name]:
                if each.done:
                    assert versions.get(each.mark) == each.value.version, f"{each} was acknowledged: {lines}"
                    if each.expected is not None:
                        assert order[order.index(each.value.version) - 1] == each.expected, f"{each} was late: {lines}"
                elif not each.unknown:
                    assert each.mark not in versions, f"{each} has happened: {lines}"

    def check_operations(self) -> None:
        runs = [each for each in self.attempts if each.call.kind == "operation"]
        for name in {each.name for each in runs}:
            effects = [(what, mark) for what, key, mark in self.effects if key == name]
            for (what, _), (following, _) in pairwise(effects):
                assert (what, following) != ("effect", "effect"), f"two effects of {name}: {effects}"
            results = {each.value.result for each in runs if each.name == name and each.done}
            assert len(results) <= 1, f"{name} has the results {results}"
            for result in results:
                assert effects[-1] == ("effect", result), f"{name} has the result {result}, and did {effects}"
                ends = [mark for mark, _, _ in self.witness("operation", name) if mark == "success"]
                assert len(ends) == 1, f"{name} ended {len(ends)} times"


BOUNDED = settings(
    max_examples=trials(30),
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # a race may not occur again, and a failure may take a minute
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("callers", [Tasks, Threads])
def test_each_of_many_calls_has_the_outcome_that_it_is_told(
    either: str, callers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls of each round are made at once; some are cancelled, some refused, and their connection breaks."""
    for flavour in ("", "_async"):  # an acquire with a short timeout would give the database a second
        monkeypatch.setattr(f"holdfast.lease.handle{flavour}._MIN_TIMEOUT", 0.1)
    url = watched(migrated(either))
    numbers = iter(range(10**6))
    with ExitStack() as at_end:
        way = (File if url.startswith("sqlite") else Network)(url)
        at_end.callback(way.close)
        running = callers(way.url)
        at_end.callback(running.close)

        @BOUNDED
        @given(scripts(way.faults))
        def play(script: list[Round]) -> None:
            Model(next(numbers), url, running, way).play(script)

        play()


TURNS = 20


def test_no_task_calls_twice_while_another_waits(either: str) -> None:
    """Calls are answered in turn: of tasks that call again and again, none gets ahead of the others on one session."""

    async def play() -> list[list[int]]:
        done, seen = [0] * CALLERS, []
        async with holdfast.AsyncClient(either, sessions=1) as client:

            async def call(caller: int) -> None:
                for _ in range(TURNS):
                    await client.objects.put_if("box", f"{CALLERS - caller}", done[caller], Unconditional())
                    done[caller] += 1
                    if 0 not in done and max(done) < TURNS:
                        seen.append(list(done))

            await asyncio.gather(*map(call, range(CALLERS)))
        return seen

    lead = max(max(done) - min(done) for done in asyncio.run(play()))
    assert lead <= 3, f"a task was {lead} calls ahead of another"
