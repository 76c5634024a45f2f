"""The OpenAPI document: what the routes say, and what the shield may answer in their place."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from holdfast.gateway import rules
from holdfast.gateway.problem import documented

_ANY = (400, 401, 408, 413, 414, 421, 431, 503)
_WRITES = (403, 429)
_KEYED = (409, 410, 422)
"""What becomes of an Idempotency-Key."""


def describe(app: FastAPI) -> None:
    """FastAPI's own, in which every error is a problem."""
    made = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(made())
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    components = document.setdefault("components", {})
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answers = operation["responses"]
            if "application/json" in answers.get("422", {}).get("content", {}):
                answers |= _told(422)
            known = (*_ANY, *(() if method.upper() in rules.SAFE else _WRITES), *(_KEYED if method == "post" else ()))
            operation["responses"] = _told(*known) | answers
            if path not in rules.OPEN:
                operation["security"] = [{"bearer": []}, {"password": []}, {}]
    for unused in ("HTTPValidationError", "ValidationError"):
        components.get("schemas", {}).pop(unused, None)
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "password": {"type": "http", "scheme": "basic", "description": "The token as the password, of any user."},
    }
    return document


def _told(*statuses: int) -> dict[str, Any]:
    return {str(status): each for status, each in documented(*statuses).items()}
