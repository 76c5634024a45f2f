"""The commands that create, upgrade and remove the tables."""

from __future__ import annotations

from holdfast.commands.execute import MIGRATE, REVERT
from holdfast.commands.registry import CommandRefused, Parameter, Steps, Window, command


@command(MIGRATE, gate="schema", subject="schema", destructive=False)
def schema_migrate(window: Window) -> Steps:
    """Create or upgrade the tables."""
    version = window.client.migrations.version()
    missing = [script for script in window.client.migrations.scripts() if script.version > version]
    yield [f"migration {script.version:04} {script.name} is applied" for script in missing]
    window.client.migrations.up(entry=window.entry)


@command(
    REVERT, gate="schema", subject="schema", destructive=True,
    to=Parameter("version to return to; 0 removes everything, also the audit log", int, option="to", minimum=0),
)  # fmt: skip
def schema_revert(window: Window, *, to: int) -> Steps:
    """Revert migrations and delete the data in their tables."""
    version, scripts = window.client.migrations.version(), window.client.migrations.scripts()
    if not 0 <= to < version:
        raise CommandRefused(
            f"to must be a version from 0 to {version - 1}, not {to}: the tables are at version {version}"
        )
    applied = [script for script in reversed(scripts) if to < script.version <= version]
    yield [
        f"migration {script.version:04} {script.name} is reverted, and the data in its tables is deleted"
        for script in applied
    ]
    # The migrations below the foundation hold the audit entry of this run: ``run`` reverts them afterwards.
    window.client.migrations.down(to=max(to, window.client.migrations.foundation), entry=window.entry)
