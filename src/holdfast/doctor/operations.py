"""What can be wrong with the log of operations, and what to do about it."""

from __future__ import annotations

from holdfast.doctor.findings import Check, Facts, Finding, Verdict, fail, judge, ok, row, rows, warn

NEEDED = frozenset(
    {
        "idempotency_log_pkey", "idempotency_log_unfinished", "idempotency_log_kin", "idempotency_log_expiring",
        "idempotency_log_updated", "wal_pkey", "wal_order", "outbox_key", "outbox_unpublished", "review_open",
        "review_standing",
    }
)  # fmt: skip
MANY_A_DAY, LARGE = 999_999, 10 << 30
"""Operations in a day (they are counted as far as a million), and bytes: with more of either, somebody should have
decided what is archived."""
LAGGING = 3600.0
SHOWN = 3


def examine(facts: Facts) -> tuple[Finding, ...]:
    return judge(CHECKS, facts)


def indexes(facts: Facts) -> Verdict:
    found = {each["name"] for each in rows(facts, "operation_indexes")}
    if missing := sorted(NEEDED - found):
        return fail(
            f"missing or invalid: {', '.join(missing)}",
            "Without them every question reads the whole log. Run `holdfast migrate up` on a copy and look at what it "
            "creates, or REINDEX what is invalid.",
        )
    return ok(f"all {len(NEEDED)} are there")


def partials(facts: Facts) -> Verdict:
    about = row(facts, "operation_health")
    if about["stale_partials"]:
        return fail(
            f"{about['stale_partials']} unfinished for longer than {_span(about['stale'])} although nobody is at work "
            f"on them, the oldest for {_span(about['oldest'])}",
            "Run `holdfast ops recover` where their rollbacks are registered; else look at each (`holdfast ops ls "
            "--status partial`) and decide: `holdfast ops rollback` or `reset`.",
        )
    return ok("none that was left behind")


def claims(facts: Facts) -> Verdict:
    about = row(facts, "operation_health")
    if about["orphaned"]:
        return warn(
            f"{about['orphaned']} of {about['partial']} unfinished have lost their owner",
            "The next caller, or client.operations.recover(), finishes or rolls back what it knows how to.",
        )
    return ok(f"{about['partial']} under way, each with a living owner" if about["partial"] else "nothing is under way")


def failures(facts: Facts) -> Verdict:
    about = row(facts, "operation_health")
    if about["reviews"]:
        return warn(f"{about['reviews']} wait for somebody to look at them", "See holdfast reviews.")
    return ok(f"{about['failed']} have failed and none waits for a review" if about["failed"] else "none")


def growth(facts: Facts) -> Verdict:
    about = row(facts, "operation_health")
    size = about["bytes"] or 0
    found = f"{about['operations']} operations, {about['today']} of them since yesterday, in {_size(size)}"
    if about["expired"]:
        return warn(
            f"{found}; {about['expired']} results are kept although their time is over",
            "Call client.operations.expire() from time to time.",
        )
    if about["today"] > MANY_A_DAY or size > LARGE:
        return warn(found, "Archive what is old: `holdfast do wal.archive`.")
    return ok(found)


def lineage(facts: Facts) -> Verdict:
    about = row(facts, "operation_health")
    for each in rows(facts, "relays"):
        if each["parked"]:
            return warn(
                f"relay {each['name']!r} has parked {each['parked']} events that its sink refused",
                f"See `holdfast relay parked {each['name']}`; `holdfast relay retry` has them told again.",
            )
        if each["lag"] > LAGGING:
            why = f": {each['problem']}" if each["problem"] else ""
            return warn(
                f"{each['entries']} entries wait for relay {each['name']!r}, the oldest for {_span(each['lag'])}{why}",
                "Run it, and look after its sink; `holdfast relay rm` when nobody runs it any more.",
            )
    if not about["unpublished"]:
        return ok("nothing waits to be published")
    found = f"{about['unpublished']} messages wait to be published, the oldest for {_span(about['lag'])}"
    return warn(found, "Is the relay running, and does its sink answer?") if about["lag"] > LAGGING else ok(found)


def chains(facts: Facts) -> Verdict:
    about = row(facts, "chains")
    found = f"{about['operations']} chains with {about['entries']} entries"
    if about["broken"]:
        return fail(
            f"{len(about['broken'])} problems in {found}: {'; '.join(about['broken'][:SHOWN])}",
            "Somebody changed the log past holdfast, or a restore went wrong. Do not archive; compare with a backup.",
        )
    if about["unpaired"]:
        return ok(f"{found} are sound; {about['unpaired']} locks were never released, as crashes leave them")
    return ok(f"{found} are sound")


CHECKS: tuple[tuple[str, Check], ...] = (
    ("indexes", indexes),
    ("partials", partials),
    ("claims", claims),
    ("failures", failures),
    ("growth", growth),
    ("lineage", lineage),
    ("chains", chains),
)


def _span(seconds: float) -> str:
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _size(count: int) -> str:
    for size, unit in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
