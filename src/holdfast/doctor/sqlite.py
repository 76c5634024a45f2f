"""The checks of an SQLite file and its folder. Pure: see ``findings``."""

from __future__ import annotations

from holdfast.doctor.findings import (
    Check,
    Facts,
    Finding,
    Unseen,
    Verdict,
    fail,
    fences,
    judge,
    ok,
    row,
    rows,
    schema_version,
    warn,
)
from holdfast.doctor.operations import lineage

OLDEST = (3, 38, 0)
ENOUGH, LITTLE = 100 << 20, 10 << 20
"""Free bytes: below the first a warning, below the second writes are about to fail."""
_REMOTE = frozenset(
    "9p afs ceph cifs fuse gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 smb3 smbfs vboxsf virtiofs".split()  # noqa: SIM905
)
_MEMORY = frozenset({"ramfs", "tmpfs"})


def examine(facts: Facts) -> tuple[Finding, ...]:
    findings = judge(CHECKS, facts)
    if row(facts, "connection")["error"] is None:
        return findings
    return tuple(finding for finding in findings if finding.status != "unseen")  # not asked, rather than not visible


def filesystem_type(mounts: str, path: str) -> str | None:
    """The type of the file system of ``path``, which is absolute and without links. ``mounts``: /proc/self/mounts."""
    kind, longest = None, -1
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:  # of two mounts on one point the later one hides the other
            kind, longest = fields[2], len(point)
    return kind


def connection(facts: Facts) -> Verdict:
    about = row(facts, "connection")
    if about["error"] is not None:
        return fail(about["error"], "The content of the file could not be examined. Fix this first.")
    if not row(facts, "file")["exists"]:
        return warn("there is no such file: the first program that uses it creates it", "Check its name.")
    return ok("the file opens")


def version(facts: Facts) -> Verdict:
    version_text = row(facts, "file")["version"]
    if tuple(map(int, version_text.split("."))) < OLDEST:
        return fail(
            f"SQLite {version_text} is too old", f"Use a Python with SQLite {'.'.join(map(str, OLDEST))} or newer."
        )
    return ok(f"SQLite {version_text}")


def writable(facts: Facts) -> Verdict:
    about = row(facts, "file")
    remedy = "Let this user write to the file and to its folder, where SQLite keeps its -wal and -shm files."
    if not about["folder_exists"]:
        return fail(f"the folder {about['folder']} does not exist", "Create it, or correct the path in the URL.")
    if not about["folder_writable"]:
        return fail(f"this user may not write to the folder {about['folder']}", remedy)
    if about["exists"] and not about["writable"]:
        return fail("this user may not write to the file", remedy)
    return ok("file and folder")


def local(facts: Facts) -> Verdict:
    kind = row(facts, "file")["filesystem"]
    if kind is None:
        raise Unseen("the operating system does not tell which file system the file is on")
    if kind in _REMOTE or kind.partition(".")[0] in _REMOTE:
        return warn(
            f"the file is on {kind}, which may be shared between machines",
            "Put it on a local disk. SQLite's locks and its WAL work on one machine only: two machines that share the "
            "file could both be granted a lease. For several machines use PostgreSQL.",
        )
    if kind in _MEMORY:
        return warn(
            f"the file is on {kind}: it is lost when the machine restarts",
            "Put it on a disk, unless leases, objects and operations may be forgotten.",
        )
    return ok(f"on a local file system ({kind})")


def boot(facts: Facts) -> Verdict:
    if row(facts, "file")["boot"]:
        return ok("known: after a crash of the machine fences continue above any that may have been lost")
    return warn(
        "the operating system does not identify the present start of the machine",
        "Nothing has to be done: holdfast syncs every commit to disk instead (synchronous = full), which is slower.",
    )


def space(facts: Facts) -> Verdict:
    free = row(facts, "file")["free"]
    if free is None:
        raise Unseen("the folder does not exist, or its file system does not tell")
    summary = f"{free >> 20} MB free"
    if free >= ENOUGH:
        return ok(summary)
    return (fail if free < LITTLE else warn)(
        summary, "Free some space: a renewal that cannot be written loses the lease."
    )


def journal(facts: Facts) -> Verdict:
    mode = row(facts, "examine_journal", "there is no file yet")["mode"]
    if mode == "wal":
        return ok("WAL")
    if not facts.get("schema_applied"):
        return ok(f"{mode}: the next client that opens the file switches to WAL")
    return fail(
        f"journal_mode is {mode}, although holdfast asked for WAL",
        "Put the file on a local disk, where SQLite can share memory between processes, and close other programs that "
        "have it open.",
    )


def integrity(facts: Facts) -> Verdict:
    problems = [fact["problem"] for fact in rows(facts, "examine_integrity", "there are no tables to check")]
    if not problems:
        return ok("holdfast's tables are intact")
    return fail(
        f"damaged: {problems[0]}" + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""),
        "Stop every process that uses the file; restore it from a backup, or try .recover in the sqlite3 shell.",
    )


def write_lock(facts: Facts) -> Verdict:
    about = row(facts, "write_lock", "there is no file to lock")
    if about["error"] is None:
        return ok(f"acquired in {about['seconds'] * 1000:.0f} ms")
    return fail(
        f"not acquired within {about['seconds']:.1f} s: another connection has an open write transaction",
        "Find the process that has the file open (lsof, fuser), and why its transaction stays open: until it ends, no "
        "lease can be acquired, renewed or released.",
    )


CHECKS: tuple[tuple[str, Check], ...] = (
    ("connection", connection),
    ("version", version),
    ("writable", writable),
    ("filesystem", local),
    ("boot", boot),
    ("space", space),
    ("journal", journal),
    ("schema", schema_version),
    ("fences", fences),
    ("integrity", integrity),
    ("write_lock", write_lock),
    ("lineage", lineage),
)
