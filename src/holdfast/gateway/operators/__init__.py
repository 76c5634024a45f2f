"""What operators see and what they may do, over HTTP: as ``holdfast`` tells and does it on the command line.

answers     what is told, field by field: what is not named there is not told
reading     what there is: leases, history, locks, operations, the log, relays, reviews, gates, the audit
commanding  governed commands, each by somebody, for a reason, and on the record
"""

from __future__ import annotations

from fastapi import APIRouter

from holdfast.gateway.operators import commanding, reading

router = APIRouter()
router.routes.extend(reading.router.routes)
router.routes.extend(commanding.router.routes)
loops = commanding.loops
