"""Hostile clients against real processes: a gateway on each engine, a driver, a role of the database, files.

targets        the processes that are attacked, their secrets, and the operator that is answered meanwhile
web_attacker   malformed HTTP and WebSocket, silent and stalled connections, wrong tokens
sql_attacker   a worker's role: other's leases, reserved names, forged values for every function it may call
file_attacker  FIFOs, links, folders and endless files in the place of those of a driver and of SQLite
run            chooses by its seed who attacks next, and judges
"""
