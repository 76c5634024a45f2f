"""The way to the server, and whether it is one that can be used at all."""

from __future__ import annotations

from holdfast.doctor.findings import Facts, Unseen, Verdict, fail, ok, row, rows, warn
from holdfast.doctor.postgres.settings import pooled, read_only, setting, tuned

OLDEST, TESTED = 14, (15, 16, 18)
CLOCK = 1.0
"""Seconds between the clocks, beyond what the round trip leaves open, from which people will read times wrongly."""
_SERVER_SIDE = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")


def connection(facts: Facts) -> Verdict:
    about = row(facts, "connection")
    if about["error"] is not None:
        return fail(about["error"], "Nothing else could be asked. Mend this first.")
    if about["refused"] is not None and not read_only(facts):
        return fail(about["refused"], "The server answers, but holdfast cannot use its sessions. Mend this first.")
    return ok(f"the server answers in {about['round_trip'] * 1000:.1f} ms")


def version(facts: Facts) -> Verdict:
    major, minor = divmod(row(facts, "session_open")["version"], 10_000)
    tested = f"tested with {', '.join(map(str, TESTED))}"
    if major < OLDEST:
        return fail(f"PostgreSQL {major}.{minor} is too old", f"Upgrade the server: {OLDEST} or newer, {tested}.")
    if not TESTED[0] <= major <= TESTED[-1]:
        return warn(
            f"PostgreSQL {major}.{minor} should work, but holdfast is {tested}",
            "Try it before you rely on it.",
        )
    return ok(f"PostgreSQL {major}.{minor}")


def primary(facts: Facts) -> Verdict:
    about = row(facts, "session_open")
    if about["in_recovery"]:
        return fail(
            "the server is in recovery: a standby, which takes no writes",
            "List every host of the cluster in the URL, and the primary is found; or promote this one.",
        )
    if about["read_only"]:
        return fail(
            "transactions are read-only by default here",
            "Find out who set default_transaction_read_only (server, database or role) and why; then, for a role: "
            "ALTER ROLE … RESET default_transaction_read_only. Some providers set it when the disk is full.",
        )
    return ok("takes writes")


def pooler(facts: Facts) -> Verdict:
    about = row(facts, "pooler")
    remedy = (
        "Leases work, but waiters poll and failover='session' is refused. Give holdfast a direct URL beside the pooled "
        "one; it needs one connection a process."
    )
    if about["moved"]:
        return warn("a pooler between us and the server moves us from session to session (transaction mode)", remedy)
    if about["pooled"]:
        return warn("a pooler sits between us and the server (it kept our session while we looked)", remedy)
    if about["moved"] is None:
        return ok("none noticed on one connection; a second one for the full test was not to be had")
    return ok("none: the sessions are our own")


def clock(facts: Facts) -> Verdict:
    about = row(facts, "clock")
    offset, error = about["offset"], about["round_trip"] / 2
    found = f"the server's clock is {offset:+.3f} s from ours, give or take {error * 1000:.1f} ms"
    if abs(offset) - error <= CLOCK:
        return ok(found)
    return warn(
        found,
        "Run NTP or chrony on both. Leases are safe, the server's clock alone decides; but whoever reads times in "
        "listings and logs is misled, and a clock that is set right in one step shortens or stretches leases.",
    )


def keepalives(facts: Facts) -> Verdict:
    ours = rows(facts, "client_socket")
    if not ours:
        return ok("a local socket: it needs none")
    here = ours[0]
    if not here["keepalive"] or here["user_timeout"] == 0:
        return warn(
            "the URL switches off keepalives or tcp_user_timeout on our side",
            "Take keepalives and tcp_user_timeout out of the URL: a server that vanished is then noticed in 2 to 3 s "
            "instead of hours.",
        )
    if pooled(facts):
        return ok("set on our side; the server's side is between it and the pooler")
    if not tuned(facts):
        raise Unseen("the server did not give us a session to set them on")
    values = {name: int(setting(facts, name)) for name in _SERVER_SIDE}
    if missing := [name for name, value in values.items() if value == 0]:
        return warn(
            f"the server's side of our sessions has none: {', '.join(missing)}",
            "The server's system may lack them. A client that vanished keeps its session, and what it waits for, until "
            "the server's own limits end it: set them in postgresql.conf.",
        )
    idle, interval, count = (values[name] for name in _SERVER_SIDE[:3])
    return ok(f"on both sides; the server notices a lost client in {idle + interval * count} s")


def connection_check(facts: Facts) -> Verdict:
    if pooled(facts):
        return ok("a pooler's affair: the server sees the pooler's connections, not ours")
    if not tuned(facts):
        raise Unseen("the server did not give us a session to set it on")
    milliseconds = int(setting(facts, "client_connection_check_interval"))
    if milliseconds:
        return ok(f"client_connection_check_interval is {milliseconds / 1000:g} s on our sessions")
    return warn(
        "client_connection_check_interval is 0 on our sessions",
        "Set it to '1s' in postgresql.conf, if the server's system supports it: without it a client that is killed "
        "while it waits keeps its place until its statement ends.",
    )
