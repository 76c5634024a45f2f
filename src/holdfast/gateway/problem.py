"""Every error of the gateway as a Problem, and the problems of each route in the OpenAPI document."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticSerializationError
from starlette.exceptions import HTTPException
from starlette.routing import Route

import holdfast
from holdfast.gateway.logs import WARNING, log
from holdfast.problem_json import MEDIA_TYPE, Problem


class ProblemDocument(BaseModel):
    """The members that every problem has; some have further ones."""

    type: str
    title: str
    status: int
    detail: str
    requestId: str = Field(description="The id under which the log has the request.")  # noqa: N815
    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "type": "about:blank",
                    "title": "Not Found",
                    "status": 404,
                    "detail": "there is no such thing",
                    "requestId": "5f0c3a1be2d94c7e",
                }
            ]
        },
    )


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For ``responses=`` of a route: the problems that it may answer with."""
    content = {MEDIA_TYPE: {"schema": ProblemDocument.model_json_schema()}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


_DETAILS = {404: "there is nothing at this path", 405: "this path does not support the method"}
"""Replace the details of Starlette's own errors, which repeat the title."""


def problem_from(error: Exception) -> Problem:
    """The problem that an error of the library is for a client. Raises ``error`` when it is a bug of the gateway."""
    match error:
        case Problem():
            return error
        case holdfast.Conflict():
            return Problem(412, str(error), current=error.current)
        case holdfast.AlreadyExists():
            return Problem(409, str(error), current=error.current, owner=error.owner)
        case holdfast.PolicyDenied():
            return Problem(403, str(error), review=error.review)
        case holdfast.NotAcquired():
            return Problem(503, str(error), headers={"Retry-After": "1"})
        case holdfast.DriverError():
            return Problem(409 if error.status in (404, 409) else 502, str(error))
        case holdfast.EngineError():  # its message names user, host and database
            return Problem(
                503, "the database did not do this: the log has the reason, with this requestId",
                headers={"Retry-After": "1"},
            )  # fmt: skip
        case holdfast.HoldfastError():
            return Problem(503, f"{type(error).__name__}: {error}", headers={"Retry-After": "1"})
        case ValidationError() | PydanticSerializationError():
            raise error  # a stored record or an answer of the gateway is invalid: not an error of the client
        case ValueError():
            return Problem(422, str(error))
    raise error


def respond(error: Exception, request_id: str) -> Response:
    problem = problem_from(error)
    return Response(problem.body(request_id), problem.status, problem.headers, MEDIA_TYPE)


def register(app: FastAPI) -> None:
    """Let ``app`` answer every error with a problem."""

    async def library_error(request: Request, error: Exception) -> Response:
        if isinstance(error, holdfast.EngineError):
            log.event("database.failed", WARNING, why=str(error))
        return respond(error, request.state.request_id)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        is_default = error.detail == HTTPStatus(error.status_code).phrase
        detail = (is_default and _DETAILS.get(error.status_code)) or str(error.detail)
        headers = {"Allow": _allowed_methods(request)} if error.status_code == 405 else error.headers
        return respond(Problem(error.status_code, detail, headers=headers), request.state.request_id)

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        errors = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}"[:300] for each in error.errors()[:20]]
        return respond(Problem(422, "; ".join(errors), errors=errors), request.state.request_id)

    for kind in (Problem, holdfast.HoldfastError, ValueError):
        app.add_exception_handler(kind, library_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)


def _allowed_methods(request: Request) -> str:
    """The methods of all routes of the path: Starlette's own header has those of the first route alone."""
    routes = [each for each in request.app.routes if isinstance(each, Route) and each.matches(request.scope)[0].value]
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))
