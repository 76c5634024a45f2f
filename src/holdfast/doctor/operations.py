"""The checks of the log of operations. Pure: see ``findings``."""

from __future__ import annotations

from holdfast.doctor.findings import Check, Facts, Finding, Verdict, duration, fail, judge, ok, row, rows, warn

NEEDED = frozenset(
    {
        "idempotency_log_pkey", "idempotency_log_unfinished", "idempotency_log_kin", "idempotency_log_expiring",
        "idempotency_log_order", "idempotency_log_updated", "wal_more_pkey", "wal_more_order", "outbox_key",
        "outbox_unpublished", "review_open", "review_standing",
    }
)  # fmt: skip
MANY_A_DAY, LARGE = 999_999, 10 << 30
"""Operations in a day (counted up to a million), and bytes: with more of either, old entries should be archived."""
LAGGING = 3600.0
"""Seconds."""
SHOWN = 3
"""Problems of chains that are quoted."""


def examine(facts: Facts) -> tuple[Finding, ...]:
    return judge(CHECKS, facts)


def indexes(facts: Facts) -> Verdict:
    present = {index["name"] for index in rows(facts, "operation_indexes")}
    if missing := sorted(NEEDED - present):
        return fail(
            f"missing or invalid: {', '.join(missing)}",
            "Without them queries read the whole log. Create them as `holdfast migrate up` does on an empty database; "
            "REINDEX those that are invalid.",
        )
    return ok(f"all {len(NEEDED)} exist")


def partials(facts: Facts) -> Verdict:
    about = row(facts, "operation_health")
    if about["stale_partials"]:
        return fail(
            f"{about['stale_partials']} have been partial for longer than {duration(about['stale'])} without a living "
            f"owner, the oldest for {duration(about['oldest'])}",
            "Run `holdfast ops recover` where their rollbacks are registered; otherwise inspect each (`holdfast ops ls "
            "--status partial`) and decide: `holdfast ops rollback`, `complete` or `reset`.",
        )
    return ok("none without an owner")


def claims(facts: Facts) -> Verdict:
    about = row(facts, "operation_health")
    if about["orphaned"]:
        return warn(
            f"{about['orphaned']} of {about['partial']} unfinished have lost their owner",
            "The next caller, or client.operations.recover(), finishes or rolls back those whose functions it has.",
        )
    return ok(f"{about['partial']} running, each with a living owner" if about["partial"] else "none is running")


def failures(facts: Facts) -> Verdict:
    about = row(facts, "operation_health")
    if about["reviews"]:
        return warn(f"{about['reviews']} wait for a review", "See holdfast reviews.")
    return ok(f"{about['failed']} have failed and none waits for a review" if about["failed"] else "none")


def growth(facts: Facts) -> Verdict:
    about = row(facts, "operation_health")
    size = about["bytes"] or 0
    summary = f"{about['operations']} operations, {about['today']} of them since yesterday, in {_size(size)}"
    if about["expired"]:
        return warn(
            f"{summary}; {about['expired']} results are kept although they have expired",
            "Call client.operations.expire() regularly.",
        )
    if about["today"] > MANY_A_DAY or size > LARGE:
        return warn(summary, "Archive old entries: `holdfast do wal.archive`.")
    return ok(summary)


def lineage(facts: Facts) -> Verdict:
    """A check of ``doctor``, too."""
    if facts.get("schema_applied") == []:
        return ok("there is no log of operations")
    about = row(facts, "operation_health")
    for relay in rows(facts, "relays"):
        if relay["parked"]:
            return warn(
                f"relay {relay['name']!r} has parked {relay['parked']} events that its sink refused",
                f"See `holdfast relay parked {relay['name']}`; `holdfast relay retry` sends them again.",
            )
        if relay["lag"] > LAGGING:
            age, why = duration(relay["lag"]), f": {relay['problem']}" if relay["problem"] else ""
            return warn(
                f"{relay['entries']} entries wait for relay {relay['name']!r}, the oldest for {age}{why}",
                "Run it, and check its sink; `holdfast relay rm` if it is not used any more.",
            )
    if not about["relayed"] and about["unrelayed"]:
        summary = (
            f"{about['unrelayed']} entries wait for a relay, the oldest for {duration(about['unrelayed_for'])}, and no "
            "relay has ever run"
        )
        if about["unrelayed_for"] <= LAGGING:
            return ok(summary)
        return warn(summary, "Run one, to a file for example: holdfast relay run NAME jsonl:lineage.jsonl.")
    if not about["unpublished"]:
        return ok("nothing waits to be published")
    summary = f"{about['unpublished']} messages wait to be published, the oldest for {duration(about['lag'])}"
    return (
        warn(summary, "Check that the relay is running, and that its sink answers.")
        if about["lag"] > LAGGING
        else ok(summary)
    )


def chains(facts: Facts) -> Verdict:
    about = row(facts, "chains")
    summary = f"{about['operations']} chains with {about['entries']} entries"
    if about["broken"]:
        return fail(
            f"{len(about['broken'])} problems in {summary}: {'; '.join(about['broken'][:SHOWN])}",
            "The log was changed without holdfast, or a restore went wrong. Do not archive; compare with a backup.",
        )
    if about["unpaired"]:
        return ok(
            f"{summary} are intact; {about['unpaired']} locks have no release in the log, because a process crashed"
        )
    return ok(f"{summary} are intact")


CHECKS: tuple[tuple[str, Check], ...] = (
    ("indexes", indexes),
    ("partials", partials),
    ("claims", claims),
    ("failures", failures),
    ("growth", growth),
    ("lineage", lineage),
    ("chains", chains),
)


def _size(count: int) -> str:
    for size, unit in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
