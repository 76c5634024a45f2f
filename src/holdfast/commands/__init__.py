"""Governed commands: what operators may do to others' work, each by somebody, for a reason, and on the record.

    from holdfast import commands
    commands.run(client, "lease.release", {"name": "nightly-import"}, actor="jane", reason="its machine is gone")

Every run happens inside the runtime lease and the window of the gate that its command names, and leaves an audit entry.
The modules that own what a command is about declare it with ``command``; whoever calls it past ``run`` is refused.
"""

from holdfast.commands import builtin as _builtin  # noqa: F401 - declares the commands
from holdfast.commands import gateway as _gateway  # noqa: F401 - and these
from holdfast.commands import operations as _operations  # noqa: F401 - and these
from holdfast.commands import reviews as _reviews  # noqa: F401 - and these
from holdfast.commands.checking import check
from holdfast.commands.registry import Command, CommandRefused, CommandUnsettled, Parameter, command, commands
from holdfast.commands.running import BREAK_GLASS, RUNTIME, Outcome, Window, run

__all__ = [
    "BREAK_GLASS",
    "RUNTIME",
    "Command",
    "CommandRefused",
    "CommandUnsettled",
    "Outcome",
    "Parameter",
    "Window",
    "check",
    "command",
    "commands",
    "run",
]
