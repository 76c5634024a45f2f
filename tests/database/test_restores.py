"""A database that was set back: its numbers rise above all that were lost, and nothing is skipped in silence.

Each kind of restore is a generator in three steps: it yields the URL of a database to use; makes the backup, and
yields the URL to use from then on; loses that, and yields the URL of what was restored.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

import holdfast
from holdfast.testing import Postgres
from holdfast.testing.server import until
from holdfast.testing.server_user import server_user
from tests.conftest import NEWEST, OLDEST, fresh, migrated, server
from tests.raw_session import Raw

Steps = Generator[str, None, None]

WRITE = """select holdfast.operation_write(%s, 'old', 'new', 2, '[]', 'success', 1, 1, null, null, null, null, null,
    false, 0, null, 'owner', %s, null, null, 'x', null, null, null, null, null, null)"""


@dataclass
class Usage:
    """What the users of a database got from it."""

    fences: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cursors: list[str] = field(default_factory=list)
    log_cursor: str = ""
    token: str = ""
    published: list[str] = field(default_factory=list)


class Published:
    """A sink that remembers the labels of operations whose end it was sent."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def publish(self, events: Any) -> None:
        self.labels += [event.label for event in events if event.type == "COMPLETE"]


def use(url: str, label: str) -> Usage:
    """Lease, write, run operations and publish them. The leases are acquired as from psql, by a session that has never
    called hello()."""
    usage, sink = Usage(), Published()
    with closing(Raw(url)) as raw:
        for _ in range(30):
            row = raw.acquire("name", ttl=600.0)
            usage.fences.append(row["fence"])
            raw.release("name", row["token"])
        usage.token = raw.acquire(f"owner of {label}", ttl=600.0)["token"]
    with holdfast.Client(url) as client:
        client.objects.put_if("box", label, 0, holdfast.MustCreate())
        start = client.objects.cursor()
        for _ in range(5):
            usage.versions.append(client.objects.update("box", label, lambda record: record.payload + 1).version)
        with client.objects.watch(since=start) as watch:
            changes = [watch.next(timeout=60) for _ in usage.versions]
        usage.cursors += [*(change.cursor for change in changes if change is not None), client.objects.cursor()]
        assert not client.operation(label).run(lambda: label).replayed
        client.relay("lineage", sink).step()
        page = client.operations.read()
        usage.log_cursor, usage.published = page.cursor, sink.labels
    return usage


def changes_since(client: holdfast.Client, cursor: str) -> list[str] | None:
    """The ids in the changes since then, or None if the cursor has expired."""
    ids: list[str] = []
    try:
        with client.objects.watch(since=cursor) as watch:
            while (change := watch.next(timeout=0)) is not None:
                ids.append(change.id)
    except holdfast.CursorExpired:
        return None
    return ids


def log_since(client: holdfast.Client, cursor: str) -> bool | None:
    """Whether there are entries since then, or None if the cursor has expired."""
    try:
        return bool(client.operations.read(cursor).entries)
    except holdfast.CursorExpired:
        return None


def run(target: Postgres, program: str, url: str, *arguments: str) -> None:
    target.binaries.run(program, f"--dbname={url}", *arguments)


def load(target: Postgres, url: str, dump: Path) -> None:
    run(target, "psql", url, "--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1", f"--file={dump}")


def server_on_copy(origin: Postgres, copy: Callable[[Path], object]) -> Postgres:
    """Another server, with the data that ``copy`` writes into a folder. Not started."""
    restored = Postgres(origin.binaries, None)
    copy(restored.data)
    server_user().own(restored.data)
    restored.data.chmod(0o700)
    return restored


def url_of(restored: Postgres) -> str:
    restored.start()
    return f"{restored.url.rpartition('/')[0]}/app"


# Physical restores


def stopped_copy() -> Steps:
    with Postgres.create() as origin:
        yield (url := migrated(origin.database("app")))
        origin.stop()
        with server_on_copy(origin, lambda folder: shutil.copytree(origin.data, folder)) as copy:
            origin.start()
            yield url
            origin.stop()
            yield url_of(copy)


def base_backup() -> Steps:
    with Postgres.create() as origin:
        yield (url := migrated(origin.database("app")))

        def copy(folder: Path) -> None:
            where = ("-D", str(folder), "-h", "127.0.0.1", "-p", str(origin.port), "-U", "postgres")
            origin.binaries.run("pg_basebackup", *where, "--checkpoint=fast", "--no-sync", "--no-manifest")

        with server_on_copy(origin, copy) as restored:
            yield url
            origin.kill()
            yield url_of(restored)


def snapshot_of_a_volume() -> Steps:
    """The copy of a paused server is what a snapshot of its volume is: one instant of all files."""
    with Postgres.create(settings={"full_page_writes": "on"}) as origin:
        yield (url := migrated(origin.database("app")))
        origin.pause()

        def copy(folder: Path) -> None:
            shutil.copytree(origin.data, folder)
            (folder / "postmaster.pid").unlink()

        with server_on_copy(origin, copy) as restored:
            origin.resume()
            yield url
            origin.kill()
            yield url_of(restored)


def point_in_time() -> Steps:
    with Postgres.create() as origin:
        archive = origin.folder / "archive"
        archive.mkdir()
        server_user().own(archive)
        settings = {"archive_mode": "on", "archive_command": f"cp %p {archive}/%f"}
        origin._configure(settings, "postgresql.conf")
        origin.restart()
        url = migrated(origin.database("app"))

        def copy(folder: Path) -> None:
            where = ("-D", str(folder), "-h", "127.0.0.1", "-p", str(origin.port), "-U", "postgres")
            origin.binaries.run("pg_basebackup", *where, "--checkpoint=fast", "--no-sync", "--no-manifest")

        with server_on_copy(origin, copy) as restored:
            yield url
            origin.execute("select pg_create_restore_point('here')")
            yield url
            [[wal]] = origin.execute("select pg_walfile_name(pg_switch_wal())")
            until(lambda: (archive / wal).exists(), what="the WAL is archived")
            origin.stop()
            target = {"restore_command": f"cp {archive}/%f %p", "recovery_target_name": "here"}
            restored._configure({**target, "recovery_target_action": "promote"}, "postgresql.auto.conf")
            restored._configure({}, "recovery.signal")
            there = url_of(restored)
            until(lambda: restored.is_primary, what="it is recovered")
            yield there


def wait_for_replay(standby: Postgres, end: str) -> None:
    until(lambda: standby.execute(f"select pg_last_wal_replay_lsn() >= '{end}'") == [(True,)], what="it has all of it")


def standby_that_never_followed() -> Steps:
    """Both standbys begin the second timeline."""
    with Postgres.create() as origin:
        url = migrated(origin.database("app"))
        first, second = origin.standby(name="standby1"), origin.standby(name="standby2")
        yield url
        end = origin.execute("select pg_current_wal_lsn()::text")[0][0]
        for each in (first, second):
            wait_for_replay(each, end)
        second.stop()
        origin.kill()
        first.promote()
        yield url_of(first)
        first.kill()
        second.start()
        second.promote()
        yield url_of(second)


# Logical restores


def source() -> tuple[Postgres, str, Path]:
    origin = server(NEWEST)
    return origin, fresh(NEWEST), origin.folder / f"{uuid4().hex}.sql"


def same_dump_twice() -> Steps:
    origin, url, dump = source()
    yield url
    run(origin, "pg_dump", url, f"--file={dump}")
    load(origin, once := origin.database(), dump)
    yield once
    load(origin, twice := origin.database(), dump)
    yield twice


def data_only() -> Steps:
    origin, url, dump = source()
    yield url
    run(origin, "pg_dump", url, "--data-only", f"--file={dump}")
    yield url
    with psycopg.connect(url, autocommit=True) as connection:
        query = "select string_agg(format('holdfast.%I', tablename), ', ') from pg_tables where schemaname = 'holdfast'"
        [tables] = connection.execute(query).fetchone() or ("",)
        connection.execute(f"truncate {tables}".encode())
    load(origin, url, dump)
    yield url


def template() -> Steps:
    origin, url, _ = source()
    yield url
    copy = origin.database(like=url)
    yield url
    yield copy


def dump_of_a_dump() -> Steps:
    """Into a third cluster, where tables get the oids that they have in the second."""
    origin, url, dump = source()
    yield url
    run(origin, "pg_dump", url, f"--file={dump}")
    with Postgres.create(major=NEWEST) as second, Postgres.create(major=NEWEST) as third:
        load(second, there := second.database("app"), dump)
        with closing(Raw(there)) as raw:
            raw.acquire("after the first restore")
        run(second, "pg_dump", there, f"--file={dump}")
        yield there
        load(third, last := third.database("app"), dump)
        yield last


def into_another_database() -> Steps:
    origin, url, dump = source()
    yield url
    run(origin, "pg_dump", url, f"--file={dump}")
    yield url
    load(origin, other := origin.database(), dump)
    yield other


def over_itself() -> Steps:
    origin, url, dump = source()
    yield url
    run(origin, "pg_dump", url, "--clean", "--if-exists", f"--file={dump}")
    yield url
    load(origin, url, dump)
    yield url


def dropped_schema() -> Steps:
    origin, url, dump = source()
    yield url
    run(origin, "pg_dump", url, "--schema=holdfast", f"--file={dump}")
    yield url
    origin.execute("drop schema holdfast cascade", dbname=url.rpartition("/")[2])
    load(origin, url, dump)
    yield url


def older_server() -> Steps:
    """A dump of the oldest PostgreSQL, restored into the newest."""
    origin, url = server(OLDEST), fresh(OLDEST)
    dump = origin.folder / f"{uuid4().hex}.sql"
    yield url
    run(origin, "pg_dump", url, f"--file={dump}")
    yield url
    load(server(NEWEST), there := server(NEWEST).database(), dump)
    yield there


PHYSICAL = (stopped_copy, base_backup, snapshot_of_a_volume, point_in_time, standby_that_never_followed)
LOGICAL = (
    same_dump_twice, data_only, template, dump_of_a_dump, into_another_database, over_itself, dropped_schema,
    older_server,
)  # fmt: skip


def sqlite_file(folder: Path) -> Steps:
    yield (url := migrated(f"sqlite:///{folder / 'app.db'}"))
    with closing(sqlite3.connect(folder / "app.db")) as connection:  # a session of the background thread may be open
        connection.execute("pragma wal_checkpoint(truncate)")
    shutil.copy(folder / "app.db", folder / "backup.db")
    yield url
    for beside in ("-wal", "-shm"):
        Path(f"{folder / 'app.db'}{beside}").unlink(missing_ok=True)
    (folder / "backup.db").replace(folder / "app.db")
    yield url


@pytest.fixture(params=[*PHYSICAL, *LOGICAL, sqlite_file], ids=lambda kind: kind.__name__)
def restored(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The URL of a restored database, what its users got before the backup, and what they got and lost after it."""
    steps = sqlite_file(tmp_path) if request.param is sqlite_file else request.param()
    try:
        before = use(next(steps), "before")
        lost = use(next(steps), "lost")
        yield request.param, next(steps), before, lost
    finally:
        steps.close()


def test_numbers_rise_and_nothing_is_skipped(restored: Any) -> None:
    kind, url, before, lost = restored
    after = use(url, "after")
    assert min(after.fences) > max(lost.fences), "fences"
    assert min(after.versions) > max(lost.versions), "versions"
    with holdfast.Client(url) as client:
        assert client.objects.get("box", "lost") is None
        assert [changes_since(client, cursor) for cursor in lost.cursors] == [None] * 6, "cursors that saw lost changes"
        assert log_since(client, lost.log_cursor) is None, "a log cursor that saw lost entries"
        expected = None if kind in LOGICAL else ["after"] * 6
        assert changes_since(client, before.cursors[-1]) == expected, "a cursor from before the backup"
        assert log_since(client, before.log_cursor) is (None if kind in LOGICAL else True)
        assert client.operation("before").run(lambda: "again").replayed
        assert not client.operation("lost").run(lambda: "again").replayed, "what was forgotten runs again"
        assert after.published == ["after"], "relays skip nothing"
        with pytest.raises(holdfast.LeaseLost):
            client.lease("owner of lost").adopt(lost.token)
    if kind is not sqlite_file:
        with psycopg.connect(url) as connection, pytest.raises(psycopg.Error) as refused:
            connection.execute(WRITE, ["lost", lost.token])
        assert refused.value.sqlstate == "HF001", "an earlier owner's finish"
