"""The governed command that stores the policy of datasets in the database. See ``registry``."""

from __future__ import annotations

import json

from holdfast.commands.registry import CommandRefused, Parameter, Steps, Window, command

_DATASETS = Parameter("declarations by pattern, as JSON; {} stores none", is_json=True, maximum=200_000)


@command("policy.apply", gate="policy", subject="policy", destructive=True, atomic=True, datasets=_DATASETS)
def policy_apply(window: Window, *, datasets: str) -> Steps:
    """Store the policy of datasets in the database."""
    tables = json.loads(datasets)
    current = window.client.policies.get()
    changes = window.client.policies.changes(tables)
    if not changes:
        raise CommandRefused(f"nothing would change: this policy is stored as version {current and current.version}")
    yield changes
    window.client.policies.apply(
        tables, actor=window.actor, reason=window.reason, expected=0 if current is None else current.version
    )
