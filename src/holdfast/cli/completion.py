"""The values that the shell completes: names of leases, keys of operations, pids of sessions, numbers of reviews.

A child process reads them through a read-only client. The kernel kills it when its time is up, whatever it waits for.
So completion is bounded and silent: a database that is missing, unreachable or slow has no values. It creates no file,
migrates nothing and takes no lock.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from holdfast import Client

TIMEOUT = "HOLDFAST_COMPLETION_TIMEOUT"
"""The environment variable with the limit in seconds. Default: 1."""
_LIMIT = 1000
"""The number of ended grants, operations and reviews that are read, the latest first."""

Values = Iterable[tuple[object, str]]
"""Each with its description."""
Source = Callable[["Client", click.Context], Values]
ShellComplete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _completes(source: Source) -> ShellComplete:
    """A function for ``shell_complete``. It leaves out values that are not printable: they would control the
    terminal."""

    @wraps(source)
    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        descriptions: dict[str, str] = {}
        for value, description in _read(context, source):
            descriptions.setdefault(value, "".join(c if c.isprintable() else "?" for c in description))
        return [
            CompletionItem(value, help=description or None)
            for value, description in descriptions.items()
            if value.startswith(incomplete) and value.isprintable()
        ]

    return complete


def _read(context: click.Context, source: Source) -> list[tuple[str, str]]:
    """What ``source`` yields, read by a child process; nothing if that fails or takes too long."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
            signal.setitimer(signal.ITIMER_REAL, float(os.environ.get(TIMEOUT) or 1))
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            rows = _read_directly(context, source)
            with open(writer, "w", encoding="utf-8") as pipe:
                json.dump(rows, pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    try:
        return [(value, description) for value, description in json.loads(text)]
    except ValueError:  # empty, or cut off by the timer
        return []


def _read_directly(context: click.Context, source: Source) -> list[tuple[str, str]]:
    import holdfast
    from holdfast.cli import settings

    options = [context.params, context.find_root().params]
    url, schema = (next((each[name] for each in options if each.get(name)), None) for name in ("url", "schema"))
    url, schema = settings.database(url, schema)
    scheme, _, path = url.partition(":///")
    if scheme.startswith("sqlite"):
        from urllib.parse import unquote

        # A file that holdfast has never used lacks this side file, and opening it would create it.
        os.stat(f"{os.path.realpath(unquote(path))}.holdfast-turn")
    with holdfast.Client(url, schema=schema) as client, client.read_only() as read_only:
        return [(str(value), description) for value, description in source(read_only, context)]


@_completes
def held_leases(client: Client, _: click.Context) -> Values:
    """Users' leases before holdfast's own."""
    leases = sorted(client.leases.list(), key=lambda lease: _is_own(lease.name))
    return [(lease.name, f"held by {lease.holder}") for lease in leases]


@_completes
def known_leases(client: Client, _: click.Context) -> Values:
    """Users' leases: those that are held, then those that were."""
    held = [(lease.name, f"held by {lease.holder}") for lease in client.leases.list()]
    ended = [(grant.name, f"last held by {grant.holder}") for grant in client.leases.history(limit=_LIMIT)]
    return [(name, description) for name, description in [*held, *ended] if not _is_own(name)]


def _is_own(name: str) -> bool:
    from holdfast.cli.leases import OWN_PREFIXES

    return name.startswith(OWN_PREFIXES)


@_completes
def electors(client: Client, _: click.Context) -> Values:
    return [
        (lease.name, f"led by {lease.holder}") for lease in client.leases.list() if lease.kind in ("elector", "relay")
    ]


@_completes
def open_gates(client: Client, _: click.Context) -> Values:
    return [(gate.name.removeprefix("@gate:"), f"opened by {gate.holder}") for gate in client.gates.list()]


@_completes
def slot_pools(client: Client, _: click.Context) -> Values:
    return [(pool, "") for pool, _, _ in _slots(client)]


@_completes
def slots(client: Client, context: click.Context) -> Values:
    """Those of the pool that was given before."""
    return [(slot, f"held by {holder}") for pool, slot, holder in _slots(client) if pool == context.params.get("pool")]


def _slots(client: Client) -> list[tuple[str, str, str]]:
    prefix = "@slot:"
    leases = [lease for lease in client.leases.list() if lease.name.startswith(prefix)]
    return [(*lease.name.removeprefix(prefix).rpartition(":")[::2], lease.holder) for lease in leases]


@_completes
def lock_sessions(client: Client, _: click.Context) -> Values:
    labels: dict[int, list[str]] = {}
    for lock in client.locks.list():
        if lock.pid is not None:
            labels.setdefault(lock.pid, []).append(f"{'holds' if lock.granted else 'waits for'} {lock.label}")
    return [(pid, "; ".join(locks)) for pid, locks in labels.items()]


@_completes
def operation_keys(client: Client, _: click.Context) -> Values:
    """The text of a key where it is one; else the digest, described by the label, which is not unique."""
    return [
        (record.label, record.status) if record.pipeline is None else (record.key, f"{record.label}, {record.status}")
        for record in client.operations.list(limit=_LIMIT)
    ]


@_completes
def datasets(client: Client, _: click.Context) -> Values:
    return [(record.dataset, "") for record in client.operations.list(limit=_LIMIT) if record.dataset is not None]


@_completes
def open_reviews(client: Client, _: click.Context) -> Values:
    return [(review.id, f"{review.label}: {review.detail}") for review in client.reviews.list(limit=_LIMIT)]


@_completes
def reviews(client: Client, _: click.Context) -> Values:
    return [
        (review.id, f"{review.label}, {review.status}") for review in client.reviews.list(status=None, limit=_LIMIT)
    ]


@_completes
def relays(client: Client, _: click.Context) -> Values:
    return [(relay.name, f"run by {relay.holder}" if relay.holder else "") for relay in client.relays.list()]


@_completes
def sessions(client: Client, _: click.Context) -> Values:
    """The gateway's sessions that have not ended."""
    records = client.objects.list("@session", labels={"state": "ACTIVE"})
    return [(record.id, f"slot {record.payload['slot']} of pool {record.payload['pool']}") for record in records]


@_completes
def policy_versions(client: Client, _: click.Context) -> Values:
    return [(record.version, f"by {record.actor}: {record.reason}") for record in client.policies.list(limit=_LIMIT)]
