"""Sandboxes: records of the store, run by the driver, kept true by the leader."""

from fastapi import APIRouter

from holdfast.gateway.sandboxes import routes, supervisors

router = APIRouter()
router.routes.extend(routes.router.routes)
router.routes.extend(supervisors.router.routes)
