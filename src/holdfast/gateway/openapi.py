"""The OpenAPI document: what the routes declare, and the problems that admission may answer in their place."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from holdfast.gateway import admission_rules as rules
from holdfast.gateway.problem import documented

_EVERY_REQUEST = (400, 401, 408, 413, 414, 421, 431, 503)
_WRITES = (403, 429)
_IDEMPOTENCY_KEY = (409, 410, 422)


def extend(app: FastAPI) -> None:
    """Replace ``app.openapi`` by one that adds these problems to FastAPI's document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _add_problems(generate())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_problems(document: dict[str, Any]) -> dict[str, Any]:
    components = document.setdefault("components", {})
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            if "application/json" in responses.get("422", {}).get("content", {}):  # FastAPI's own schema of errors
                responses |= _responses(422)
            statuses = [*_EVERY_REQUEST]
            statuses += [] if method.upper() in rules.SAFE_METHODS else _WRITES
            statuses += _IDEMPOTENCY_KEY if method == "post" else []
            operation["responses"] = _responses(*statuses) | responses
            if path not in rules.OPEN_PATHS:
                operation["security"] = [{"bearer": []}, {"password": []}, {}]
    for unused in ("HTTPValidationError", "ValidationError"):
        components.get("schemas", {}).pop(unused, None)
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "password": {"type": "http", "scheme": "basic", "description": "The token as the password, of any user."},
    }
    return document


def _responses(*statuses: int) -> dict[str, Any]:
    return {str(status): response for status, response in documented(*statuses).items()}
