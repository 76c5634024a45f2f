"""Faults of processes, database sessions, servers, clocks and the network, and a nemesis that chooses among them.

pair = Pair.create()
proxy = Proxy(pair.primary.database())
faults = [*network(proxy), crash(pair), failover(pair), kill(workers), pause(workers)]
Nemesis(faults, seed=7, record=print).run(60)
"""

from holdfast.testing.faults.clocks import Clock, clock_drift, clock_step, faketime
from holdfast.testing.faults.fault import Fault
from holdfast.testing.faults.nemesis import Nemesis, plan
from holdfast.testing.faults.network import network
from holdfast.testing.faults.processes import fork, kill, pause, terminate
from holdfast.testing.faults.restores import restore_copy, restore_dump, restore_template
from holdfast.testing.faults.servers import (
    Pair,
    crash,
    failover,
    freeze,
    impatient,
    old_primary,
    read_only,
    refuse,
    restart,
    standby_away,
)

__all__ = [
    "Clock",
    "Fault",
    "Nemesis",
    "Pair",
    "clock_drift",
    "clock_step",
    "crash",
    "failover",
    "faketime",
    "fork",
    "freeze",
    "impatient",
    "kill",
    "network",
    "old_primary",
    "pause",
    "plan",
    "read_only",
    "refuse",
    "restart",
    "restore_copy",
    "restore_dump",
    "restore_template",
    "standby_away",
    "terminate",
]
