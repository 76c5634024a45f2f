"""Sandboxes: records of the store, run by the driver, kept true by the leader."""

from fastapi import APIRouter

from holdfast.gateway.sandboxes import routes, supervisors

router = APIRouter()
router.include_router(routes.router)
router.include_router(supervisors.router)
