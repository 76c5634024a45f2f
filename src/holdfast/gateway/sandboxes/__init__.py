"""Sandboxes: records of the store, run by the driver, reconciled by the leader.

records      PURE: the payload of a sandbox, and what is due for it
backends     the driver as the reconciler uses it
models       bodies and answers
routes       create, read, change, delete, log
supervisors  WebSocket connections to the programs in sandboxes
"""

from fastapi import APIRouter

from holdfast.gateway.sandboxes import routes, supervisors

router = APIRouter()
router.routes.extend(routes.router.routes)
router.routes.extend(supervisors.router.routes)
