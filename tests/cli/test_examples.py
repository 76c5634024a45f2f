"""The examples are valid: a crontab, a unit, a CronJob and scripts, and `holdfast run` parses their commands."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli.run_options import parse
from tests.children import PATIENCE
from tests.cli.command import ROOT, SCRIPT, environment

EXAMPLES = ROOT / "examples"
FIELD = r"(?:\*(?:/\d+)?|\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)"
SCHEDULE = re.compile(rf"{FIELD}(?: {FIELD}){{4}}\Z")


def parsed(words: list[str]) -> dict[str, Any]:
    """The arguments of the `holdfast run` in a command."""
    values = parse(words[words.index("holdfast") + 1 :])
    assert values is not None, words
    return values


def test_the_crontab_is_one_and_skips_what_another_machine_does() -> None:
    jobs = []
    for line in (EXAMPLES / "cron" / "holdfast.cron").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#") or re.match(r"[A-Z]+=\S+\Z", line):
            continue
        *when, command = line.split(" ", 5)
        assert SCHEDULE.match(" ".join(when)), line
        assert "%" not in command, "cron takes it for the end of the line"
        subprocess.run(["/bin/sh", "-n", "-c", command], check=True, timeout=PATIENCE)
        jobs.append(parsed(shlex.split(command)))
    assert [(job["name"], job["skip"]) for job in jobs] == [("sweep", True), ("nightly", True)]


def test_the_unit_is_one_and_waits_for_its_turn() -> None:
    unit = EXAMPLES / "systemd" / "sweep.service"
    [start] = re.findall(r"^ExecStart=(.*)$", unit.read_text(encoding="utf-8"), re.MULTILINE)
    values = parsed(shlex.split(start))
    assert (values["wait"], values["argv"]) == (True, ["/opt/app/sweeper"])
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert "sweep.service:" not in done.stderr, done.stderr


def test_the_cronjob_is_one_and_takes_its_url_from_a_secret() -> None:
    job = yaml.safe_load((EXAMPLES / "kubernetes" / "cronjob.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "CronJob")
    assert SCHEDULE.match(job["spec"]["schedule"])
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    values = parsed(container["command"] + container["args"])
    assert (values["skip"], values["url"], values["argv"][0]) == (True, None, "python")
    [variable] = container["env"]
    assert (variable["name"], set(variable)) == ("HOLDFAST_URL", {"name", "valueFrom"})
    assert pod["restartPolicy"] in ("Never", "OnFailure")


def test_the_deploy_step_migrates_once_at_a_time_from_many_machines(postgres_url: str, tmp_path: Path) -> None:
    """Two at once: the second begins when the first is done. What they do is visible if they overlap."""
    script = EXAMPLES / "deploy-migration" / "migrate.sh"
    migrate = f"mkdir {tmp_path}/busy && echo $HOLDFAST_LEASE >> {tmp_path}/done && rmdir {tmp_path}/busy"
    more = environment(HOLDFAST_URL=postgres_url, MIGRATE=migrate)
    more["PATH"] = f"{Path(SCRIPT).parent}:{more['PATH']}"
    steps = [subprocess.Popen([str(script)], env=more, stdout=subprocess.DEVNULL) for _ in range(2)]
    try:
        assert [step.wait(2 * PATIENCE) for step in steps] == [0, 0]
    finally:
        for step in steps:
            step.kill()
            step.wait()
    assert (tmp_path / "done").read_text() == "app-migration\n" * 2


@pytest.mark.parametrize("script", sorted(EXAMPLES.rglob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse_and_can_be_executed(script: Path) -> None:
    subprocess.run(["/bin/sh", "-n", str(script)], check=True, timeout=PATIENCE)
    assert script.stat().st_mode & 0o111
