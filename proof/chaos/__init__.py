"""Chaos runs: processes contend for a few leases while servers, network, clocks and processes fail.

``python -m proof.chaos --minutes 5`` runs every scenario (a *lane* on the command line and in reports), checks the
histories and writes a report. A scenario is a target (a pair of servers, a server with a changing clock behind a
pooler, a server that is restored from backups, a SQLite file), its contenders, and the faults of both. Its history
stays in its folder, and can be checked again: ``python -m holdfast.testing.checker FOLDER``. In the lane ``services``
relays, shards, a reconciler, watches, objects and operations take the place of contenders.
"""
