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
    choices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.flag[2:].replace("-", "_")


OPTIONS = (
    RunOption("--ttl", float, "Seconds until the lease of a dead holder expires.", "S", default=30.0),
    RunOption("--timeout", float, "Maximum time to wait for the lease, in seconds.", "S"),
    RunOption("--wait", bool, "Wait for the lease without a limit.", default=False),
    RunOption("--skip", bool, "If another process holds the lease, do nothing and exit with 0.", default=False),
    RunOption(
        "--guard", bool, "Fail closed: a timer of the kernel kills the command before the TTL ends, even if holdfast "
        "and its watchdog are both stopped.", default=False,
    ),
    RunOption(
        "--renew-every", float, "With --guard: seconds between renewals. Default: a third of --ttl.", "S",
        needs_guard=True,
    ),
    RunOption(
        "--strict", bool, "With --guard: end the command at the first renewal that fails.", default=False,
        needs_guard=True,
    ),
    RunOption(
        "--wipe-on-start", bool, "With --guard: first release all leases but guards, electors, gates.", default=False,
        needs_guard=True,
    ),
    RunOption(
        "--holder", str, "Name of the holder. With the same secret in HOLDFAST_REENTER, a new run with the same name "
        "takes the lease over at once, and the earlier run is ended. Default: a unique name of host, pid and a random "
        "part.", "LABEL",
    ),
    RunOption(
        "--at-least", float, "Hold the lease for at least S seconds, even if the command ends sooner. For cron: clocks "
        "of machines differ.", "S", default=0.0,
    ),
    RunOption(
        "--failover", str, "What frees the lease of a dead machine: ttl, the end of the TTL; session, the end of its "
        "database session.", "ttl|session", default="ttl", choices=("ttl", "session"),
    ),
    RunOption("--url", str, "Database, same as before the word run.", "URL"),
    RunOption("--schema", str, "Schema, same as before the word run.", "NAME"),
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
            if option.choices and values[option.name] not in option.choices:
                return None
    argv = list(rest)
    if len(words) != 2 or words[0] != "run" or not argv or find_conflict(values) is not None:
        return None
    return {"name": words[1], "argv": argv, **values}


def find_conflict(values: dict[str, Any]) -> str | None:
    """A message about options that exclude or need each other; None if there are none."""
    if (values["timeout"] is not None) + values["wait"] + values["skip"] > 1:
        return "use only one of --timeout, --wait and --skip"
    needing = [option for option in OPTIONS if option.needs_guard]
    if not values["guard"] and any(values[option.name] not in (None, False) for option in needing):
        return "--renew-every, --strict and --wipe-on-start need --guard"
    if values["guard"] and values["failover"] == "session":
        return "--failover session cannot be used with --guard: the lease would be free before the command has ended"
    if values["guard"] and values["holder"] is not None:
        return "--holder cannot be used with --guard: a second instance would take over while the first still runs"
    return None
