"""The gateway: a replica of a control plane for agent sandboxes, on the public door of the library alone.

app         what is put together, and in which order it starts and stops
settings    flags, environment and holdfast.toml, with all their mistakes at once
context     what every route works with: the client, the driver, who we are
problem     every error as application/problem+json
shield      who may ask: hosts, origins, tokens, sizes, rates; a number for each request
health      alive, ready, metrics
sandboxes   records of the store, run by the driver, kept true by the leader
sessions    who has which slot, and until when
agents      hooks, one at a time an agent, and the workers that leave a busy one alone
operators   what there is to see, and governed commands
pages       the dashboard
"""
