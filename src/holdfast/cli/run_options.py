"""The options of `holdfast run`, declared once: ``parse`` and click read the same table."""

from __future__ import annotations

from typing import Any, NamedTuple


class RunOption(NamedTuple):
    flag: str
    type: type[bool | float | str]
    """bool: the option has no value."""
    help: str
    metavar: str | None = None
    default: bool | float | str | None = None
    needs_guard: bool = False

    @property
    def name(self) -> str:
        return self.flag[2:].replace("-", "_")


OPTIONS = (
    RunOption("--ttl", float, "Seconds until the lease of a dead holder expires.", default=30.0),
    RunOption("--timeout", float, "Maximum time to wait for the lease, in seconds.", "S"),
    RunOption("--wait", bool, "Wait for the lease without a limit.", default=False),
    RunOption("--skip", bool, "If another process holds the lease, exit with 0.", default=False),
    RunOption(
        "--guard", bool, "Fail closed even if holdfast and its watchdog are stopped together: the kernel's timer ends "
        "holdfast, and with it the command, before the TTL is over.", default=False,
    ),
    RunOption(
        "--renew-every", float, "With --guard: seconds between renewals. Default: a third of --ttl.", "S",
        needs_guard=True,
    ),
    RunOption(
        "--strict", bool, "With --guard: end with the first renewal that fails.", default=False, needs_guard=True
    ),
    RunOption(
        "--wipe-on-start", bool, "With --guard: release all other leases before the command starts.", default=False,
        needs_guard=True,
    ),
    RunOption(
        "--holder", str, "Who we are. A run of the same holder takes the lease over at once, and the earlier one is "
        "ended: give it to what replaces itself. Default: host, pid and a nonce, which no other run has.", "LABEL",
    ),
    RunOption("--url", str, "The database, as the option before run.", "URL"),
    RunOption("--schema", str, "The schema, as the option before run.", "NAME"),
)  # fmt: skip
_BY_FLAG = {option.flag: option for option in OPTIONS}


def parse(arguments: list[str]) -> dict[str, Any] | None:
    """The arguments of ``run_under_lease`` for `[--url URL] run [OPTIONS] NAME -- COMMAND…`. None for anything else, as
    `--url=…`, `--help` or a mistake: click parses and explains it."""
    values: dict[str, Any] = {option.name: option.default for option in OPTIONS}
    words: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            break
        option = _BY_FLAG.get(argument)
        if option is None:
            if argument.startswith("-"):
                return None
            words.append(argument)
        elif option.type is bool:
            values[option.name] = True
        else:
            try:
                values[option.name] = option.type(next(rest))
            except (StopIteration, ValueError):
                return None
    argv = list(rest)
    if len(words) != 2 or words[0] != "run" or not argv or find_conflict(values) is not None:
        return None
    return {"name": words[1], "argv": argv, **values}


def find_conflict(values: dict[str, Any]) -> str | None:
    """A message about options that exclude or need each other; None if there are none."""
    if (values["timeout"] is not None) + values["wait"] + values["skip"] > 1:
        return "--timeout, --wait and --skip exclude each other"
    needing = [option for option in OPTIONS if option.needs_guard]
    if not values["guard"] and any(values[option.name] not in (None, False) for option in needing):
        return "--renew-every, --strict and --wipe-on-start are for --guard"
    if values["guard"] and values["holder"] is not None:
        return "--guard and --holder exclude each other: a second instance would take over while the first still runs"
    return None
