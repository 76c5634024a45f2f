"""What can be wrong with an SQLite file and the folder it is in."""

from __future__ import annotations

from holdfast.doctor.findings import (
    Check,
    Facts,
    Finding,
    Unseen,
    Verdict,
    fail,
    judge,
    ok,
    row,
    rows,
    schema_version,
    warn,
)

OLDEST = (3, 38, 0)
ENOUGH, LITTLE = 100 << 20, 10 << 20
"""Bytes free: below the first it is time to act, below the second writes are about to fail."""
_REMOTE = frozenset(
    "9p afs ceph cifs fuse gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 smb3 smbfs vboxsf virtiofs".split()  # noqa: SIM905
)
_MEMORY = frozenset({"ramfs", "tmpfs"})


def examine(facts: Facts) -> tuple[Finding, ...]:
    findings = judge(CHECKS, facts)
    if row(facts, "connection")["error"] is None:
        return findings
    return tuple(finding for finding in findings if finding.status != "unseen")  # unanswered is not unseen


def filesystem(mounts: str, path: str) -> str | None:
    """The kind of file system that ``path``, absolute and without links, is on: the text of /proc/self/mounts knows."""
    kind, longest = None, -1
    for line in mounts.splitlines():
        words = line.split(" ")
        if len(words) < 3:
            continue
        point = words[1].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:  # of two mounts on one point the later one is on top
            kind, longest = words[2], len(point)
    return kind


def connection(facts: Facts) -> Verdict:
    about = row(facts, "connection")
    if about["error"] is not None:
        return fail(about["error"], "What lives in the file could not be asked. Mend this first.")
    if not row(facts, "file")["exists"]:
        return ok("the file is not there yet: it is made on first use")
    return ok("the file opens")


def version(facts: Facts) -> Verdict:
    found = row(facts, "file")["version"]
    if tuple(map(int, found.split("."))) < OLDEST:
        return fail(f"SQLite {found} is too old", f"Use a Python with SQLite {'.'.join(map(str, OLDEST))} or newer.")
    return ok(f"SQLite {found}")


def writable(facts: Facts) -> Verdict:
    about = row(facts, "file")
    remedy = "Let this user write to the file and to its folder, where SQLite keeps its -wal and -shm files."
    if not about["folder_exists"]:
        return fail(f"the folder {about['folder']} is not there", "Make the folder, or mend the path in the URL.")
    if not about["folder_writable"]:
        return fail(f"this user may not write to the folder {about['folder']}", remedy)
    if about["exists"] and not about["writable"]:
        return fail("this user may not write to the file", remedy)
    return ok("file and folder")


def local(facts: Facts) -> Verdict:
    kind = row(facts, "file")["filesystem"]
    if kind is None:
        raise Unseen("this system does not tell what file system the file is on")
    if kind in _REMOTE or kind.partition(".")[0] in _REMOTE:
        return warn(
            f"the file is on {kind}, which may be shared between machines",
            "Put it on a local disk. SQLite's locks and its WAL hold on one machine only: two that share the file "
            "could both be granted a lease. For several machines use PostgreSQL.",
        )
    if kind in _MEMORY:
        return warn(
            f"the file is on {kind}: gone when the machine restarts, and fences then begin again",
            "Put it on a disk, if anything outside remembers fences.",
        )
    return ok(f"on a local file system ({kind})")


def boot(facts: Facts) -> Verdict:
    if row(facts, "file")["boot"]:
        return ok("known: after a crash of the machine fences rise over what may have been lost")
    return warn(
        "this system does not tell one start of the machine from the next",
        "Nothing need be done: holdfast waits for the disk at every commit instead (synchronous = full), only slower.",
    )


def space(facts: Facts) -> Verdict:
    free = row(facts, "file")["free"]
    if free is None:
        raise Unseen("the folder is not there, or does not tell")
    found = f"{free >> 20} MB free"
    if free >= ENOUGH:
        return ok(found)
    return (fail if free < LITTLE else warn)(found, "Make room: a renewal that cannot be written loses the lease.")


def journal(facts: Facts) -> Verdict:
    mode = row(facts, "examine_journal", "there is no file to ask")["mode"]
    if mode == "wal":
        return ok("WAL")
    if not facts.get("schema_applied"):
        return ok(f"{mode}: the next client that opens the file asks for WAL")
    return fail(
        f"journal_mode is {mode}, although holdfast asked for WAL",
        "Put the file where SQLite can share memory between processes (a local disk), and close whoever holds it open.",
    )


def integrity(facts: Facts) -> Verdict:
    problems = [each["problem"] for each in rows(facts, "examine_integrity", "there are no tables to check")]
    if not problems:
        return ok("holdfast's tables are sound")
    return fail(
        f"damaged: {problems[0]}" + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""),
        "Stop every process that uses the file; restore it from a backup, or try .recover in the sqlite3 shell.",
    )


def write_lock(facts: Facts) -> Verdict:
    about = row(facts, "write_lock", "there is no file to lock")
    if about["error"] is None:
        return ok(f"had in {about['seconds'] * 1000:.0f} ms")
    return fail(
        f"not to be had within {about['seconds']:.1f} s: another connection is in the middle of a write",
        "Find who has the file open (lsof, fuser) and why its transaction stays open: nobody can acquire, renew or "
        "release meanwhile.",
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
    ("integrity", integrity),
    ("write_lock", write_lock),
)
