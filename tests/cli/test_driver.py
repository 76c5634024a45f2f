"""holdfast driver from the command line, as people use it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from tests.cli.command import Running, ask, columns_of, invoke, printed, valid
from tests.driver.daemon import clean, reaches


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    with Running("driver", cwd=tmp_path) as running:
        running.until_it_says("\n")
        where = tmp_path / "holdfast-driver" / "driver.sock"
        assert running.text == f"holdfast driver: listening on unix:{where}; 0 sandboxes, 0 running\n"
        yield tmp_path
        code, said = running.end(signal.SIGTERM)
        assert code == 0
        assert "web status Started" in said
    clean(tmp_path / "holdfast-driver")


def test_a_sandbox_is_created_listed_read_and_removed(here: Path) -> None:
    assert invoke("driver", "ls", cwd=here).stderr == "there are no sandboxes\n"
    script = "echo $COLOUR $SHADE; echo two; exec sleep 1000"
    variables = ("--env", "COLOUR=red=1", "--env", "SHADE")
    create = ("driver", "create", "web", *variables, "--open-files", "99", "--", "sh", "-c", script)
    assert ask(*create, cwd=here, SHADE="dark") == "created web\n"
    assert printed(*create, cwd=here, SHADE="dark") == "created web\n", "the same again"
    assert invoke("driver", "create", "web", "--", "true", cwd=here).returncode == 1
    printed("driver", "create", "gone", "--", "sh", "-c", "exit 3", cwd=here)

    where = f"unix:{here}/holdfast-driver/driver.sock"
    reaches(holdfast.reconciler.ProcessDriver(where), "gone", "Exited")
    rows = {row["sandbox"]: (row["state"], row["exit"]) for row in columns_of(printed("driver", "ls", cwd=here))}
    assert rows == {"web": ("Started", "-"), "gone": ("Exited", "3")}
    gone, web = valid("driver-ls", printed("driver", "ls", "--json", cwd=here))
    assert (gone["exit_code"], gone["ready"]) == (3, False)
    assert (web["env"], web["limits"], web["ready"]) == (["COLOUR", "SHADE"], {"open_files": 99}, True)
    assert printed("driver", "log", "web", cwd=here) == "red=1 dark\ntwo\n"
    assert printed("driver", "log", "web", "--tail", "1", cwd=here) == "two\n"
    assert printed("driver", "rm", "web", "gone", "never", HOLDFAST_DRIVER=where).splitlines() == [
        "removed web", "removed gone", "removed never"
    ]  # fmt: skip
    assert printed("driver", "--folder", "holdfast-driver", "ls", "--json", cwd=here) == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("ls",), 1, "cannot be reached"),
        (("create", "a"), 2, "COMMAND"),
        (("create", "a", "--env", "X", "--", "true"), 2, "is not set in the environment"),
        (("rm",), 2, "ID"),
        (("fly",), 2, "No such command"),
    ],
)
def test_a_mistake_is_a_line_on_stderr(tmp_path: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = invoke("driver", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert not (tmp_path / "holdfast-driver").exists()
