"""The gateway: a service that runs agent sandboxes, on the public names of the library alone.

app              builds a replica and defines the order in which it starts and stops
server           runs a replica as a process, from the first bind to the last signal
settings         flags, environment and holdfast.toml; reports all mistakes at once
context          what every route works with: the client, the driver, the replica's name
admission        ASGI middleware: hosts, origins, tokens, sizes, rates, request ids
connections      how many connections and unread answers there are, and which one is closed
record_page      a page of records, bounded in bytes
problem          every error as a Problem of holdfast.problem_json
health           /healthz, /readyz, /metrics
leader_duties    what one replica does for all
lineage_relay    publishes lineage, when a relay is configured
driver_process   the process driver that a replica starts for itself
sandboxes        records of the store, run by the driver, reconciled by the leader
sessions         which session has which slot, and until when
agents           hooks, serialised per agent, and the workers that look after agents
operators        queries and governed commands
pages            the dashboard, at the root of the address
page_views       its pages of sandboxes, agents and replicas
"""
