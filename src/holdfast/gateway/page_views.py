"""What a replica adds to the dashboard: the pages of a sandbox with its log, of an agent, and of replicas.

They read records, leases and the driver, and never another replica. Records may contain anything.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import holdfast
from holdfast.dashboard.formats import (
    format_span,
    get_path,
    link,
    natural_order,
    one_line,
    record_name,
    record_state,
    sandbox_phase,
    sandbox_reason,
)
from holdfast.dashboard.snapshot import database_time
from holdfast.dashboard.source import AddedPage, PageSource
from holdfast.dashboard.stream import PageView, Panel
from holdfast.dashboard.tables import PageCell, PageColumn, facts, table
from holdfast.dashboard.things import lease_bar, process_of
from holdfast.dashboard.timeline import DAY, HOUR, WINDOWS, build_timeline
from holdfast.gateway.agents import records as agent_records
from holdfast.gateway.context import Gateway
from holdfast.gateway.health import PRESENCE
from holdfast.gateway.leader_duties import NAME as LEADER
from holdfast.gateway.sandboxes.records import SUPERVISOR_LEASE
from holdfast.gateway.sandboxes.records import TYPE as SANDBOX
from holdfast.problem_json import Problem

PATHS = ("/sandbox", "/agent", "/replicas", "/replica")
AGENT = "@agent"
LOG_LINES, LOG_BYTES = 200, 65536
"""Of the end of a log."""
_LOG_WITHIN = 1.0
_LOG_READ = 1 << 20
"""Bytes that are read at most for that: a line may be longer."""
MAX_ENDED = 2000
"""Grants that have ended which are read, to find replicas that have gone."""
_ENDINGS = {
    "released": "it was stopped",
    "expired": "its heartbeats stopped, because it died, was paused or was cut off",
    "session_lost": "its database session ended",
    "reentered": "it began anew",
    "forced": "an operator took its lease away",
}
"""By the outcome of the lease on its name."""
MAX_PARTS = 30
"""Commands and messages of an agent, of each."""
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-_])")
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
Query = Mapping[str, str]


def added_pages(gateway: Gateway) -> dict[str, AddedPage]:
    """By path, which are ``PATHS``."""
    return {
        "/sandbox": AddedPage(partial(sandbox_page, gateway), "Sandboxes", SANDBOX),
        "/agent": AddedPage(partial(agent_page, gateway), "Agents", AGENT),
        "/replicas": AddedPage(partial(replicas_page, gateway), "Replicas"),
        "/replica": AddedPage(partial(replica_page, gateway)),
    }


# Sandboxes


async def sandbox_page(gateway: Gateway, source: PageSource, query: Query) -> PageView:
    id = query.get("id", "")
    record = await gateway.client.objects.get(SANDBOX, id)
    if record is None:
        missing = [("State", PageCell("there is no sandbox with this id; one that is deleted leaves nothing behind"))]
        return PageView("Sandbox", time.time(), {"facts": facts("Now", missing)}, id)
    payload = record.payload
    supervisor = await gateway.client.leases.get(SUPERVISOR_LEASE + id)
    panels = {
        "facts": facts("Now", _sandbox_facts(record, supervisor)),
        "conditions": table("Conditions", _CONDITION_COLUMNS, _conditions(payload)),
        "log": await _log_panel(gateway, record),
    }
    return PageView("Sandbox", database_time([supervisor] if supervisor else []), panels, record.name or id)


def _sandbox_facts(record: Any, supervisor: Any) -> list[tuple[str, PageCell]]:
    payload, phase = record.payload, sandbox_phase(record.payload)
    details = get_path(payload, "status", "details")
    argv, env = get_path(payload, "spec", "argv"), get_path(payload, "spec", "env")
    limits = get_path(payload, "spec", "limits")
    connection = PageCell()
    if get_path(payload, "spec", "supervised"):
        connection = PageCell("no replica has its connection") if supervisor is None else _replica_cell(supervisor)
    return [
        ("State", PageCell(state=phase, note=sandbox_reason(payload))),
        ("Id", PageCell(record.id)),
        ("Name", PageCell(record.name or "")),
        ("Program", PageCell(" ".join(map(one_line, argv))[:1000] if isinstance(argv, list) else "")),
        ("Folder", PageCell(one_line(get_path(payload, "spec", "cwd")))),
        ("Variables", PageCell(", ".join(sorted(map(one_line, env)))[:1000] if isinstance(env, Mapping) else "")),
        ("Limits", PageCell(_pairs(limits))),
        ("Labels", PageCell(_pairs(record.labels))),
        ("Supervisor", connection),
        *(
            (name.replace("_", " ").capitalize(), PageCell(one_line(get_path(details, name))))
            for name in ("pid", "exit_code", "signal")
        ),
        ("Created", PageCell(time=record.created_at.timestamp())),
        ("Changed", PageCell(time=record.updated_at.timestamp(), when=("ago", record.updated_at.timestamp()))),
        ("Version", PageCell(number=record.version)),
    ]


def _pairs(values: Any) -> str:
    if not isinstance(values, Mapping):
        return ""
    return ", ".join(f"{one_line(key)}={one_line(value)}" for key, value in sorted(values.items()) if value is not None)


_CONDITION_COLUMNS = (
    PageColumn("Condition"), PageColumn("Holds"), PageColumn("Reason"), PageColumn("Message", is_wide=True),
)  # fmt: skip


def _conditions(payload: Any) -> list[list[PageCell]]:
    conditions = get_path(payload, "status", "conditions")
    return [
        [
            PageCell(one_line(get_path(condition, "type"))),
            PageCell({"True": "yes", "False": "no"}.get(str(get_path(condition, "status")), "unknown")),
            PageCell(one_line(get_path(condition, "reason"))),
            PageCell(one_line(get_path(condition, "message"))),
        ]
        for condition in (conditions if isinstance(conditions, list) else ())
    ]


async def _log_panel(gateway: Gateway, record: Any) -> Panel:
    """The end of the log. Without one, why there is none."""
    note = f"The last {LOG_LINES} lines, {LOG_BYTES // 1024} KiB at most. All of it: GET /sandboxes/{record.id}/log"
    text, empty = "", "It has written nothing yet."
    try:
        async with asyncio.timeout(_LOG_WITHIN):
            if await gateway.backends.is_running(record):
                text = clean(await _read_log(gateway, record.id))
            else:
                empty = "The driver does not run it yet, or not any more: there is no log."
    except (holdfast.DriverError, Problem, KeyError, TypeError) as error:  # of a record that no gateway wrote
        empty = f"The log could not be read: {one_line(error)}"
    except TimeoutError:
        empty = f"The log could not be read: the driver has not answered in {_LOG_WITHIN:g} s."
    return {"kind": "log", "title": "Log", "text": text, "empty": "" if text else empty, "note": note if text else ""}


async def _read_log(gateway: Gateway, id: str) -> bytes:
    end, size = b"", 0
    pieces = gateway.driver.log(id, tail=LOG_LINES)
    try:
        async for piece in pieces:
            end, size = (end + piece)[-LOG_BYTES:], size + len(piece)
            if size > _LOG_READ:
                break
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]
    return end


def clean(data: bytes) -> str:
    """The text of a log, without the escape sequences of a terminal. Other characters that are not seen, or that
    change the order of those around them, are shown as �."""
    text = _ESCAPES.sub("", data.decode(errors="replace").replace("\r\n", "\n"))
    return _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text)


# Agents


async def agent_page(gateway: Gateway, source: PageSource, query: Query) -> PageView:
    id = query.get("id", "")
    record = await gateway.client.objects.get(AGENT, id)
    if record is None:
        missing = [("State", PageCell("there is no agent with this id"))]
        return PageView("Agent", time.time(), {"facts": facts("Now", missing)}, id)
    commands, turns = await asyncio.gather(
        _latest_parts(gateway, record, "@command", "commands"), _latest_parts(gateway, record, "@turn", "turns")
    )
    panels = {
        "facts": facts("Now", _agent_facts(record)),
        "commands": table("Commands", _COMMAND_COLUMNS, [_command_row(part) for part in commands]),
        "turns": table("Messages", _TURN_COLUMNS, [_turn_row(part) for part in turns]),
    }
    return PageView("Agent", time.time(), panels, record_name(record))


def _agent_facts(record: Any) -> list[tuple[str, PageCell]]:
    payload = record.payload
    sandbox = one_line(get_path(payload, "sandbox"))
    open_command = get_path(payload, "command", "number")
    numbers = (("Commands", "commands"), ("Messages", "turns"), ("Tools used", "tools"), ("Tokens", "context_tokens"))
    times = (
        ("Created", "created_at"),
        ("Last hook", "seen_at"),
        ("Ended", "ended_at"),
        ("Prompted", "prompt_injected_at"),
    )
    return [
        ("State", PageCell(state=record_state(payload), note=one_line(get_path(payload, "ended_why")))),
        ("Tool", PageCell(one_line(get_path(payload, "tool")))),
        ("Open command", PageCell(number=open_command) if isinstance(open_command, int) else PageCell()),
        *((label, _number_cell(get_path(payload, name))) for label, name in numbers),
        ("Session", PageCell(one_line(get_path(payload, "session_id")))),
        ("Folder", PageCell(one_line(get_path(payload, "cwd")))),
        ("Sandbox", PageCell(sandbox, link("/sandbox", id=sandbox)) if sandbox else PageCell()),
        ("Transcript", PageCell(one_line(get_path(payload, "transcript_path")))),
        *((label, _time_cell(get_path(payload, name))) for label, name in times),
        ("Lock", PageCell(f"(agent, {number})", link("/lock", name=f"(agent, {number})")))
        if isinstance(number := get_path(payload, "number"), int)
        else ("Lock", PageCell()),
    ]


def _number_cell(value: Any) -> PageCell:
    return PageCell(number=value) if isinstance(value, int) and not isinstance(value, bool) else PageCell()


def _time_cell(value: Any) -> PageCell:
    is_time = isinstance(value, int | float) and 0 < value < 1e11
    return PageCell(time=float(value), when=("ago", float(value))) if is_time else PageCell()


async def _latest_parts(gateway: Gateway, record: Any, kind: str, counter: str) -> Sequence[Any]:
    """Commands or messages of an agent, the latest first, with those that its last commit has not written yet."""
    number, count = get_path(record.payload, "number"), get_path(record.payload, counter)
    if not (isinstance(number, int) and isinstance(count, int)):
        return ()
    first = max(0, count - MAX_PARTS)
    parts = [
        part.payload
        for part in await agent_records.list_parts(gateway.client, kind, number, after=first, limit=MAX_PARTS)
    ]
    pending = get_path(record.payload, "pending")
    parts += [
        get_path(part, "payload")
        for part in (pending if isinstance(pending, list) else ())
        if get_path(part, "type") == kind
    ]
    by_number = {get_path(part, "number"): part for part in parts if get_path(part, "number") is not None}
    return [by_number[each] for each in sorted(by_number, reverse=True)]


_COMMAND_COLUMNS = (
    PageColumn("Command", is_number=True), PageColumn("Status"), PageColumn("Began"), PageColumn("Took"),
    PageColumn("Ended by", is_wide=True),
)  # fmt: skip


def _command_row(part: Any) -> list[PageCell]:
    began, ended = get_path(part, "started_at"), get_path(part, "ended_at")
    is_over = isinstance(began, int | float) and isinstance(ended, int | float)
    return [
        _number_cell(get_path(part, "number")),
        PageCell(state=one_line(get_path(part, "status"))),
        PageCell(time=began) if isinstance(began, int | float) else PageCell(),
        PageCell(format_span(ended - began)) if is_over else PageCell(),
        PageCell(one_line(get_path(part, "ended_by"))),
    ]


_TURN_COLUMNS = (
    PageColumn("No.", is_number=True),
    PageColumn("Who"),
    PageColumn("Text"),
    PageColumn("At", is_wide=True),
)


def _turn_row(part: Any) -> list[PageCell]:
    at = get_path(part, "at")
    return [
        _number_cell(get_path(part, "number")),
        PageCell(one_line(get_path(part, "role")), note=one_line(get_path(part, "kind"))),
        PageCell(one_line(get_path(part, "text"))),
        PageCell(time=at) if isinstance(at, int | float) else PageCell(),
    ]


# Replicas


async def replicas_page(gateway: Gateway, source: PageSource, query: Query) -> PageView:
    """Those that are present, and those that have gone as far as the history has them."""
    leases, ended = await asyncio.gather(gateway.client.leases.list(), gateway.client.leases.history(limit=MAX_ENDED))
    present = {lease.name.removeprefix(PRESENCE): lease for lease in leases if lease.name.startswith(PRESENCE)}
    leader = next((lease for lease in leases if lease.name == LEADER), None)
    gone: dict[str, Any] = {}
    for grant in ended:  # the latest first
        if grant.name.startswith(PRESENCE) and grant.name.removeprefix(PRESENCE) not in present:
            gone.setdefault(grant.name.removeprefix(PRESENCE), grant)
    connections = [lease.holder for lease in leases if lease.name.startswith(SUPERVISOR_LEASE)]
    rows = []
    for name in (*sorted(present, key=natural_order), *gone):
        record: Any = present.get(name) or gone[name]
        since = (
            PageCell(when=("for", record.acquired_at.timestamp()))
            if name in present
            else PageCell(when=("ago", record.ended_at.timestamp()))
        )
        state = _replica_state(name, present, leader)
        rows.append([
            PageCell(name, link("/replica", name=name)),
            PageCell(state=state, note="" if name in present else _ENDINGS[gone[name].outcome]),
            PageCell(process_of(record)),
            PageCell(number=sum(_is_of(holder, name) for holder in connections)),
            since,
        ])  # fmt: skip
    columns = (
        PageColumn("Replica"), PageColumn("State"), PageColumn("Process", is_wide=True),
        PageColumn("Supervisors", is_number=True, is_wide=True), PageColumn("Since"),
    )  # fmt: skip
    panel = table("Replicas", columns, rows, empty="No replica is present.")
    return PageView("Replicas", database_time(leases), {"rows": panel})


def _replica_state(name: str, present: Mapping[str, Any], leader: Any) -> str:
    if name not in present:
        return "gone"
    return "leads" if leader is not None and _is_of(leader.holder, name) else "stands by"


def _is_of(holder: str, replica: str) -> bool:
    """Whether a lease of ``holder`` is that of the replica: the elector adds a nonce to its name."""
    return holder == replica or holder.startswith(f"{replica[:180]}:")


def _replica_cell(lease: Any) -> PageCell:
    return PageCell(lease.holder, link("/replica", name=lease.holder), is_name=True)


async def replica_page(gateway: Gateway, source: PageSource, query: Query) -> PageView:
    name = query.get("name", "")
    client = gateway.client
    leases, presences, terms = await asyncio.gather(
        client.leases.list(), client.leases.history(PRESENCE + name, limit=100),
        client.leases.history(LEADER, limit=MAX_ENDED),
    )  # fmt: skip
    at = database_time(leases)
    held = [lease for lease in leases if _is_of(lease.holder, name)]
    presence = next((lease for lease in held if lease.name == PRESENCE + name), None)
    ended = [*presences, *(grant for grant in terms if _is_of(grant.holder, name))]
    grants: list[Any] = [*held, *ended]
    began = min((grant.acquired_at.timestamp() for grant in grants), default=at)
    window = WINDOWS.get(query.get("window", ""), HOUR if at - began < HOUR else DAY)
    panels = {
        "gone": _gone_panel(presence, presences),
        "facts": facts("Now", await _replica_facts(gateway, name, presence, held)),
        "timeline": {
            **build_timeline([PRESENCE + name, LEADER], held, ended, at, window),
            "title": "Presence and terms as leader", "href": link("/replica", name=name),
        },
        "held": table("Leases it holds", _HELD_COLUMNS, [_held_row(lease) for lease in held if lease is not presence]),
    }  # fmt: skip
    return PageView("Replica", at, panels, name)


def _gone_panel(presence: Any, presences: Sequence[Any]) -> Panel:
    """Dims the page while the replica is not present."""
    last = presences[0] if presences and presence is None else None
    if last is None:
        return {"kind": "gone", "text": "", "at": None}
    return {"kind": "gone", "text": _ENDINGS[last.outcome], "at": last.ended_at.timestamp()}


async def _replica_facts(gateway: Gateway, name: str, presence: Any, held: Sequence[Any]) -> list[tuple[str, PageCell]]:
    if presence is None:
        return [("State", PageCell(state="gone", note="it answers no request"))]
    leads = next((lease for lease in held if lease.name == LEADER), None)
    try:
        address = (await gateway.peers.find(name)).address
    except Problem:
        address = gateway.address if name == gateway.replica else ""
    began = presence.info.get("started")
    rows = [
        ("State", PageCell(state="stands by" if leads is None else "leads")),
        ("Leads since", PageCell() if leads is None else _since(leads)),
        ("Present since", _since(presence)),
        ("Time left", lease_bar(presence)),
        ("Process", PageCell(process_of(presence))),
        ("Process began", PageCell(time=began) if isinstance(began, int | float) else PageCell()),
        ("Address", PageCell(address)),
        ("Supervisors", PageCell(number=sum(lease.name.startswith(SUPERVISOR_LEASE) for lease in held))),
    ]
    if name != gateway.replica:
        return [*rows, ("Figures", PageCell("its hooks are counted on its own dashboard"))]
    agents = gateway.agents
    return [
        *rows,
        ("This page", PageCell("is answered by this replica")),
        ("Hooks", PageCell(", ".join(f"{kind} {count}" for kind, count in agents.hooks.most_common()) or "none yet")),
        ("Hooks refused", PageCell(number=agents.busy, note="the lock of the agent was not free in time")),
    ]


def _since(lease: Any) -> PageCell:
    at = lease.acquired_at.timestamp()
    return PageCell(time=at, when=("for", at))


_HELD_COLUMNS = (
    PageColumn("Lease"),
    PageColumn("Held for"),
    PageColumn("Fence", is_number=True),
    PageColumn("Time left"),
)


def _held_row(lease: Any) -> list[PageCell]:
    name = lease.name
    sandbox = name.removeprefix(SUPERVISOR_LEASE) if name.startswith(SUPERVISOR_LEASE) else ""
    return [
        PageCell(name, link("/lease", name=name), note=f"sandbox {sandbox}" if sandbox else ""),
        PageCell(when=("for", lease.acquired_at.timestamp())),
        PageCell(number=lease.fence),
        lease_bar(lease),
    ]
