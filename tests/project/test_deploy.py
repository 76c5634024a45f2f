"""What is in deploy/ is what it looks like, and what it calls is there: commands, flags, variables, paths, probes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import psycopg
import pytest
import yaml
from dockerfile_parse import DockerfileParser

import holdfast
from holdfast.cli.app import app
from holdfast.gateway.settings import OPTIONS
from holdfast.testing.binaries import available
from tests.children import query
from tests.cli.command import ROOT

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
EXAMPLE = ROOT / "examples/systemd/sweep.service"
VARIABLES = {f"HOLDFAST_{name.upper()}" for name in OPTIONS} | {
    "HOLDFAST_URL", "HOLDFAST_TOKENS", "HOLDFAST_KEY", "HOLDFAST_DRIVER_TOKEN", "HOLDFAST_REPLICA_ID",
}  # fmt: skip
GATEWAY_PORT = 7411


def understood(words: list[str]) -> tuple[str, dict[str, Any]]:
    """What holdfast makes of a command line, without doing it; a mistake in it is an error here."""
    context = click.Context(app, info_name="holdfast")
    name, command, rest = app.resolve_command(context, list(words))
    assert name is not None
    assert command is not None
    for index, word in enumerate(rest[:-1]):  # a file that is there only where it is deployed
        if word == "--token-file":
            rest[index + 1] = os.devnull
    with command.make_context(name, rest, parent=context) as found:
        return name, dict(found.params)


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def containers() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        for document in documents(path):
            pod = document.get("spec", {}).get("template", {}).get("spec", {})
            yield from (*pod.get("initContainers", ()), *pod.get("containers", ()))


def manifest(kind: str, name: str = "holdfast") -> dict[str, Any]:
    [found] = [
        each
        for path in MANIFESTS
        for each in documents(path)
        if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_valid(path: Path) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_page_on_kubernetes_shows_valid_manifests_that_call_what_there_is() -> None:
    page = (ROOT / "docs/howto/kubernetes.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    manifests = [each for block in shown for each in yaml.safe_load_all(block)]
    cronjob, deployment, budget, *parts = manifests
    pod = deployment["spec"]["template"]["spec"]
    for part in parts:  # of a container
        pod["containers"][0] |= part
    for each in (cronjob, deployment, budget):
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    [job] = cronjob["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    [migrate] = pod["initContainers"]
    for program, *words in (job["command"] + job["args"], migrate["command"]):
        assert (program, understood(words)[0]) in {("holdfast", "run"), ("holdfast", "migrate")}
    [example] = documents(ROOT / "examples/kubernetes/cronjob.yaml")
    assert (
        example["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        == cronjob["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    )


def test_every_container_calls_what_there_is_with_secrets_from_secrets() -> None:
    called = []
    for each in containers():
        called.append(understood(each["args"])[0])
        for variable in each.get("env", ()):
            assert variable["name"] in VARIABLES | {"POD_IP"}
            secret = variable["name"] in {"HOLDFAST_URL", "HOLDFAST_TOKENS", "HOLDFAST_DRIVER_TOKEN"}
            assert secret == ("secretKeyRef" in variable.get("valueFrom", {}))
        assert each["securityContext"]["allowPrivilegeEscalation"] is False
    assert sorted(called) == ["driver", "migrate", "serve"]


def test_the_deployment_has_probes_a_budget_and_time_to_hand_over() -> None:
    deployment, budget, service = manifest("Deployment"), manifest("PodDisruptionBudget"), manifest("Service")
    pod = deployment["spec"]["template"]
    [gateway] = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"].items()
    assert deployment["spec"]["replicas"] == 3
    for chosen in (
        deployment["spec"]["selector"]["matchLabels"],
        budget["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
    ):
        assert chosen.items() <= labels
    assert budget["spec"]["maxUnavailable"] == 1
    probes = {name: gateway[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz",
    }  # fmt: skip
    assert gateway["ports"] == [{"name": "http", "containerPort": GATEWAY_PORT}]
    assert {probe["port"] for probe in probes.values()} == {"http"}
    [*_, script] = gateway["lifecycle"]["preStop"]["exec"]["command"]
    assert script.startswith("kill -USR1 1")
    [before] = re.findall(r"sleep (\d+)", script)
    [within] = [int(each["value"]) for each in gateway["env"] if each["name"] == "HOLDFAST_STOP_WITHIN"]
    assert int(before) + within < pod["spec"]["terminationGracePeriodSeconds"]


def test_only_the_gateway_reaches_the_driver_and_no_service_sets_a_variable_of_ours() -> None:
    for pod in (manifest("Deployment"), manifest("StatefulSet", "holdfast-driver")):
        assert pod["spec"]["template"]["spec"]["enableServiceLinks"] is False
    policy = manifest("NetworkPolicy", "holdfast-driver")["spec"]
    driver = manifest("StatefulSet", "holdfast-driver")["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= driver["metadata"]["labels"].items()
    [rule] = policy["ingress"]
    [source] = rule["from"]
    assert source["podSelector"]["matchLabels"] == manifest("Deployment")["spec"]["selector"]["matchLabels"]
    assert policy["policyTypes"] == ["Ingress"]
    assert [port["port"] for port in rule["ports"]] == [
        port["name"] for port in driver["spec"]["containers"][0]["ports"]
    ]


def test_the_role_that_migrates_is_not_the_one_of_the_gateway() -> None:
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    keys = [
        each["valueFrom"]["secretKeyRef"]["key"]
        for container in (*pod["initContainers"], *pod["containers"])
        for each in container["env"]
        if each["name"] == "HOLDFAST_URL"
    ]
    assert keys == ["owner-url", "url"]


def test_the_roles_of_compose_are_no_superusers_and_that_of_the_gateway_owns_nothing(
    postgres_url: str, tmp_path: Path
) -> None:
    """Runs the scripts of the containers for database and grants on a real server."""
    for role in ("owner", "gateway"):
        (tmp_path / role).write_text(f"it's a secret of {role}\n")
    name = f"compose_{os.getpid()}"

    def renamed(file: str) -> str:
        text = (DEPLOY / file).read_text(encoding="utf-8")
        text = text.replace("role holdfast", f"role {name}")
        text = text.replace("database holdfast owner holdfast", f"database {name} owner {name}")
        return re.sub(r"\b(role|to) (worker|operator|gateway)\b", rf"\1 {name}_\2", text)

    address = psycopg.conninfo.conninfo_to_dict(postgres_url)
    variables = {f"PG{key.upper()}": str(value) for key, value in address.items() if key in ("host", "port", "user")}
    _, programs = max(available().items())
    try:
        subprocess.run(
            ["/bin/sh", "-c", renamed("compose-database.sh")], check=True, timeout=60,
            env=variables | {
                "PATH": f"{programs}:/usr/bin:/bin", "HOLDFAST_OWNER_PASSWORD_FILE": f"{tmp_path}/owner",
                "HOLDFAST_GATEWAY_PASSWORD_FILE": f"{tmp_path}/gateway",
            },
        )  # fmt: skip
        rows = query(
            postgres_url,
            "select rolname, rolsuper, rolcreaterole, rolcanlogin from pg_roles where rolname like %s order by 1",
            f"{name}%",
        )
        may_log_in = {"": True, "_gateway": True, "_operator": False, "_worker": False}
        assert rows == [(f"{name}{role}", False, False, can) for role, can in may_log_in.items()]
        place = f"{address['host']}:{address['port']}/{name}"
        owner = f"postgresql://{name}:it's%20a%20secret%20of%20owner@{place}"
        with holdfast.Client(owner) as client:
            client.migrate()
        for _ in range(2):
            with psycopg.connect(owner, autocommit=True) as session:
                session.execute(renamed("roles.sql").encode())
        with holdfast.Client(f"postgresql://{name}_gateway:it's%20a%20secret%20of%20gateway@{place}") as client:
            assert client.objects.list("@sandbox") == []
            assert client.audit.list() == []
    finally:
        with psycopg.connect(postgres_url, autocommit=True) as superuser:
            superuser.execute(f"drop database if exists {name}")
            for role in ("_gateway", "_operator", "_worker", ""):
                superuser.execute(f"drop role if exists {name}{role}")


def test_the_driver_is_where_the_replicas_look_for_it() -> None:
    service = manifest("Service", "holdfast-driver")
    [gateway] = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    [address] = [each["value"] for each in gateway["env"] if each["name"] == "HOLDFAST_DRIVER"]
    assert address == f"http://holdfast-driver:{service['spec']['ports'][0]['port']}"


def test_the_image_is_built_of_what_there_is_and_runs_as_nobody_of_importance() -> None:
    steps = DockerfileParser(path=str(DEPLOY / "Dockerfile")).structure
    by_name: dict[str, list[str]] = {}
    for step in steps:
        by_name.setdefault(step["instruction"], []).append(step["value"])
    [base] = by_name["ARG"]
    assert re.fullmatch(r"BASE=python:\d\S*", base), "its version"
    assert [image.partition(" ")[0] for image in by_name["FROM"]] == ["${BASE}", "${BASE}"], "to be given by digest"
    installs = [words for step in by_name["RUN"] for words in step.split("&&") if re.search(r"\bpip\b", words)]
    assert len(installs) == 4
    for words in installs:  # what was downloaded has a hash, and nothing else is installed
        assert re.search(
            r"--require-hashes .*requirements\.lock|--no-index|pip wheel --no-deps --no-build-isolation", words
        )
    for copied in by_name["COPY"]:
        for source in copied.split()[:-1]:
            assert (ROOT / source).exists(), source
    assert by_name["USER"] == ["10001"]
    assert by_name["STOPSIGNAL"] == ["SIGTERM"]
    [entry], [command] = by_name["ENTRYPOINT"], by_name["CMD"]
    assert yaml.safe_load(entry) == ["holdfast"]
    name, options = understood(yaml.safe_load(command))
    assert (name, options["host"]) == ("serve", "0.0.0.0")
    assert by_name["EXPOSE"] == [str(GATEWAY_PORT)]
    assert f"127.0.0.1:{GATEWAY_PORT}/healthz" in by_name["HEALTHCHECK"][0]


def test_compose_has_three_replicas_on_one_database_and_secrets_in_files() -> None:
    [compose] = documents(DEPLOY / "compose.yaml")
    services: dict[str, Any] = compose["services"]
    replicas = [each for name, each in services.items() if name.startswith("replica-")]
    assert len(replicas) == 3
    for each in (*replicas, services["migrate"], services["driver"]):
        understood(each["command"])
        assert (DEPLOY / each["build"]["context"] / each["build"]["dockerfile"]).is_file()
        assert each["build"]["args"] == {"BASE": "${HOLDFAST_BASE:-python:3.13-slim}"}
        assert set(each.get("environment", {})) <= VARIABLES
        assert set(each["secrets"]) <= set(compose["secrets"])
        assert set(each.get("depends_on", {})) <= set(services)
    published = [port for each in replicas for port in each["ports"]]
    assert published == [f"127.0.0.1:{GATEWAY_PORT + n}:{GATEWAY_PORT}" for n in range(3)]
    assert [each["environment"]["HOLDFAST_ADVERTISE"] for each in replicas] == [
        f"http://{port.rpartition(':')[0]}" for port in published
    ]
    for each in replicas:  # sandboxes live beside the driver, where this machine's loopback is not
        assert each["environment"]["HOLDFAST_ENTRANCE"] == f"http://gateway:{GATEWAY_PORT}"
        assert each["networks"]["default"]["aliases"] == ["gateway"]
    assert len({each["environment"]["HOLDFAST_REPLICA_ID"] for each in replicas}) == 3
    script = services["replica-1"]["entrypoint"][2].replace("$$", "$")
    subprocess.run(["/bin/sh", "-n", "-c", script], check=True, timeout=30)
    assert set(re.findall(r"HOLDFAST_\w+", script)) <= VARIABLES


@pytest.mark.parametrize("unit", [*UNITS, EXAMPLE], ids=lambda path: path.name)
def test_units_start_what_there_is_for_as_long_as_it_takes(unit: Path) -> None:
    text = unit.read_text(encoding="utf-8")
    [start] = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert {"Restart=always", "StartLimitIntervalSec=0"} <= set(text.splitlines()), "systemd would give up in 10 s"
    words = shlex.split(start)
    name, _ = understood(words[words.index("holdfast") + 1 :])
    assert name == {"holdfast-gateway": "serve", "holdfast-driver": "driver", "sweep": "run"}[unit.stem]


def test_the_units_have_two_users() -> None:
    users = {re.findall(r"^User=(.*)$", unit.read_text(encoding="utf-8"), re.MULTILINE)[0] for unit in UNITS}
    assert len(users) == len(UNITS) == 2
    assert not {"root"} & users


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed: apt install systemd")
@pytest.mark.parametrize("unit", [*UNITS, EXAMPLE], ids=lambda path: path.name)
def test_systemd_understands_the_units_and_finds_ours_hardened(unit: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert f"{unit.name}:" not in done.stderr, done.stderr
    if unit in UNITS:
        subprocess.run(
            ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip
