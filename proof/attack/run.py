"""The attack: targets, attackers, an operator beside them, and the verdict."""

import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import holdfast
from holdfast.testing.postgres import Postgres
from proof.attack.file_attacker import FileAttacker
from proof.attack.sql_attacker import SqlAttacker
from proof.attack.tally import Tally
from proof.attack.targets import DriverTarget, GatewayTarget, Operator, worker_url
from proof.attack.web_attacker import WebAttacker


def attack(
    folder: Path, seed: int, *, seconds: float = 3600.0, rounds: int | None = None
) -> tuple[Tally, dict[str, Any]]:
    """Attack for so long, or so many rounds. Returns what was answered, and figures. In a round each attacker strikes
    some times, in ways that the seed chooses."""
    with ExitStack() as stack:
        server = stack.enter_context(Postgres.create())
        url = server.database()
        with holdfast.Client(url) as client:
            client.migrate()
        driver = stack.enter_context(DriverTarget(folder))
        gateways = [
            stack.enter_context(GatewayTarget("sqlite", folder, f"sqlite:///{folder}/app.db", "--driver-folder", "d")),
            stack.enter_context(
                GatewayTarget(
                    "postgresql", folder, url, "--driver", driver.address, HOLDFAST_DRIVER_TOKEN=driver.token
                )
            ),
        ]  # fmt: skip
        tally = Tally([driver.token, *(secret for gateway in gateways for secret in gateway.secrets)])
        operator = Operator(gateways, driver, tally)
        operator.start()
        stack.callback(operator.stop)
        before = {target.name: target.memory() for target in (driver, *gateways)}
        attackers: list[Any] = [
            *(WebAttacker(target, tally, _random(seed, target.name)) for target in (*gateways, driver)),
            SqlAttacker(url, worker_url(url), tally, _random(seed, "sql")),
            FileAttacker(driver, folder, tally, _random(seed, "files")),
        ]
        end, number, chance = time.monotonic() + seconds, 0, _random(seed, "run")
        while time.monotonic() < end and (rounds is None or number < rounds):
            number += 1
            for attacker in attackers:
                for _ in range(attacker.STRIKES):
                    chance.choice(attacker.attacks)()
        for attacker in attackers:
            attacker.close()
        operator.stop()
        for target in (driver, *gateways):
            target.judge(tally)
        figures = {
            "rounds": number, "longest wait of the operator": f"{operator.longest:.2f} s",
            "resident MiB, before and at most": {
                target.name: (before[target.name], target.memory()) for target in (driver, *gateways)
            },
        }  # fmt: skip
        gateways[1].http.delete("/sandboxes/own", headers={"If-Match": "*"})
    return tally, figures


def _random(seed: int, name: str) -> random.Random:
    """Of its own for each attacker: what one of them draws does not depend on the others."""
    return random.Random(f"{seed} {name}")
