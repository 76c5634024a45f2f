"""The processes that are attacked, each with its secrets, and the operator that has to be answered meanwhile."""

import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import psycopg
from psycopg.conninfo import make_conninfo

import holdfast
from holdfast.testing.server import until
from proof.attack.tally import Tally

PATIENCE = 60.0
_GRANTS = Path(__file__).parents[2] / "docs/howto/roles-and-poolers.md"


class Target:
    """A command of ours that listens. ``options``: its arguments; ``variables`` are added to the environment."""

    def __init__(self, name: str, folder: Path, options: list[str], **variables: str) -> None:
        self.name, self._log = name, folder / f"{name}.log"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "holdfast", *options], cwd=folder, env=environment | variables,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name} did not start: {self._log.read_text()[-2000:]}")
        self.address: str = json.loads(line)["address"]
        url = urlsplit(self.address)
        self.place = (url.hostname or "", url.port or 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def memory(self) -> int:
        """The most that was resident, in MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) // 1024

    def judge(self, tally: Tally) -> None:
        if self.process.poll() is not None:
            tally.report(f"{self.name} ended with {self.process.returncode}: {self._log.read_text()[-500:]}")
        log = self._log.read_text(encoding="utf-8", errors="replace")
        for sign in ('"request.failed"', '"kind": "failure"', "never retrieved", "Fatal error"):
            if sign in log:
                end = log[log.index(sign) :].partition("\n")[0]
                tally.report(f"{self.name} logged {sign}: {end[-1000:]}")


class GatewayTarget(Target):
    """A replica with tokens of each scope, a sandbox with a supervisor's token, and large records."""

    def __init__(self, name: str, folder: Path, url: str, *options: str, **variables: str) -> None:
        self.url = url
        self.tokens = {scope: secrets.token_hex(16) for scope in ("operate", "read", "report")}
        lines = ";".join(f"{scope}r {scope} {secret}" for scope, secret in self.tokens.items())
        arguments = ["serve", "--port", "0", "--json", "--end-sandboxes", *options]
        super().__init__(name, folder, arguments, HOLDFAST_URL=url, HOLDFAST_TOKENS=lines, **variables)
        self.http = httpx.Client(
            base_url=self.address, timeout=PATIENCE, headers={"Authorization": f"Bearer {self.tokens['operate']}"}
        )
        self.hidden = secrets.token_hex(16)
        """The value of a variable of a sandbox."""
        script = "echo $HOLDFAST_SUPERVISOR_TOKEN; exec sleep 100000"
        body = {"id": "own", "argv": ["sh", "-c", script], "supervised": True, "env": {"API_KEY": self.hidden}}
        self.http.post("/sandboxes", json=body).raise_for_status()
        until(lambda: bool(self._log_of_sandbox()), what="the supervisor's token", timeout=PATIENCE)
        self.supervisor_token = self._log_of_sandbox()
        for number in range(8):
            large = {"id": f"large-{number}", "argv": ["true"], "metadata": {"text": "x" * 300_000}}
            self.http.post("/sandboxes", json=large).raise_for_status()
        self.paths = sorted(self.http.get("/openapi.json").json()["paths"].items())

    def __exit__(self, *_: object) -> None:
        self.http.close()
        super().__exit__()

    @property
    def secrets(self) -> list[str]:
        return [*self.tokens.values(), self.hidden]

    def _log_of_sandbox(self) -> str:
        answer = self.http.get("/sandboxes/own/log")
        return answer.text.strip() if answer.status_code == 200 else ""


class DriverTarget(Target):
    """A driver on a port, with a token."""

    def __init__(self, folder: Path) -> None:
        self.token, self.folder = secrets.token_hex(16), folder / "driver"
        arguments = ["driver", "--port", "0", "--json", "--end-sandboxes", "--folder", str(self.folder)]
        super().__init__("driver", folder, arguments, HOLDFAST_DRIVER_TOKEN=self.token)
        self.client = holdfast.reconciler.ProcessDriver(self.address, token=self.token, timeout=PATIENCE)


def worker_url(owner_url: str) -> str:
    """The database as a role with the grants that the documentation has for workers."""
    [grants] = re.findall(r"```sql\n(create role worker login;.*?to worker;)\n```", _GRANTS.read_text(), re.DOTALL)
    name = f"worker_{secrets.token_hex(4)}"
    with psycopg.connect(owner_url, autocommit=True) as owner:
        owner.execute(re.sub(r"\bworker\b", name, grants).encode())
    return make_conninfo(owner_url, user=name)


class Operator(threading.Thread):
    """Asks each gateway, and the driver, over and over; every answer has to be good."""

    PATHS = ("/", "/api/leases", "/api/operations", "/sandboxes?limit=2", "/sandboxes/own", "/api/history", "/agents")

    def __init__(self, gateways: list[GatewayTarget], driver: DriverTarget, tally: Tally) -> None:
        super().__init__(daemon=True)
        self._gateways, self._driver, self._tally = gateways, driver, tally
        self._stopped = threading.Event()
        self.longest = 0.0

    def run(self) -> None:
        number = 0
        while not self._stopped.wait(0.02):
            number += 1
            for gateway in self._gateways:
                self._time(gateway.name, partial(self._get, gateway, number))
            self._time("driver", lambda: str(len(self._driver.client.list()) >= 0))

    def stop(self) -> None:
        self._stopped.set()
        self.join(PATIENCE)

    def _get(self, gateway: GatewayTarget, number: int) -> str:
        path = self.PATHS[number % len(self.PATHS)]
        answer = gateway.http.get(path)
        if answer.status_code != 200:
            detail = re.sub(r'"requestId": "\w+"', "", answer.text)
            self._tally.report(f"operator of {gateway.name}: {path} was answered with {detail:.500}")
        return str(answer.status_code)

    def _time(self, name: str, ask: Any) -> None:
        began = time.monotonic()
        try:
            answer = ask()
        except (httpx.HTTPError, holdfast.DriverError) as error:
            answer = type(error).__name__
            self._tally.report(f"operator of {name}: {error}")
        self.longest = max(self.longest, time.monotonic() - began)
        self._tally.note(f"(operator of {name})", answer)
