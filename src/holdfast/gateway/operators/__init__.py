"""What operators see and do over HTTP, as the ``holdfast`` command line does it.

models    the answers: the library's records, without what is not for clients
queries   leases, history, locks, operations, the log, relays, reviews, gates, the audit
commands  governed commands: each has an actor and a reason, and is audited
"""

from __future__ import annotations

from fastapi import APIRouter

from holdfast.gateway.operators import commands, queries

router = APIRouter()
router.routes.extend(queries.router.routes)
router.routes.extend(commands.router.routes)
loops = commands.loops
