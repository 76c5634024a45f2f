"""The built wheel works where nothing of this checkout can be imported: a lease, a lock, an operation, the commands."""

from __future__ import annotations

import email
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("click", "rich", "markdown_it", "mdurl", "pygments")
"""What it depends on, with what that depends on."""
PROGRAM = """
import sys, holdfast
print(holdfast.__file__)
with holdfast.Client(sys.argv[1]) as client:
    with client.lease("nightly-import", ttl=600) as grant, client.lock(("agent", 7)):
        print(grant.fence > 0, [row.name for row in client.leases.list()], len(client.locks.list()))
    key = holdfast.OperationKey(pipeline="etl", task="load", dataset="parcels", operation="upsert", version="1")
    print([client.operation(key).run(lambda: 42).result for _ in range(2)])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what it is made of."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def env(wheel: Path) -> Path:
    """An environment with the wheel, what that depends on, and nothing else."""
    folder = wheel.parent / "env"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=wheel.parent)
    [packages] = folder.glob("lib/python*/site-packages")
    for name in NEEDED:
        (packages / name).symlink_to(Path(sysconfig.get_path("purelib"), name))
    options = ["install", "--no-index", "--no-deps", "--quiet", wheel]
    python = folder / "bin" / "python"
    if importlib.util.find_spec("pip") is not None:
        run(sys.executable, "-m", "pip", "--python", python, *options, cwd=folder)
    else:  # uv made the environment of the tests
        run("uv", "pip", *options, "--python", python, cwd=folder)
    return folder


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, cwd=cwd, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_lease_a_lock_and_an_operation(env: Path, tmp_path: Path) -> None:
    place, lease, operation = run(
        env / "bin" / "python", "-c", PROGRAM, f"sqlite:///{tmp_path}/app.db", cwd=tmp_path
    ).splitlines()
    assert Path(place).is_relative_to(env)
    assert lease == "True ['nightly-import'] 1"
    assert operation == "[42, 42]"


def test_the_command_line(env: Path, tmp_path: Path) -> None:
    command, url = env / "bin" / "holdfast", f"sqlite:///{tmp_path}/app.db"
    assert run(command, "--url", url, "run", "job", "--", "echo", "ran", cwd=tmp_path).endswith("ran\n")
    assert '"job"' in run(command, "--url", url, "history", "--json", "job", cwd=tmp_path)


def test_its_page_on_an_index_has_urls_and_no_link_that_only_works_in_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [each for each in archive.namelist() if each.endswith("/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    page = str(metadata.get_payload())
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    repository = dict(each.split(", ") for each in metadata.get_all("Project-URL", []))["Repository"]
    inside = [link.removeprefix(f"{repository}/blob/main/") for link in links if link.startswith(repository)]
    assert len(inside) > 10
    assert [link for link in inside if not (ROOT / link.partition("#")[0]).exists()] == []
    assert metadata["Author"] == "The holdfast maintainers"


def test_it_holds_what_users_can_use_and_not_the_proofs(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("holdfast/")}
    package = ROOT / "src" / "holdfast"
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert names == {f"holdfast/{path.relative_to(package).as_posix()}" for path in files}
    assert not [name for name in names if "chaos" in name or "succession" in name or "bugs" in name]


def test_the_source_archive_holds_what_its_tests_read(tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    [built] = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= names
