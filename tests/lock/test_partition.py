"""A network that swallows everything: no end is told of it, and both notice within seconds.

A proxy cannot show it, because the kernel beside it would go on answering. So the whole scene has a network of its own,
where the one interface is taken down. What both ends set to notice it is tested with the sessions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ISOLATED = ("unshare", "--user", "--map-root-user", "--net")

_SCENE = """
import asyncio, fcntl, socket, struct, sys, time
from pathlib import Path
import holdfast
from holdfast.testing import Postgres

UP, GET, SET = 1, 0x8913, 0x8914

def loopback(up):
    with socket.socket() as any_socket:
        request = fcntl.ioctl(any_socket, GET, struct.pack("16sh14x", b"lo", 0))
        flags = struct.unpack("16sh14x", request)[1]
        fcntl.ioctl(any_socket, SET, struct.pack("16sh14x", b"lo", flags | UP if up else flags & ~UP))

async def noticed(what, limit=60.0):
    began = time.monotonic()
    while not what():
        assert time.monotonic() < began + limit, "nobody noticed"
        await asyncio.sleep(0.05)

async def partition(server, url, grant, told):
    grant.check()
    before = server.execute("select pid from pg_locks where locktype = 'advisory'")
    loopback(False)
    await noticed(lambda: grant.lost)  # where nothing is set, the kernel takes a quarter of an hour or two
    await noticed(lambda: not any(Path(f"/proc/{pid}").exists() for (pid,) in before))  # it has its own timers
    loopback(True)
    await noticed(lambda: told == [grant])
    after = server.execute("select pid from pg_locks where locktype = 'advisory'")
    print(len(before), len(after))

def threads(server, url):
    told = []
    with holdfast.Client(url) as client:
        grant = client.lock(("agent", 7), on_lost=told.append).acquire()
        asyncio.run(partition(server, url, grant, told))
        with client.lock(("agent", 7), timeout=60):
            print("ours again")
    with holdfast.Client(url) as other, other.lock(("agent", 7), timeout=60):
        print("free")

async def tasks(server, url):
    told = []
    async with holdfast.AsyncClient(url) as client:
        grant = await client.lock(("agent", 7), on_lost=told.append).acquire()
        waiting = asyncio.create_task(in_block(client))
        await noticed(lambda: in_blocks)
        await partition(server, url, grant, told)
        try:
            await waiting
        except holdfast.LockLost:
            print("its block is cancelled")
        async with client.lock(("agent", 7), timeout=60):
            print("ours again")
    async with holdfast.AsyncClient(url) as other, other.lock(("agent", 7), timeout=60):
        print("free")

in_blocks = []

async def in_block(client):
    async with client.lock(("agent", 8), on_lost="cancel") as grant:
        in_blocks.append(grant)
        await asyncio.sleep(600)

loopback(True)
with Postgres.create() as server:
    url = server.database()
    with holdfast.Client(url) as client:
        client.migrate()
    if sys.argv[1] == "threads":
        threads(server, url)
    else:
        asyncio.run(tasks(server, url))
"""


def isolated() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.realtime
@pytest.mark.skipif(not isolated(), reason="this machine gives no network of one's own")
@pytest.mark.parametrize(
    ("flavour", "report"),
    [
        ("threads", ["1 0", "ours again", "free"]),
        ("tasks", ["2 0", "its block is cancelled", "ours again", "free"]),
    ],
)
def test_a_partition_is_noticed_by_both_sides(tmp_path: Path, flavour: str, report: list[str]) -> None:
    """The folder is its own, too: here we look like root, whose servers may be elsewhere on this machine."""
    command = [*ISOLATED, sys.executable, "-c", _SCENE, flavour]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)
    assert done.stdout.splitlines() == report, done.stdout + done.stderr
