"""Three nodes under Patroni with a synchronous standby, and one etcd."""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from holdfast.testing import server_folder
from holdfast.testing.binaries import find
from holdfast.testing.faults import Clock
from holdfast.testing.history import now
from holdfast.testing.resource import Resource
from holdfast.testing.standstill import Standstill
from proof.cluster.etcd import Etcd
from proof.cluster.node import PatroniNode

PATIENCE = 600.0
"""Seconds for a cluster to become whole, without the time in which the machine stood still. A cluster that does not is
reported as an error of the run, not as a violation."""


_POLL = 0.1
"""Seconds between two questions: each answer of Patroni costs the cluster milliseconds of CPU."""


class Member(NamedTuple):
    """What Patroni reports of a node."""

    role: str
    state: str


class PatroniCluster(Resource):
    """``with_clocks``: each node has a clock of its own, which can be stepped; needs libfaketime."""

    def __init__(self, standstill: Standstill, *, with_clocks: bool) -> None:
        self._standstill = standstill
        self._resources = ExitStack()
        self.clocks: dict[str, Clock] = {}
        self.nodes: dict[str, PatroniNode] = {}
        try:
            etcd, binaries = self._resources.enter_context(Etcd()), find()
            for name in ("node1", "node2", "node3"):
                if with_clocks:
                    self.clocks[name] = self._resources.enter_context(Clock())
                environment = self.clocks[name].environment if with_clocks else {}
                node = PatroniNode(name, binaries, etcd.port, environment)
                self.nodes[name] = self._resources.enter_context(node)
            first, *others = self.nodes.values()
            server_folder.create_data(binaries, first.data)
            first.start()
            self.wait_leader()
            for node in others:  # now, because a node without data and without a leader would run initdb
                node.start()
            self.wait_whole()
        except TimeoutError as error:
            logs = self.logs()
            self.close()
            raise TimeoutError(f"{error}\n{logs}") from None
        except BaseException:
            self.close()
            raise

    def url(self, database: str) -> str:
        """The URL that names all nodes, as docs/howto/high-availability.md advises."""
        hosts = ",".join(node.address for node in self.nodes.values())
        return f"postgresql://postgres@{hosts}/{database}?target_session_attrs=read-write&connect_timeout=3"

    def members(self, *, without: str | None = None) -> dict[str, Member]:
        """As the first node reports that can reach etcd; empty if none can. ``without``: do not ask this node."""
        for node in (node for node in self.nodes.values() if node.name != without):
            answer = node.call("GET", "/cluster") if node.running else None
            if answer is not None and answer[0] == 200:
                return {each["name"]: Member(each["role"], each["state"]) for each in json.loads(answer[1])["members"]}
        return {}

    def wait_for(self, condition: Callable[[], bool], *, what: str) -> None:
        """Raises TimeoutError that names ``what``."""
        started = now()
        while not condition():
            if now() - started - self._standstill.seconds(started) > PATIENCE:
                raise TimeoutError(f"{what}: not within {PATIENCE:g} s; {self.members()}")
            time.sleep(_POLL)

    def leader(self) -> str | None:
        """The node that leads and accepts writes."""
        return _leader(self.members())

    def wait_leader(self) -> str:
        """Raises TimeoutError if no node becomes leader."""
        leaders: list[str] = []

        def has_leader() -> bool:
            leader = self.leader()
            leaders.extend([] if leader is None else [leader])
            return bool(leaders)

        self.wait_for(has_leader, what="a node leads")
        return leaders[0]

    def successor(self, name: str) -> str | None:
        """The node that leads in the place of ``name``, as the others report."""
        leader = _leader(self.members(without=name))
        return None if leader == name else leader

    def is_whole(self) -> bool:
        """Whether one node leads, and the others follow it, one of them synchronously."""
        states = sorted((each.role, each.state) for each in self.members().values())
        return states == [("leader", "running"), ("replica", "streaming"), ("sync_standby", "streaming")]

    def wait_whole(self) -> None:
        self.wait_for(self.is_whole, what="the cluster is whole")

    def switch_over(self, name: str) -> bool:
        """Ask Patroni to move the leader from ``name`` to its synchronous standby. Returns whether another node leads:
        Patroni refuses while no standby is synchronous."""
        answer = self.nodes[name].call("POST", "/switchover", {"leader": name}, timeout=PATIENCE)
        return (answer is not None and answer[0] == 200) or self.successor(name) is not None

    def logs(self) -> str:
        return "\n".join(f"--- {node.name}\n{node.log(40)}" for node in self.nodes.values())

    def close(self) -> None:
        self._resources.close()


def _leader(members: dict[str, Member]) -> str | None:
    leaders = (name for name, each in members.items() if (each.role, each.state) == ("leader", "running"))
    return next(leaders, None)
