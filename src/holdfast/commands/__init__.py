"""Governed commands: changes that operators make to the tables, and to leases, locks and operations that other
processes hold or run.

    from holdfast import commands
    commands.run(client, "lease.release", {"name": "nightly-import"}, actor="jane", reason="its machine is gone")

Every run names an actor and a reason, holds the runtime lease (so one command runs at a time), has the command's gate
open, and leaves an audit entry.
A command is declared with ``command`` and can only be run by ``run``: ``registry`` has the declaration, ``execute`` the
run, ``audit_entry`` its outcome, ``self_check`` proves that no command bypasses the rules. The ``…_commands`` modules
and ``gateway`` declare the commands that come with holdfast.
"""

from holdfast.commands import gateway as _gateway  # noqa: F401 - declares commands
from holdfast.commands import lease_commands as _lease_commands  # noqa: F401 - declares commands
from holdfast.commands import operation_commands as _operation_commands  # noqa: F401 - declares commands
from holdfast.commands import policy_commands as _policy_commands  # noqa: F401 - declares commands
from holdfast.commands import problem_commands as _problem_commands  # noqa: F401 - declares commands
from holdfast.commands import schedule_commands as _schedule_commands  # noqa: F401 - declares commands
from holdfast.commands import schema_commands as _schema_commands  # noqa: F401 - declares commands
from holdfast.commands.execute import BREAK_GLASS, RUNTIME, CommandOutcome, run
from holdfast.commands.registry import Command, CommandRefused, CommandUnsettled, Parameter, Window, command, commands
from holdfast.commands.self_check import check

__all__ = [
    "BREAK_GLASS",
    "RUNTIME",
    "Command",
    "CommandOutcome",
    "CommandRefused",
    "CommandUnsettled",
    "Parameter",
    "Window",
    "check",
    "command",
    "commands",
    "run",
]
