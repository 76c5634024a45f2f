"""The fixtures that come with holdfast, used as somebody else's tests would use them."""

import pytest

from holdfast.testing import available

pytest_plugins = ["pytester"]

PLUGIN = ("-p", "holdfast")
"""By the name of its entry point, and no other plugin: those of this environment take four seconds of CPU time."""

_NO_SERVERS = """
import holdfast.testing.binaries
holdfast.testing.binaries._places = lambda: iter(())
"""


@pytest.fixture(autouse=True)
def _no_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.skipif(not available(), reason="there is no PostgreSQL on this machine")
def test_a_client_on_a_fresh_database_of_one_server(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("time", ["first", "second"])
        def test_lease(holdfast_client, holdfast_postgres, time):
            databases = "select count(*) from pg_database where datname like 'test%'"
            assert holdfast_postgres.execute(databases) == [(1,)]
            assert holdfast_client.leases.list() == []
            grant = holdfast_client.lease("nightly", ttl=600).acquire()
            assert [lease.name for lease in holdfast_client.leases.list()] == ["nightly"]
        """
    )
    pytester.runpytest_subprocess(*PLUGIN).assert_outcomes(passed=2)


def test_where_there_is_no_server_a_client_has_a_file_and_a_test_of_the_server_is_skipped(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(_NO_SERVERS)
    pytester.makepyfile(
        """
        def test_lease(holdfast_client, tmp_path):
            with holdfast_client.lease("nightly", ttl=600):
                assert list(tmp_path.iterdir())

        def test_server(holdfast_postgres): ...
        """
    )
    result = pytester.runpytest_subprocess(*PLUGIN, "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines("SKIPPED*there is no PostgreSQL on this machine: pip install 'holdfast?testing?'*")


def test_the_plugin_costs_nothing_until_it_is_used(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing():
            assert "holdfast.testing.plugin" in sys.modules
            heavy = {"psycopg", "sqlite3", "holdfast.testing.postgres"}
            assert not heavy & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess(*PLUGIN).assert_outcomes(passed=1)
