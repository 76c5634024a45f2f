"""A dump that was restored is older than what has been granted since it was taken: fences must not come again."""

from __future__ import annotations

import pytest

from holdfast.testing import Postgres
from tests.conftest import MAJORS, NEWEST, migrated, server
from tests.raw_session import Raw


def copied(source: Postgres, url: str, target: Postgres, *, meanwhile: int) -> tuple[Raw, int]:
    """The database as it was, in a new one on ``target``; and the last fence granted in the old one meanwhile."""
    dump = target.folder / "dump.sql"
    source.binaries.run("pg_dump", "--dbname", url, "--file", str(dump))
    old = Raw(url)
    fences = [old.acquire(f"after the dump {number}")["fence"] for number in range(meanwhile)]
    old.close()
    restored = target.database()
    target.binaries.run(
        "psql", "--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1", f"--dbname={restored}", f"--file={dump}"
    )
    dump.unlink()
    return Raw(restored), fences[-1]


@pytest.mark.parametrize(("target", "greeted"), [(MAJORS[0], True), (MAJORS[0], False), (NEWEST, True)])
def test_fences_rise_over_a_dump_restored_here_or_elsewhere(target: int, greeted: bool) -> None:
    """Also for psql and others who call the functions without a greeting, where the cluster is the same."""
    if not (server(target).binaries.folder / "pg_dump").exists():
        pytest.skip("no pg_dump beside the server")
    source = server(MAJORS[0])
    url = migrated(source.database())
    before = Raw(url)
    first = before.acquire("x")["fence"]
    before.close()
    raw, last = copied(source, url, server(target), meanwhile=5)
    assert last > first
    if greeted:
        raw.call("hello")
    restored = raw.acquire("y")["fence"]
    assert restored > last
    if greeted:
        raw.call("hello")
    assert raw.acquire("z")["fence"] == restored + 1, "lifted once, not with every greeting"
    raw.close()
