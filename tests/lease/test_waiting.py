"""``LeaseRecord.waiting``: how many processes wait for a lease, on every engine and in both flavours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import holdfast
from holdfast.testing.lease_contract import refused_after_waiting
from holdfast.testing.lease_contract import waiting as in_a_thread
from tests.children import Child, eventually, rows

Connect = Callable[..., Any]

WAIT = """
    import sys, holdfast
    with holdfast.Client(sys.argv[1]) as client:
        with {handle}.acquire(timeout=None):
            print("it holds it", flush=True)
            sys.stdin.readline()
"""
FOR_THE_LEASE = WAIT.format(handle="client.lease('import', ttl=600)")
FOR_A_SLOT = WAIT.format(handle="client.slots('gpu', 2, ttl=600).slot()")
STANDBY = """
    import sys, holdfast
    with holdfast.Client(sys.argv[1]) as client:
        client.elector("import", ttl=600, retry_every=100).run(lambda term: term.stopping.wait())
"""


@contextmanager
def processes(url: str, *programs: str) -> Iterator[list[Child]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Child(program, url)) for program in programs]


def reaches(client: Any, name: str, count: int) -> None:
    eventually(lambda: client.leases.get(name).waiting == count, f"{count} wait for {name}")


def test_each_process_that_waits_counts_once_however_it_ends(connect: Connect, url: str) -> None:
    client = connect(url)
    grant = client.lease("import", ttl=600).acquire()
    client.lease("export", ttl=600).acquire()
    assert client.leases.get("import").waiting == 0
    with processes(url, *[FOR_THE_LEASE] * 3) as (first, second, third):
        reaches(client, "import", 3)
        assert {record.name: record.waiting for record in client.leases.list()} == {"export": 0, "import": 3}
        first.process.kill()
        reaches(client, "import", 2)
        grant.release()
        eventually(lambda: client.leases.get("import") is not None, "one of them holds it")
        reaches(client, "import", 1)
        for each in (second, third):
            each.process.kill()


def test_threads_of_one_process_count_once_and_not_after_they_gave_up(connect: Connect, url: str) -> None:
    client, other = connect(url), connect(url)
    grant = client.lease("import", ttl=600).acquire()

    def wait_in_turn() -> None:
        other.lease("import", ttl=600).acquire(timeout=600).release()

    with in_a_thread(wait_in_turn), in_a_thread(wait_in_turn):
        reaches(client, "import", 1)
        grant.release()
    client.lease("import", ttl=600).acquire()
    reaches(client, "import", 0)
    assert refused_after_waiting(lambda: other.lease("import").acquire(timeout=0.05)).name == "import"
    reaches(client, "import", 0)


def test_those_who_want_a_slot_wait_for_any_of_its_pool(connect: Connect, url: str) -> None:
    client = connect(url)
    for pool in ("gpu", "gpu:1", "gpu:"):  # a pool may be named like a slot of another
        for _ in range(2):
            client.slots(pool, 2, ttl=600).claim(owner="session")
    with processes(url, FOR_A_SLOT, FOR_A_SLOT.replace("gpu", "gpu:")):
        for name in ("@slot:gpu:1", "@slot:gpu::1"):
            reaches(client, name, 1)
        assert {record.name: record.waiting for record in client.leases.list()} == {
            "@slot:gpu:1": 1, "@slot:gpu:2": 1, "@slot:gpu:1:1": 0, "@slot:gpu:1:2": 0, "@slot:gpu::1": 1,
            "@slot:gpu::2": 1,
        }  # fmt: skip


def test_the_standby_of_an_elector_waits(connect: Connect, url: str) -> None:
    client = connect(url)
    with processes(url, STANDBY, STANDBY):
        eventually(lambda: client.leases.get("import") is not None, "one of them leads")
        reaches(client, "import", 1)


def test_another_schema_has_its_own_waiters(connect: Connect, url: str) -> None:
    client, tenant = connect(url), connect(url, schema="tenant_a")
    tenant.migrate()
    for each in (client, tenant):
        each.lease("import", ttl=600).acquire()
    with processes(url, FOR_THE_LEASE.replace("argv[1]", "argv[1], schema='tenant_a'")):
        reaches(tenant, "import", 1)
        assert client.leases.get("import").waiting == 0


def test_to_wait_writes_nothing(connect: Connect, url: str) -> None:
    client = connect(url)
    client.lease("import", ttl=600).acquire()
    before = rows(url)
    with processes(url, FOR_THE_LEASE):
        reaches(client, "import", 1)
        assert rows(url) == before


def test_who_waits_through_a_pooler_polls_and_is_not_counted(pooled_url: str, postgres_url: str) -> None:
    with holdfast.Client(postgres_url) as client:
        grant = client.lease("import", ttl=600).acquire()
        with processes(pooled_url, FOR_THE_LEASE) as (pooled,), processes(postgres_url, FOR_THE_LEASE) as (direct,):
            reaches(client, "import", 1)
            direct.process.kill()
            reaches(client, "import", 0)
            grant.release()
            assert pooled.line() == "it holds it", "although it was not counted"
