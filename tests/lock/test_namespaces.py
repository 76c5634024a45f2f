"""The numbers that namespaces get by their first use."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

import holdfast
from tests.children import PATIENCE, Child, eventually, query

PROCESSES, NAMESPACES = 4, 8

_FIRST_USE = """
import json, os, sys, threading, time, holdfast
url, folder, processes, namespaces = *sys.argv[1:3], *map(int, sys.argv[3:])
start, go = os.pipe()

def use(number):
    with client.lock((f"new {number}", 1), timeout=60), open(f"{folder}/{number}", "r+") as file:
        before = int(file.read())
        time.sleep(0.002)
        file.seek(0)
        file.write(str(before + 1))

def tell(text):
    os.write(1, text.encode() + b"\\n")

for _ in range(processes):
    if os.fork() == 0:
        os.close(go)
        client = holdfast.Client(url)
        client.lock("warm").acquire().release()
        users = [threading.Thread(target=use, args=(number,)) for number in range(namespaces)]
        tell("ready")
        os.read(start, 1)
        for user in users: user.start()
        for user in users: user.join()
        tell(json.dumps({name: int(number) for name, number in client._locks._namespaces.items()}))
        client.close()
        os._exit(0)
sys.stdin.readline()
os.close(go)
for _ in range(processes): os.wait()
"""


def test_processes_that_use_a_new_namespace_at_once_agree_on_its_number(either: str, tmp_path: Path) -> None:
    """And so exclude each other, from the very first time on."""
    counters = [tmp_path / str(number) for number in range(NAMESPACES)]
    for each in counters:
        each.write_text("0")
    with Child(_FIRST_USE, either, tmp_path, PROCESSES, NAMESPACES) as family:
        family.expect(*["ready"] * PROCESSES)
        family.say("go")
        first, *others = (json.loads(family.line()) for _ in range(PROCESSES))
    assert len(set(first.values())) == NAMESPACES
    assert others == [first] * (PROCESSES - 1)
    assert [each.read_text() for each in counters] == [str(PROCESSES)] * NAMESPACES


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_namespace_that_somebody_else_is_just_writing_down(postgres_url: str, ending: str) -> None:
    """The race above at its narrowest: its number is there, and nobody can see it yet."""
    blocked = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query ~ 'lock_namespace'"
    with (
        psycopg.connect(postgres_url) as other,
        holdfast.Client(postgres_url) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        row = other.execute("select holdfast.lock_namespace('new')").fetchone()
        assert row is not None
        asking = pool.submit(client.lock(("new", 7)).acquire)
        eventually(lambda: query(postgres_url, blocked), "it waits for whoever is first")
        getattr(other, ending)()
        asking.result(PATIENCE)
        held = other.execute("select pg_try_advisory_lock(holdfast.lock_namespace('new'), 7)").fetchone()
        assert (held, other.execute("select holdfast.lock_namespace('new')").fetchone()) == ((False,), row)
