"""A dump that was restored is older than what has been granted since it was taken: fences must not come again."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from holdfast.testing import Postgres
from tests.conftest import MAJORS, NEWEST, migrated, server
from tests.raw_session import Raw


def restored(dump: Path, target: Postgres) -> Raw:
    url = target.database()
    target.binaries.run("psql", "--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1", f"--dbname={url}", f"--file={dump}")
    return Raw(url)


def test_fences_rise_over_a_dump_restored_here_or_elsewhere() -> None:
    """Also for psql and others who call the functions without a greeting, where the cluster is the same."""
    source, elsewhere = server(MAJORS[0]), server(NEWEST)
    if not all((each.binaries.folder / "pg_dump").exists() for each in (source, elsewhere)):
        pytest.skip("no pg_dump beside the server")
    url = migrated(source.database())
    dump = source.folder / "dump.sql"
    with closing(Raw(url)) as old:
        first = old.acquire("x")["fence"]
        source.binaries.run("pg_dump", "--dbname", url, "--file", str(dump))
        last = [old.acquire(f"after the dump {number}")["fence"] for number in range(5)][-1]
    assert last > first
    for target, greeted in ((source, True), (source, False), (elsewhere, True)):
        with closing(restored(dump, target)) as raw:
            if greeted:
                raw.call("hello")
            lifted = raw.acquire("y")["fence"]
            assert lifted > last, (target.folder, greeted)
            if greeted:
                raw.call("hello")
            assert raw.acquire("z")["fence"] == lifted + 1, "lifted once, not with every greeting"
    dump.unlink()
